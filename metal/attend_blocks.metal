// attend_blocks: exact causal attention of every query over the listed key blocks of its row block (sample.8). A
// threadgroup processes ROWS query rows of one head. The bytes below are for lists that contain every causal block.
//
// inputs       queries (B, Hq, L, D) T at positions length - L ..; keys, values (B, Hkv, capacity, D) T;
//              blocks (B, Hq, R, N) int, ascending, then negative; length () int; scale () float
// outputs      out (B, Hq, L, D) T; lse (B, Hq, L) float
// template     T, D, BLOCK, ROWS, KEYS
// grid         R * BLOCK // ROWS * ROWS * 4, Hq, B
// threadgroup  ROWS * 4, 1, 1
// reads        B * (Hq * L * D * T + 2 * Hkv * S * D * T + Hq * R * N * 4)
// writes       B * Hq * L * (D * T + 4)
threadgroup float4 query_memory[vectors<T>(ROWS * padded<T>(D))];
threadgroup float4 tile_memory[vectors<T>(tile_size<T>(D, KEYS))];
threadgroup T* query_tile = reinterpret_cast<threadgroup T*>(query_memory);
threadgroup T* tile = reinterpret_cast<threadgroup T*>(tile_memory);
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const uint Hq = threadgroups_per_grid.y, L = uint(queries_shape[2]), R = uint(blocks_shape[2]);
const size_t head = size_t(at.z) * Hq + at.y, kv = head / (Hq / uint(keys_shape[1]));
const size_t rows_at = kv * size_t(keys_shape[2]) * D;
// The last row blocks attend the most keys, so their threadgroups start first.
const uint tile_of_rows = threadgroups_per_grid.x - 1 - at.x, row_block = tile_of_rows / (BLOCK / ROWS);
const uint offset = uint(length) - L;
const RowTile rows = {(offset / BLOCK + row_block) * BLOCK + tile_of_rows % (BLOCK / ROWS) * ROWS, offset, uint(length)};
if (rows.empty(ROWS)) {
  return;
}

float2 sums[D / SIDE] = {};
Running running = {-INFINITY, 0.0f};
attend_list<D, BLOCK, ROWS, KEYS>(
    queries + head * L * D, keys + rows_at, values + rows_at, blocks + (head * R + row_block) * size_t(blocks_shape[3]),
    uint(blocks_shape[3]), scale * LOG2_E, rows, query_tile, tile, sums, running, place);

const Spot spot = spot_of(place.lane);
const uint row = place.simdgroup * SIDE + spot.row;
const float total = row_sum(running.sum);
if (rows(row)) {
  const size_t written = head * L + (rows.first + row - offset);
  store_row<D>(sums, running.largest, total, out + written * D, lse + written, spot);
}
