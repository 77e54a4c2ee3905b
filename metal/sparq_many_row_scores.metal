// sparq_many_row_scores: sparq_many_scores from all components of packed rows (quantised.2). Nothing is rounded to T but what
// (quantised.1) rounds.
//
// inputs       chosen (B, Hkv, rank) int; picked (B, Hkv, rank, ROWS) float; factors (B, Hkv, ROWS) float;
//              key_codes (B, Hkv, capacity, D * ROW_BITS / 32) uint; key_scales, key_biases (B, Hkv, capacity,
//              D / ROW_GROUP) T; statistics (B, Hkv, tiles, G, 2) float, read by SOFTMAX_SUMS;
//              left_padding (B,) int; length () int
// outputs      made (B, Hkv, S) float, or of STATISTICS (B, Hkv, tiles, G, 2), of LOGITS (B, Hkv, S, G)
// template     D, G, ROWS, MAKES, ROW_BITS, ROW_GROUP
// grid         tiles * ROWS * 4, Hkv, B
// threadgroup  ROWS * 4, 1, 1
// reads        B * Hkv * (S * (D * ROW_BITS // 8 + 2 * D // ROW_GROUP * T)
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
const uint S = uint(length), padding = min(uint(max(left_padding[at.z], 0)), S);

begin_pass<G, MAKES>(chosen + row * rank, rank, statistics + row * tiles * G * 2, tiles, best, softmax, place);
const uint first = at.x * SCORE_TILE, stop = min(first + SCORE_TILE, S);
const auto rows = packed_rows<D, ROW_BITS, ROW_GROUP>(
    key_codes, key_scales, key_biases, row * size_t(key_codes_shape[2]));
const auto keys = row_keys(rows, padding, stop);
many_pass<G, MAKES>(
    keys, {first, stop, padding, 0}, rank, picked_at, scaled, softmax, made_here, made_here, shared, place);
