// sparq_row_scores: logits of all keys from all components of a quantized KV cache (quantized.2), and the softmax
// statistics of each tile (sparq.4). Tiles and outputs are the same as in sparq_code_scores.
//
// inputs       queries (B, Hq, 1, D) T; keys (B, Hkv, capacity, D * ROW_BITS / 32) uint;
//              keys_scales, keys_biases (B, Hkv, capacity, D / ROW_GROUP) T; left_padding (B,) int;
//              bias (B, Hq, 1, S) A; length () int; scale () float
// outputs      logits (B, Hkv * G // HEADS, stride, HEADS) O, stride = S up to a multiple of 8: float, -inf for invalid
//              keys, or uchar, see to_eight_bits; statistics (B, Hkv * G // HEADS, tiles, HEADS, 2) float
// template     D, G, HEADS, ROW_BITS, ROW_GROUP, KEYS, BIAS
// grid         tiles * (1024 // KEYS), Hkv * G // HEADS, B
// threadgroup  1024 // KEYS, 1, 1
// reads        B * Hkv * (S * (D * ROW_BITS // 8 + 2 * D // ROW_GROUP * T) + G * D * T + BIAS * S * G * A)
// writes       B * Hkv * (S * G * O + tiles * G * 8)
threadgroup float4 q[HEADS * D / 4];
threadgroup float totals[HEADS * D / UNIT];
threadgroup float partial[2 * HEADS * MAX_SIMDGROUPS];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t share = at.z * threadgroups_per_grid.y + at.y, row = share / (G / HEADS);
const uint first_head = at.y % (G / HEADS) * HEADS;
const auto biases = group_bias<BIAS, G>(bias, row, uint(length), first_head);
const ScoreTile tile = make_score_tile(at.x, threadgroups_per_grid.x, length, left_padding[at.z]);
const uint first = tile.first + place.index() * KEYS;                           // valid key of this thread
const uint count = first < tile.stop ? min(uint(KEYS), tile.stop - first) : 0;  // number of its keys

load_units<D, HEADS>(queries + share * HEADS * D, reinterpret_cast<threadgroup float*>(q), totals, place);
float own[KEYS][HEADS];
const size_t rows_at = row * size_t(keys_shape[2]) + tile.padding;
const auto rows = packed_rows<D, ROW_BITS, ROW_GROUP>(keys, keys_scales, keys_biases, rows_at);
row_logits(rows, first, tile.stop, q, totals, own, place);
#pragma clang loop unroll(full)
for (uint v = 0; v < KEYS; ++v) {
#pragma clang loop unroll(full)
  for (uint g = 0; g < HEADS; ++g) {
    own[v][g] = v < count ? biases.add(own[v][g] * scale, tile.padding + first + v, g) : -INFINITY;
  }
}
const uint column = min(tile.padding + first, tile.stride);
const uint written = tile.is_tail ? min(uint(KEYS), tile.stride - column) : count;
store_tile(
    own, first, written, tile, partial, logits + share * tile.stride * HEADS,
    statistics + (share * threadgroups_per_grid.x + at.x) * HEADS * 2, place);
