// sparq_many_scores: a pass over the keys for a group of many query rows, which makes what MAKES says (sparq_many.h): the
// statistics of each tile or a score per key (sparq.3) to (sparq.5).
//
// inputs       chosen (B, Hkv, rank) int; picked (B, Hkv, rank, ROWS) float; factors (B, Hkv, ROWS) float;
//              keys_t (B, Hkv, D, capacity) T; statistics (B, Hkv, tiles, G, 2) float, read by SOFTMAX_SUMS;
//              left_padding (B,) int; length () int
// outputs      made (B, Hkv, S) float, or of STATISTICS (B, Hkv, tiles, G, 2), of LOGITS (B, Hkv, S, G)
// template     D, G, ROWS, MAKES
// grid         tiles * ROWS * 4, Hkv, B
// threadgroup  ROWS * 4, 1, 1
// reads        B * Hkv * (rank * S * T + rank * 4 + rank * ROWS * 4 + ROWS * 4 + (MAKES == 2) * tiles * G * 8)
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
const size_t capacity = size_t(keys_t_shape[3]);

begin_pass<G, MAKES>(chosen + row * rank, rank, statistics + row * tiles * G * 2, tiles, best, softmax, place);
const uint first = at.x * SCORE_TILE, stop = min(first + SCORE_TILE, S);
const auto columns = column_keys(keys_t + row * D * capacity, capacity, padding, stop);
many_pass<G, MAKES>(
    columns, {first, stop, padding, 0}, rank, picked_at, scaled, softmax, made_here, made_here, shared, place);
