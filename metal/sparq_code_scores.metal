// sparq_code_scores: approximate logits of all keys from codes (sparq.21) and, for the softmax, each tile's statistics
// (sparq.4). The last threadgroup along x has the tail, keys of a group that is not full.
//
// inputs       queries (B, Hq, 1, D) T; component_weight (B, Hkv, D) float; codes (B, Hkv, D, words) uint;
//              lo, step (B, Hkv, D, groups) half; centre (B, Hkv, D) float; keys (B, Hkv, capacity, D) T;
//              left_padding (B,) int; rank, length () int; scale () float
// outputs      logits (B, Hkv, stride, G) O, stride = S up to a multiple of 8: float, -inf for invalid keys, or uchar, see
//              narrowed; statistics (B, Hkv, tiles, G, 2) float
// template     D, G, WEIGHTED, BITS, KEYS
// grid         tiles * (1024 // KEYS), Hkv, B
// threadgroup  1024 // KEYS, 1, 1
// reads        B * Hkv * (rank * (S // 64) * (8 * BITS + 4) + rank * (S % 64) * T + G * D * T + WEIGHTED * D * 4 + rank * 4)
// writes       B * Hkv * (S * G * O + tiles * G * 8)
threadgroup uint4 component[D / 4];
threadgroup int chosen[D];
threadgroup float q_r[D * G];
threadgroup float factor[G];
threadgroup float partial[2 * G * MAX_SIMDGROUPS];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint padding = uint(clamp(left_padding[at.z], 0, length));
const uint S = uint(length) - padding;  // of this row
const uint coded = S / GROUP_KEYS * GROUP_KEYS;
const bool is_tail = at.x + 1 == threadgroups_per_grid.x;
const uint first = is_tail ? coded + place.index() : at.x * SCORE_TILE + place.index() * KEYS;  // valid key of this thread
const uint count = is_tail ? (first < S ? 1 : 0) : (first < coded ? KEYS : 0);  // of its keys

choose_components<D, G, WEIGHTED>(
    queries + row * G * D, component_weight + (WEIGHTED ? row * D : 0), uint(rank),
    reinterpret_cast<threadgroup uint*>(component), chosen, q_r, place);
coverage_factors<D, G, WEIGHTED>(queries + row * G * D, uint(rank), scale, q_r, factor, place);

float own[KEYS][G] = {};
if (is_tail && count > 0) {
  tail_logits<G>(
      keys + (row * size_t(keys_shape[2]) + padding + first) * D, centre + row * D, uint(rank), chosen, q_r, own[0]);
} else if (count > 0) {
  using Word = typename conditional<KEYS * BITS == 16, ushort, uint>::type;
  const size_t words = size_t(codes_shape[3]);
  const size_t groups = size_t(lo_shape[3]);
  coded_logits<G, KEYS, BITS, Word>(
      codes + row * D * words, words, lo + row * D * groups, step + row * D * groups, groups, first, uint(rank), chosen,
      q_r, own);
}
#pragma clang loop unroll(full)
for (uint v = 0; v < KEYS; ++v) {
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    own[v][g] = v < count ? own[v][g] * factor[g] : -INFINITY;
  }
}
float largest[G];
device float2* tile = reinterpret_cast<device float2*>(statistics) + (row * threadgroups_per_grid.x + at.x) * G;
tile_statistics(own, largest, partial, tile, place);

const size_t stride = (uint(length) + 7) / 8 * 8;
store_scores(
    logits + (row * stride + padding + first) * G, own, largest, is_tail ? uint(padding + first < stride) : count,
    padding * G % 4 == 0);
const uint stop = min(padding, (at.x + 1) * SCORE_TILE);
for (uint j = at.x * SCORE_TILE + place.index(); j < stop; j += place.simdgroups * LANES) {
  store_none<G>(logits + (row * stride + j) * G);
}
