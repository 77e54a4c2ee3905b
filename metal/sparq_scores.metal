// sparq_scores: approximate logits of all keys (sparq.3), and the softmax statistics of each tile (sparq.4). A
// threadgroup scores a tile of 1,024 keys with HEADS query heads of a KV head.
//
// inputs       queries (B, Hq, 1, D) T; component_weight (B, Hkv, D) float; keys_t (B, Hkv, D, capacity) T;
//              left_padding (B,) int; bias (B, Hq, 1, S) A; rank, length () int; scale () float
// outputs      logits (B, Hkv * G // HEADS, stride, HEADS) float, -inf for invalid keys, stride = S up to a multiple of 4;
//              statistics (B, Hkv * G // HEADS, tiles, HEADS, 2) float
// template     D, G, HEADS, WEIGHTED, ALIGNED, BIAS
// grid         tiles * 256, Hkv * G // HEADS, B
// threadgroup  256, 1, 1
// reads        B * Hkv * (rank * S * T + G * D * T + WEIGHTED * D * 4 + BIAS * S * G * A)
// writes       B * Hkv * (S * G * 4 + tiles * G * 8)
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
const uint S = uint(length);
const uint stride = (S + SCORE_KEYS - 1) / SCORE_KEYS * SCORE_KEYS;
const uint padding = uint(max(left_padding[at.z], 0));
const uint first = (at.x * place.threads() + place.index()) * SCORE_KEYS;
const size_t capacity = size_t(keys_t_shape[3]);

choose_components<D, G, HEADS, WEIGHTED>(
    queries + row * G * D, component_weight + (WEIGHTED ? row * D : 0), first_head, uint(rank),
    reinterpret_cast<threadgroup uint*>(component), chosen, q_r, place);
coverage_factors<D, HEADS, WEIGHTED>(queries + share * HEADS * D, uint(rank), scale, q_r, factor, place);

float own[SCORE_KEYS][HEADS] = {};
if (first < S && first + SCORE_KEYS > padding) {
  approximate_logits<HEADS, ALIGNED>(
      keys_t + row * D * capacity + first, capacity, uint(rank), min(SCORE_KEYS, S - first), chosen, q_r, own);
}
#pragma clang loop unroll(full)
for (uint v = 0; v < SCORE_KEYS; ++v) {
  const uint j = first + v;
#pragma clang loop unroll(full)
  for (uint g = 0; g < HEADS; ++g) {
    own[v][g] = j >= padding && j < S ? biases.add(own[v][g] * factor[g], j, g) : -INFINITY;
  }
}
if (first < S) {
  device float4* written = reinterpret_cast<device float4*>(logits) + (share * stride + first) * HEADS / 4;
#pragma clang loop unroll(full)
  for (uint i = 0; i < HEADS; ++i) {
    const uint at_0 = 4 * i, at_1 = at_0 + 1, at_2 = at_0 + 2, at_3 = at_0 + 3;
    written[i] = float4(
        own[at_0 / HEADS][at_0 % HEADS], own[at_1 / HEADS][at_1 % HEADS], own[at_2 / HEADS][at_2 % HEADS],
        own[at_3 / HEADS][at_3 % HEADS]);
  }
}
device float2* tile = reinterpret_cast<device float2*>(statistics) + (share * threadgroups_per_grid.x + at.x) * HEADS;
float largest[HEADS];
tile_statistics(own, largest, partial, tile, place);
