// attend_rows: exact causal attention of a few queries over all keys. Row r of a query group is query r % L of query
// head r / L in the group. A threadgroup attends to one part of the keys with ROWS rows. If the registers cannot hold
// all rows of the group, the rows are divided among `shares` threadgroups, each of which reads the keys.
//
// inputs       queries (B, Hq, L, D) T at positions length - L ..; keys, values (B, Hkv, capacity, D) T;
//              left_padding (B) int; length () int; scale () float
// outputs      out (B, Hkv, splits, G * L, D) O; lse (B, Hkv, splits, G * L) float
// template     T, D, ROWS, KEYS
// grid         splits * ROWS * 4, Hkv * shares, B
// threadgroup  ROWS * 4, 1, 1
// reads        B * (Hkv * (2 * S * D * T + G * L * D * T) + 4)
// writes       B * Hkv * splits * G * L * (D * O + 4)
threadgroup float4 tile_memory[vectors<T>(tile_size<T>(D, KEYS))];
threadgroup T* tile = reinterpret_cast<threadgroup T*>(tile_memory);
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const uint Hkv = uint(keys_shape[1]), splits = threadgroups_per_grid.x, shares = threadgroups_per_grid.y / Hkv;
const uint L = uint(queries_shape[2]), count = uint(queries_shape[1]) / Hkv * L, S = uint(length);
const size_t kv = size_t(at.z) * Hkv + at.y / shares;
const size_t group = kv * splits + at.x;
const GroupRows rows = {at.y % shares * ROWS + place.simdgroup * SIDE, count};

const uint valid_from = min(uint(max(int(left_padding[at.z]), 0)), S);
const Part part = make_part(S - valid_from, splits, at.x);
const uint first = valid_from + part.first, end = S - L + rows.row(0, spot_of(place.lane)) % L + 1;
const size_t rows_at = (kv * size_t(keys_shape[2]) + first) * D;
const KeyRange<D, T> range = {keys + rows_at, values + rows_at, part.count, max(end, first) - first};
attend_part<D, ROWS, KEYS>(
    queries + kv * count * D, range, rows, scale, tile, out + group * count * D, lse + group * count, place);
