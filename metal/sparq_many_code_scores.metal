// sparq_many_code_scores: sparq_many_scores from codes (sparq.21). The last threadgroup along x has the tail, keys of a
// group that is not full.
//
// inputs       chosen (B, Hkv, rank) int; picked (B, Hkv, rank, ROWS) float; factors (B, Hkv, ROWS) float;
//              codes (B, Hkv, D, words) uint; lo, step (B, Hkv, D, groups) half; centre (B, Hkv, D) float;
//              keys (B, Hkv, capacity, D) T; statistics (B, Hkv, tiles, G, 2) float, read by SOFTMAX_SUMS;
//              left_padding (B,) int; length () int
// outputs      made (B, Hkv, S) float, or of STATISTICS (B, Hkv, tiles, G, 2), of LOGITS (B, Hkv, S, G)
// template     D, G, ROWS, MAKES, BITS
// grid         tiles * ROWS * 4, Hkv, B
// threadgroup  ROWS * 4, 1, 1
// reads        B * Hkv * (rank * (S // 64) * (8 * BITS + 4) + rank * (S % 64) * T + rank * 4
//              + rank * 4 + rank * ROWS * 4 + ROWS * 4 + (MAKES == 2) * tiles * G * 8)
// writes       B * Hkv * (tiles * G * 8 if MAKES == 1 else S * G * 4 if MAKES == 8 else S * 4)
threadgroup float4 staged_keys[MANY_PART * LANES];
threadgroup float4 staged_queries[MANY_PART * ROWS / 4];
threadgroup int best[D];
threadgroup float2 softmax[G];
const ManyShared shared = {staged_keys, staged_queries, best};
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint tiles = threadgroups_per_grid.x, rank = uint(chosen_shape[2]);
const auto picked_at = picked + row * rank * ROWS;
const Scaled scaled = {factors + row * ROWS};
device float* made_here = made_at<G, MAKES>(made, row, uint(length), at.x, tiles);
const ScoreTile tile = make_score_tile(at.x, tiles, length, left_padding[at.z]);
const ManyTile keys_at = {tile.first, tile.stop, 0, tile.padding};

begin_pass<G, MAKES>(chosen + row * rank, rank, statistics + row * tiles * G * 2, tiles, best, softmax, place);
if (tile.is_tail) {
  const auto rows = plain_rows<D>(keys, row * size_t(keys_shape[2]) + tile.padding);
  many_pass<G, MAKES>(
      tail_keys(rows, centre + row * D, tile.stop), keys_at, rank, picked_at, scaled, softmax, made_here, made_here, shared,
      place);
} else {
  const size_t words = size_t(codes_shape[3]), groups = size_t(lo_shape[3]);
  const auto coded = coded_keys<BITS>(
      codes + row * D * words, words, lo + row * D * groups, step + row * D * groups, groups, tile.stop);
  many_pass<G, MAKES>(coded, keys_at, rank, picked_at, scaled, softmax, made_here, made_here, shared, place);
}
make_none<G, MAKES>(made_here, tile, place);
