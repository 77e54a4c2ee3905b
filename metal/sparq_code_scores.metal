// sparq_code_scores: approximate logits of all keys from int4 codes (sparq.21), and the softmax statistics of each tile
// (sparq.4). A threadgroup scores a tile of 1,024 int4 keys with HEADS query heads of a KV head. The last threadgroup
// along x scores the tail: the keys after the last full group. If `keys` has less than `length` rows, these are the last
// keys.
//
// inputs       queries (B, Hq, 1, D) T; component_weight (B, Hkv, D) float; codes (B, Hkv, D, words) uint;
//              lo, step (B, Hkv, D, groups) half; center (B, Hkv, D) float; keys (B, Hkv, capacity) ROWS;
//              left_padding (B,) int; bias (B, Hq, 1, S) A; rank, length () int; scale () float
// outputs      logits (B, Hkv * G // HEADS, stride, HEADS) O, stride = S up to a multiple of 8: float, -inf for invalid
//              keys, or uchar, see to_eight_bits; statistics (B, Hkv * G // HEADS, tiles, HEADS, 2) float
// template     D, G, HEADS, WEIGHTED, KEYS, BIAS
// grid         tiles * (1024 // KEYS), Hkv * G // HEADS, B
// threadgroup  1024 // KEYS, 1, 1
// reads        B * Hkv * (rank * (S // 64) * 36 + tail + G * D * T + WEIGHTED * D * 4 + rank * 4 + BIAS * S * G * A),
//              where tail is rank * (S % 64) * T for plain rows and at most ROW * (S % 64) for packed rows
// writes       B * Hkv * (S * G * O + tiles * G * 8)
threadgroup uint4 component[vectors_of(D)];
threadgroup int chosen[D];
threadgroup float q_r[D * HEADS];
threadgroup float factor[HEADS];
threadgroup float partial[2 * HEADS * MAX_SIMDGROUPS];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t share = at.z * threadgroups_per_grid.y + at.y, row = share / (G / HEADS);
const uint first_head = at.y % (G / HEADS) * HEADS;
const auto biases = group_bias<BIAS, G>(bias, row, uint(length), first_head);
const ScoreTile tile = make_score_tile(at.x, threadgroups_per_grid.x, length, left_padding[at.z]);
const uint first = tile.first + place.index() * (tile.is_tail ? 1 : KEYS);  // valid key of this thread
const uint count = first < tile.stop ? (tile.is_tail ? 1 : KEYS) : 0;       // number of its keys

choose_components<D, G, HEADS, WEIGHTED>(
    queries + row * G * D, component_weight + (WEIGHTED ? row * D : 0), first_head, uint(rank),
    reinterpret_cast<threadgroup uint*>(component), chosen, q_r, place);
coverage_factors<D, HEADS, WEIGHTED>(queries + share * HEADS * D, uint(rank), scale, q_r, factor, place);

float own[KEYS][HEADS] = {};
if (tile.is_tail && count > 0) {
  const uint rows = uint(keys_shape[2]), missing = uint(max(length - int(rows), 0));
  tail_logits<HEADS>(
      ROWS(keys, row * rows), tile.padding + first - missing, center + row * D, uint(rank), chosen, q_r, own[0]);
} else if (count > 0) {
  using Word = typename conditional<KEYS == 4, ushort, uint>::type;
  const size_t words = size_t(codes_shape[3]);
  const size_t groups = size_t(lo_shape[3]);
  coded_logits<HEADS, KEYS, Word>(
      codes + row * D * words, words, lo + row * D * groups, step + row * D * groups, groups, first, uint(rank), chosen,
      q_r, own);
}
#pragma clang loop unroll(full)
for (uint v = 0; v < KEYS; ++v) {
#pragma clang loop unroll(full)
  for (uint g = 0; g < HEADS; ++g) {
    own[v][g] = v < count ? biases.add(own[v][g] * factor[g], tile.padding + first + v, g) : -INFINITY;
  }
}
const uint written = tile.is_tail ? uint(tile.padding + first < tile.stride) : count;
store_tile(
    own, first, written, tile, partial, logits + share * tile.stride * HEADS,
    statistics + (share * threadgroups_per_grid.x + at.x) * HEADS * 2, place);
