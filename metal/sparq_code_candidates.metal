// sparq_code_candidates: sparq_candidates with 8-bit logits.
//
// inputs       logits (B, Hkv * G // HEADS, stride, HEADS) uchar;
//              statistics (B, Hkv * G // HEADS, score_tiles, HEADS, 2) float; left_padding (B,) int;
//              bias (B, Hq, 1, S) A; length, local_window, top_k () int
// outputs      bits (B, Hkv, tiles * slots) uint; indices (B, Hkv, tiles * slots) int; softmax (B, Hkv, G, 2) float
// template     G, HEADS, BIAS
// grid         tiles * threads, Hkv, B
// threadgroup  threads, 1, 1
// reads        B * Hkv * (S * G + score_tiles * G * 8 + BIAS * S * A)
// writes       B * Hkv * (tiles * slots * 8 + G * 8)
threadgroup uint3 partial[TOP_K_PARTIAL];
threadgroup float2 merged[G];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const Tile tile = make_tile(
    threadgroup_position_in_grid, threadgroups_per_grid, uint(length), uint(top_k), place);
const uint score_tiles = uint(statistics_shape[2]), stride = uint(logits_shape[2]);
auto biases = group_bias<BIAS, G>(bias, tile.row, uint(length), 0);
auto tiles = statistics + size_t(tile.row) * score_tiles * G * 2;

Window window = make_window(length, left_padding[tile.b], local_window);
if (BIAS) {
  window.local = visible_window(window, biases, uint(local_window), partial, place);
}
merge_statistics<G, HEADS>(tiles, score_tiles, merged, place);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint g = place.index(); g < G && tile.first == 0; g += place.threads()) {
  reinterpret_cast<device float2*>(softmax)[size_t(tile.row) * G + g] = merged[g];
}
auto row = logits + size_t(tile.row) * stride * G;
const NarrowedScores<G, HEADS, decltype(row), decltype(tiles), decltype(biases)> scores = {
    row, stride, tiles, score_tiles, merged, biases, window, tile.first};
select_best(scores, tile, bits, indices, partial, place);
