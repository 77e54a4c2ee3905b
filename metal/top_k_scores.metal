// top_k_scores: list the best keys of each tile of a row of scores (sparq.6). A threadgroup processes one tile.
//
// inputs       scores (B, H, S) float; left_padding (B,) int; length, local_window, top_k () int
// outputs      bits (B, H, tiles * slots) uint; indices (B, H, tiles * slots) int
// grid         tiles * threads, H, B
// threadgroup  threads, 1, 1
// reads        B * H * S * 4
// writes       B * H * tiles * slots * 8
threadgroup uint3 partial[TOP_K_PARTIAL];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const Tile tile = make_tile(
    threadgroup_position_in_grid, threadgroups_per_grid, uint(length), uint(top_k), place);
const Window window = make_window(length, left_padding[tile.b], local_window);
auto row = scores + size_t(tile.row) * size_t(length);
select_best(ScoredKeys<decltype(row)>{row, window, tile.first}, tile, bits, indices, partial, place);
