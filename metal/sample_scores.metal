// sample_scores: unnormalized attention mass of each sampled row on each key block (sample.3). A threadgroup processes
// one of `splits` ranges of key blocks and one tile of the sampled rows of a query head.
//
// inputs       queries (B, Hq, L, D) T; keys (B, Hkv, capacity, D) T; samples (max(C, 4), 2) int, first row
//              and end; regions, length, first_head () int; scale () float
// outputs      partials (B, heads, G, C, Nk, ROWS, 2) float; totals (B, heads, G, C, splits, ROWS) float
// template     T, D, G, BLOCK, FRAGMENTS, SIMDGROUPS, KEYS
// grid         tiles * G * C * SIMDGROUPS * 32, splits, B * heads
// threadgroup  SIMDGROUPS * 32, 1, 1
// reads        B * heads * (S * D * T + G * C * rows * D * T)
// writes       B * heads * G * C * (Nk * ROWS * 8 + splits * ROWS * 4)
threadgroup float4 tile_memory[vectors<T>(D * padded<T>(KEYS))];
threadgroup T* tile = reinterpret_cast<threadgroup T*>(tile_memory);
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const uint C = uint(regions), S = uint(length), L = uint(queries_shape[2]);
// Consecutive threadgroups read the same keys.
const uint tiles = threadgroups_per_grid.x / (G * C), tile_rows = SIMDGROUPS * FRAGMENTS * SIDE;
const uint c = at.x / tiles % C, g = at.x / tiles / C, first_row = at.x % tiles * tile_rows;
const uint heads = uint(keys_shape[1]), per_batch = threadgroups_per_grid.z / uint(queries_shape[0]);
const uint b = at.z / per_batch, head = uint(first_head) + at.z % per_batch;

const uint start = uint(samples[2 * c]), count = uint(samples[2 * c + 1]) - start, offset = S - L + start;
const uint end = first_row < count ? offset + min(first_row + tile_rows, count) : 0;
const uint blocks = (S + BLOCK - 1) / BLOCK, size = (blocks + threadgroups_per_grid.y - 1) / threadgroups_per_grid.y;
const SampleRows rows = {first_row + place.simdgroup * FRAGMENTS * SIDE, count, offset};
const size_t sample = (size_t(at.z) * G + g) * C + c, padded_rows = tiles * tile_rows;
const size_t kv = size_t(b) * heads + head;
score_blocks<D, BLOCK, FRAGMENTS, SIMDGROUPS, KEYS>(
    queries + ((kv * G + g) * L + start) * D, keys + kv * size_t(keys_shape[2]) * D, S, min(at.y * size, blocks),
    min((at.y + 1) * size, blocks), scale * LOG2_E, rows, end, uint(padded_rows),
    reinterpret_cast<device float2*>(partials) + sample * blocks * padded_rows,
    totals + (sample * threadgroups_per_grid.y + at.y) * padded_rows, tile, place);
