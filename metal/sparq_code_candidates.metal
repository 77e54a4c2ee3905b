// sparq_code_candidates: sparq_candidates with 8-bit logits.
//
// inputs       logits (B, Hkv, stride, G) uchar; statistics (B, Hkv, score_tiles, G, 2) float; left_padding (B,) int;
//              length, local_window, top_k () int
// outputs      bits (B, Hkv, tiles * slots) uint; indices (B, Hkv, tiles * slots) int; softmax (B, Hkv, G, 2) float
// template     G
// grid         tiles * threads, Hkv, B
// threadgroup  threads, 1, 1
// reads        B * Hkv * (S * G + score_tiles * G * 8)
// writes       B * Hkv * (tiles * slots * 8 + G * 8)
threadgroup uint3 partial[TOP_K_PARTIAL];
threadgroup float2 merged[G];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const Tile tile = make_tile(
    threadgroup_position_in_grid, threadgroups_per_grid, uint(length), uint(top_k), place);
const uint score_tiles = uint(statistics_shape[2]);
auto tiles = statistics + size_t(tile.row) * score_tiles * G * 2;

merge_statistics<G>(tiles, score_tiles, merged, place);
threadgroup_barrier(mem_flags::mem_threadgroup);
if (tile.first == 0 && place.index() < G) {
  reinterpret_cast<device float2*>(softmax)[size_t(tile.row) * G + place.index()] = merged[place.index()];
}
const Window window = make_window(length, left_padding[tile.b], local_window);
auto row = logits + size_t(tile.row) * size_t(logits_shape[2]) * G;
select_best(
    NarrowedScores<G, decltype(row), decltype(tiles)>{row, tiles, score_tiles - 1, merged, window, tile.first}, tile, bits,
    indices, partial, place);
