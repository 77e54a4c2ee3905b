// sparq_components: the components that many query rows of a group are scored by (sparq.1), (sparq.2), those of the queries,
// and c / t_g of (sparq.3). The passes over the keys take them from here: whole queries are more bytes than a tile's codes.
//
// inputs       queries (B, Hq, 1, D) T; component_weight (B, Hkv, D) float; rank () int; scale () float
// outputs      chosen (B, Hkv, rank) int; picked (B, Hkv, rank, ROWS) float, 0 for rows that there are not;
//              factors (B, Hkv, ROWS) float
// template     D, G, ROWS, WEIGHTED
// grid         512, Hkv, B
// threadgroup  512, 1, 1
// reads        B * Hkv * (G * D * T + WEIGHTED * D * 4)
// writes       B * Hkv * (rank * 4 + rank * ROWS * 4 + ROWS * 4)
threadgroup uint4 component[D / 4];
threadgroup int best[D];
threadgroup float sums[MAX_SIMDGROUPS * D];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const auto q = queries + row * G * D;
const uint r = uint(rank);
threadgroup uint* bits = reinterpret_cast<threadgroup uint*>(component);

for (uint d = place.lane; d < D; d += LANES) {
  float sum = 0.0f;
  for (uint g = place.simdgroup; g < G; g += place.simdgroups) {
    sum += abs(float(q[g * D + d]));
  }
  sums[place.simdgroup * D + d] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint d = place.index(); d < D; d += place.threads()) {
  float sum = 0.0f;
  for (uint s = 0; s < place.simdgroups; ++s) {
    sum += sums[s * D + d];
  }
  bits[d] = min(as_type<uint>(WEIGHTED ? sum * component_weight[row * D + d] : sum), as_type<uint>(INFINITY));
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint d = place.index(); d < D; d += place.threads()) {
  const uint larger = larger_components(bits, d, uint(D));
  if (larger < r) {
    const uint i = r == D ? d : larger;  // all of them in their order, in which rows are read
    best[i] = int(d);
    chosen[row * r + i] = int(d);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint g = place.simdgroup; g < ROWS; g += place.simdgroups) {  // uniform
  float total = 0.0f, covered = 0.0f;
  for (uint d = place.lane; d < D && g < G; d += LANES) {
    total += abs(float(q[g * D + d]));
  }
  for (uint i = place.lane; i < r; i += LANES) {
    const float x = g < G ? float(q[g * D + uint(best[i])]) : 0.0f;
    covered += abs(x);
    picked[(row * r + i) * ROWS + g] = x;
  }
  total = simd_sum(total);
  covered = simd_sum(covered);
  if (place.lane == 0) {
    factors[row * ROWS + g] = !WEIGHTED && covered > 0.0f ? scale * rsqrt(covered / total) : scale;
  }
}
