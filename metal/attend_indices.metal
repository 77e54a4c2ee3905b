// attend_indices: exact attention of a query group over an index list (sparq.7). A threadgroup attends to one of
// `splits` parts of the list with HEADS query heads of a KV head. If COUNTED, only the first counts[b, h] entries are
// divided into parts, and threadgroups without entries return at once.
//
// inputs       queries (B, Hq, 1, D) T; keys, values (B, Hkv, capacity) ROWS; indices (B, Hkv, N) int;
//              counts (B, Hkv) int; bias (B, Hq, 1, S) A; length () int; scale () float
// outputs      out (B, Hkv, splits, G, D) O; lse (B, Hkv, splits, G) float
// template     D, G, HEADS, SIMDGROUPS, COUNTED, BIAS
// grid         splits * SIMDGROUPS * 32, Hkv * G // HEADS, B
// threadgroup  SIMDGROUPS * 32, 1, 1
// reads        B * Hkv * (2 * used * ROW + G * D * T + used * 4 + COUNTED * 4 + BIAS * used * G * A)
// writes       B * Hkv * splits * G * (D * O + 4)
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
const uint N = uint(indices_shape[2]), used = COUNTED ? min(uint(counts[row]), N) : N;
const Part part = make_part(used, splits, at.x);
const auto entries = indices + row * N + part.first;
const size_t head = (row * splits + at.x) * G + first_head;
if (part.count == 0) {  // uniform
  store_nothing<D, HEADS>(out + head * D, lse + head, place);
  return;
}

float4 sums[HEADS][RowLayout<D>::chunks] = {};
attend_list<D, HEADS, SIMDGROUPS>(
    queries + (row * G + first_head) * D, ROWS(keys, rows_at), ROWS(values, rows_at),
    entries, part.count, uint(length), scale, group_bias<BIAS, G>(bias, row, uint(length), first_head), NoMass{}, sums,
    shared, place);
store_sums<D, HEADS, SIMDGROUPS>(sums, shared, out + head * D, lse + head, Attended{}, place);
