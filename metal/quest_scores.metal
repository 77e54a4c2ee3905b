// quest_scores: upper bound of q.k for each page, over all queries of the group (quest.2), (quest.3). The current page,
// which contains key length - 1, gets +inf; later pages get -inf. The bounds of these pages are not read. A
// threadgroup scores 64 pages of a KV head. Eight lanes share a page and keep the bounds in registers for all query
// heads.
//
// inputs       queries (B, Hq, 1, D) Q; page_min, page_max (B, Hkv, capacity, D) T; left_padding (B,) int; length () int;
//              page_size () int
// outputs      scores (B, Hkv, P) float
// template     T, D, G
// grid         ceil(P / 64) * 256, Hkv, B
// threadgroup  256, 1, 1
// reads        B * Hkv * (2 * (P - 1) * D * T + G * D * T)
// writes       B * Hkv * P * 4
threadgroup float4 q[G * D / 4];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint P = uint(length - 1) / uint(page_size) + 1, sharing = 8, share = place.lane % sharing;
const size_t bounds_at = row * size_t(page_min_shape[2]) * D;
const int own_keys = length - left_padding[at.z];
const int current = own_keys > 0 ? (own_keys - 1) / page_size : -1;
auto low = reinterpret_cast<const device vec<T, 4>*>(page_min + bounds_at);
auto high = reinterpret_cast<const device vec<T, 4>*>(page_max + bounds_at);

for (uint i = place.index(); i < G * D; i += place.threads()) {
  reinterpret_cast<threadgroup float*>(q)[i] = float(queries[row * G * D + i]);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (uint page = at.x * 64 + place.index() / sharing; page < at.x * 64 + 64; page += place.threads() / sharing) {  // uniform
  float bounds[G] = {};
  for (uint c = share; c < D / 4 && int(page) < current; c += sharing) {
    const float4 least = float4(low[size_t(page) * (D / 4) + c]), most = float4(high[size_t(page) * (D / 4) + c]);
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
      const float4 own = q[g * (D / 4) + c];
      const bool4 positive = own > 0.0f;  // max and min would ignore NaN
      bounds[g] += dot(select(float4(0.0f), own, positive), most) + dot(select(own, float4(0.0f), positive), least);
    }
  }
  float best = -INFINITY;
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    float bound = bounds[g];
    for (uint offset = sharing / 2; offset > 0; offset /= 2) {
      bound += simd_shuffle_xor(bound, ushort(offset));
    }
    best = max(best, isnan(bound) ? FLT_MAX : min(bound, FLT_MAX));
  }
  if (share == 0 && page < P) {
    scores[row * P + page] = int(page) < current ? best : int(page) == current ? INFINITY : -INFINITY;
  }
}
