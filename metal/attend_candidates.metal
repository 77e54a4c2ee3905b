// attend_candidates: select the best keys from the candidates of all tiles (sparq.6) and attend to these keys
// (sparq.7). This is top_k_candidates and attend_indices in one launch, for lists that one threadgroup can process. A
// threadgroup processes HEADS query heads of a KV head. If several threadgroups share a KV head, each repeats the
// selection.
//
// inputs       queries (B, Hq, 1, D) T; keys, values (B, Hkv, capacity) ROWS; candidate_bits (B, Hkv, N) uint;
//              candidate_indices (B, Hkv, N) int; bias (B, Hq, 1, S) A; length () int; scale () float
// outputs      out (B, Hq, 1, D) T; lse (B, Hq, 1) float; recall (B, Hkv) float
// template     D, G, HEADS, SIMDGROUPS, SLOTS, BIAS
// grid         SIMDGROUPS * 32, Hkv * G // HEADS, B
// threadgroup  SIMDGROUPS * 32, 1, 1
// reads        B * Hkv * (2 * SLOTS * ROW + G * D * T + N * 8 + BIAS * SLOTS * G * A)
// writes       B * Hkv * (G * (D * T + 4) + 4)
threadgroup float4 scratch[AttendSizes<D, HEADS, SIMDGROUPS>::scratch / 4];
threadgroup int list[ATTEND_TILE];
threadgroup float factor[HEADS];
threadgroup Running softmax_of[HEADS];
threadgroup uint3 partial[TOP_K_PARTIAL];
threadgroup uint chosen_bits[SLOTS];
threadgroup int chosen[SLOTS];
const AttendShared<D, HEADS, SIMDGROUPS> shared = {scratch, list, factor, softmax_of};
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = (at.z * threadgroups_per_grid.y + at.y) / (G / HEADS);
const uint first_head = at.y % (G / HEADS) * HEADS;
const size_t rows_at = row * size_t(keys_shape[2]);
const size_t head = row * G + first_head;

const uint N = uint(candidate_bits_shape[2]);
auto bits_at = candidate_bits + row * N;
auto indices_at = candidate_indices + row * N;
const Tile tile = {at.z, uint(row), 0, N, min(uint(SLOTS), N), uint(SLOTS), 0};
select_best(
    Candidates<decltype(bits_at), decltype(indices_at)>{bits_at, indices_at}, tile,
    static_cast<threadgroup uint*>(chosen_bits), static_cast<threadgroup int*>(chosen), partial, place);
threadgroup_barrier(mem_flags::mem_threadgroup);
const float share = selected_share<G>(chosen_bits, SLOTS, place.lane);
if (first_head == 0 && place.index() == 0) {
  recall[row] = share;
}

float4 sums[HEADS][RowLayout<D>::chunks] = {};
attend_list<D, HEADS, SIMDGROUPS>(
    queries + head * D, ROWS(keys, rows_at), ROWS(values, rows_at),
    static_cast<threadgroup int*>(chosen), SLOTS, uint(length), scale,
    group_bias<BIAS, G>(bias, row, uint(length), first_head), NoMass{}, sums, shared, place);
store_sums<D, HEADS, SIMDGROUPS>(sums, shared, out + head * D, lse + head, Attended{}, place);
