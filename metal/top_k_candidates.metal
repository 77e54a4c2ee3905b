// top_k_candidates: list the best items of each tile of a row of candidates. A threadgroup processes one tile.
//
// inputs       candidate_bits (B, H, N) uint; candidate_indices (B, H, N) int; top_k () int
// outputs      bits (B, H, tiles * slots) uint; indices (B, H, tiles * slots) int
// grid         tiles * threads, H, B
// threadgroup  threads, 1, 1
// reads        B * H * N * 8
// writes       B * H * tiles * slots * 8
threadgroup uint3 partial[TOP_K_PARTIAL];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const Tile tile = make_tile(
    threadgroup_position_in_grid, threadgroups_per_grid, uint(candidate_bits_shape[2]), uint(top_k), place);
const size_t start = size_t(tile.row) * size_t(candidate_bits_shape[2]) + tile.first;
auto row_bits = candidate_bits + start;
auto row_indices = candidate_indices + start;
select_best(Candidates<decltype(row_bits), decltype(row_indices)>{row_bits, row_indices}, tile, bits, indices, partial, place);
