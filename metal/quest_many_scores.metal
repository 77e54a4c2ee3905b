// quest_many_scores: quest_scores for a group of more query rows than a thread has sums of: a lane keeps its part of a page's
// bounds, which is read once, and the rows come by, STAGED of them at a time.
//
// inputs       queries (B, Hq, 1, D) Q; page_min, page_max (B, Hkv, capacity, D) T; pages () int
// outputs      scores (B, Hkv, P) float
// template     T, D, G
// grid         ceil(P / 64) * 512, Hkv, B
// threadgroup  512, 1, 1
// reads        B * Hkv * (2 * (P - 1) * D * T + G * D * T)
// writes       B * Hkv * P * 4
constexpr uint STAGED = 8, SHARING = 8, CHUNKS = (D / 4 + SHARING - 1) / SHARING;
threadgroup float4 q[STAGED * D / 4];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint P = uint(pages), share = place.lane % SHARING, page = at.x * 64 + place.index() / SHARING;
const size_t bounds_at = row * size_t(page_min_shape[2]) * D;
auto low = reinterpret_cast<const device vec<T, 4>*>(page_min + bounds_at);
auto high = reinterpret_cast<const device vec<T, 4>*>(page_max + bounds_at);

vec<T, 4> least[CHUNKS] = {}, most[CHUNKS] = {};
#pragma clang loop unroll(full)
for (uint i = 0; i < CHUNKS; ++i) {
  const uint c = i * SHARING + share;
  if (c < D / 4 && page + 1 < P) {
    least[i] = low[size_t(page) * (D / 4) + c];
    most[i] = high[size_t(page) * (D / 4) + c];
  }
}
float best = page + 1 < P ? -INFINITY : INFINITY;
for (uint start = 0; start < G; start += STAGED) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = place.index(); i < STAGED * D; i += place.threads()) {
    const uint g = min(start + i / D, uint(G) - 1);  // the last one again in place of rows that there are not
    reinterpret_cast<threadgroup float*>(q)[i] = float(queries[(row * G + g) * D + i % D]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float bounds[STAGED] = {};
#pragma clang loop unroll(full)
  for (uint i = 0; i < CHUNKS; ++i) {
    const uint c = i * SHARING + share;
    if (c < D / 4) {
#pragma clang loop unroll(full)
      for (uint g = 0; g < STAGED; ++g) {
        const float4 own = q[g * (D / 4) + c];
        const bool4 positive = own > 0.0f;  // max and min would pass over NaN
        bounds[g] += dot(select(float4(0.0f), own, positive), float4(most[i])) +
            dot(select(own, float4(0.0f), positive), float4(least[i]));
      }
    }
  }
#pragma clang loop unroll(full)
  for (uint g = 0; g < STAGED; ++g) {
    float bound = bounds[g];
#pragma clang loop unroll(full)
    for (uint offset = SHARING / 2; offset > 0; offset /= 2) {
      bound += simd_shuffle_xor(bound, ushort(offset));
    }
    best = max(best, isnan(bound) ? INFINITY : bound);
  }
}
if (share == 0 && page < P) {
  scores[row * P + page] = best;
}
