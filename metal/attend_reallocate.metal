// attend_reallocate: attend_indices that also sums the approximate attention mass alpha of the listed keys (sparq.8).
// With one split, this kernel mixes in the mean value (sparq.10); with several splits, merge_reallocate does so.
//
// inputs       queries (B, Hq, 1, D) T; keys, values (B, Hkv, capacity) ROWS; indices (B, Hkv, N) int;
//              logits (B, Hkv * G // SCORED, stride, SCORED) float;
//              softmax (B, Hkv, G, 2) float; value_mean (B, Hkv, D) float;
//              bias (B, Hq, 1, S) A; length () int; scale () float
// outputs      out (B, Hkv, splits, G, D) O; lse, alpha (B, Hkv, splits, G) float
// template     D, G, HEADS, SIMDGROUPS, SCORED, BIAS
// grid         splits * SIMDGROUPS * 32, Hkv * G // HEADS, B
// threadgroup  SIMDGROUPS * 32, 1, 1
// reads        B * Hkv * (2 * N * ROW + G * D * T + N * 4 + N * G * 4 + G * 8 + D * 4 + BIAS * N * G * A)
// writes       B * Hkv * splits * G * (D * O + 8)
threadgroup float4 scratch[AttendSizes<D, HEADS, SIMDGROUPS>::scratch / 4];
threadgroup int list[ATTEND_TILE];
threadgroup float factor[HEADS];
threadgroup Running softmax_of[HEADS];
const AttendShared<D, HEADS, SIMDGROUPS> shared = {scratch, list, factor, softmax_of};
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const uint splits = threadgroups_per_grid.x;
const size_t row = (at.z * threadgroups_per_grid.y + at.y) / (G / HEADS);
const uint first_head = at.y % (G / HEADS) * HEADS;
const size_t rows_at = row * size_t(keys_shape[2]);
const Part part = make_part(uint(indices_shape[2]), splits, at.x);
const auto entries = indices + row * size_t(indices_shape[2]) + part.first;
const size_t head = (row * splits + at.x) * G + first_head;

float4 sums[HEADS][RowLayout<D>::chunks] = {};
const uint stride = uint(logits_shape[2]);
auto logits_at = logits + row * stride * G;
auto softmax_at = softmax + row * G * 2;
auto mean_at = value_mean + row * D;
const ChosenMass<SCORED, decltype(logits_at), decltype(softmax_at)> mass = {logits_at, softmax_at, stride, first_head};
attend_list<D, HEADS, SIMDGROUPS>(
    queries + (row * G + first_head) * D, ROWS(keys, rows_at), ROWS(values, rows_at),
    entries, part.count, uint(length), scale, group_bias<BIAS, G>(bias, row, uint(length), first_head), mass, sums, shared,
    place);
if (splits == 1) {
  const Reallocated<D, decltype(mean_at)> mixed = {mean_at};
  store_sums<D, HEADS, SIMDGROUPS>(sums, shared, out + head * D, lse + head, mixed, place);
} else {
  store_sums<D, HEADS, SIMDGROUPS>(sums, shared, out + head * D, lse + head, Attended{}, place);
}
if (place.index() < HEADS) {
  alpha[head + place.index()] = softmax_of[place.index()].mass;
}
