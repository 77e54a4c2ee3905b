// sparq_scores: approximate logits of all keys (sparq.3), and the softmax statistics of each tile (sparq.4). A
// threadgroup scores a tile of 1,024 keys of a KV head.
//
// inputs       queries (B, Hq, 1, D) T; component_weight (B, Hkv, D) float; keys_t (B, Hkv, D, capacity) T;
//              left_padding (B,) int; rank, length () int; scale () float
// outputs      logits (B, Hkv, stride, G) float, -inf for invalid keys, stride = S up to a multiple of 4;
//              statistics (B, Hkv, tiles, G, 2) float
// template     D, G, WEIGHTED, ALIGNED
// grid         tiles * 256, Hkv, B
// threadgroup  256, 1, 1
// reads        B * Hkv * (rank * S * T + G * D * T + WEIGHTED * D * 4)
// writes       B * Hkv * (S * G * 4 + tiles * G * 8)
threadgroup uint4 component[D / 4];
threadgroup int chosen[D];
threadgroup float q_r[D * G];
threadgroup float factor[G];
threadgroup float partial[2 * G * MAX_SIMDGROUPS];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint S = uint(length);
const uint stride = (S + SCORE_KEYS - 1) / SCORE_KEYS * SCORE_KEYS;
const uint padding = uint(max(left_padding[at.z], 0));
const uint first = (at.x * place.threads() + place.index()) * SCORE_KEYS;
const size_t capacity = size_t(keys_t_shape[3]);

choose_components<D, G, WEIGHTED>(
    queries + row * G * D, component_weight + (WEIGHTED ? row * D : 0), uint(rank),
    reinterpret_cast<threadgroup uint*>(component), chosen, q_r, place);
coverage_factors<D, G, WEIGHTED>(queries + row * G * D, uint(rank), scale, q_r, factor, place);

float own[SCORE_KEYS][G] = {};
if (first < S && first + SCORE_KEYS > padding) {
  approximate_logits<G, ALIGNED>(
      keys_t + row * D * capacity + first, capacity, uint(rank), min(SCORE_KEYS, S - first), chosen, q_r, own);
}
#pragma clang loop unroll(full)
for (uint v = 0; v < SCORE_KEYS; ++v) {
  const uint j = first + v;
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    own[v][g] = j >= padding && j < S ? own[v][g] * factor[g] : -INFINITY;
  }
}
if (first < S) {
  device float4* written = reinterpret_cast<device float4*>(logits) + (row * stride + first) * G / 4;
#pragma clang loop unroll(full)
  for (uint i = 0; i < G; ++i) {
    const uint at_0 = 4 * i, at_1 = at_0 + 1, at_2 = at_0 + 2, at_3 = at_0 + 3;
    written[i] = float4(
        own[at_0 / G][at_0 % G], own[at_1 / G][at_1 % G], own[at_2 / G][at_2 % G], own[at_3 / G][at_3 % G]);
  }
}
device float2* tile = reinterpret_cast<device float2*>(statistics) + (row * threadgroups_per_grid.x + at.x) * G;
float largest[G];
tile_statistics(own, largest, partial, tile, place);
