// attend_rows_indices: attend_indices for a group with more rows than the registers of one of its threadgroups hold, such as
// the queries of a check: as attend_rows, with the keys of a list. All of its entries are in use, or, with COUNTED, the
// first counts[b, h], which are shared out.
//
// inputs       queries (B, Hq, 1, D) T; keys, values (B, Hkv, capacity, D) T; indices (B, Hkv, N) int;
//              counts (B, Hkv) int; length () int; scale () float
// outputs      out (B, Hkv, splits, G, D) O; lse (B, Hkv, splits, G) float
// template     T, D, ROWS, KEYS, COUNTED
// grid         splits * ROWS * 4, Hkv * shares, B
// threadgroup  ROWS * 4, 1, 1
// reads        B * Hkv * (2 * used * D * T + G * D * T + used * 4 + COUNTED * 4)
// writes       B * Hkv * splits * G * (D * O + 4)
threadgroup float4 tile_memory[vectors<T>(tile_size<T>(D, KEYS))];
threadgroup T* tile = reinterpret_cast<threadgroup T*>(tile_memory);
threadgroup int listed[KEYS];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const uint Hkv = uint(keys_shape[1]), splits = threadgroups_per_grid.x, shares = threadgroups_per_grid.y / Hkv;
const uint N = uint(indices_shape[2]), G = uint(queries_shape[1]) / Hkv;
const size_t kv = size_t(at.z) * Hkv + at.y / shares;
const size_t group = kv * splits + at.x;
const GroupRows rows = {at.y % shares * ROWS + place.simdgroup * SIDE, G};

const Part part = make_part(COUNTED ? min(uint(counts[kv]), N) : N, splits, at.x);
const size_t rows_at = kv * size_t(keys_shape[2]) * D;
const auto list = key_list<D, KEYS, T>(
    keys + rows_at, values + rows_at, indices + kv * N + part.first, part.count, uint(length), listed);
attend_part<D, ROWS, KEYS>(queries + kv * G * D, list, rows, scale, tile, out + group * G * D, lse + group * G, place);
