// saap_indices: list the keys of a decode step without gaps, padded with -1 (saap.10). A threadgroup reads the sizes of
// all visited buckets and writes LIST_TILE entries.
//
// inputs       visited (B, Hkv, SLOTS) int; offsets (B, Hkv, C + 1) int; key_ids (B, Hkv, n) int; left_padding (B,) int;
//              covered (B,) int; length, sink_tokens, capacity () int
// outputs      indices (B, Hkv, capacity) int; counts (B, Hkv) int
// template     SLOTS
// grid         tiles * threads, Hkv, B
// threadgroup  threads, 1, 1
// reads        B * Hkv * (SLOTS * 4 + min(SLOTS * 8, C * 4 + 4) + bucket_keys * 4)
// writes       B * Hkv * (capacity * 4 + 4)
threadgroup uint ends[SLOTS];
threadgroup uint partial[MAX_SIMDGROUPS];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint room = uint(capacity), n = uint(key_ids_shape[2]);

const auto visited_at = visited + row * SLOTS;
const auto offsets_at = offsets + row * size_t(offsets_shape[2]);
const auto keys_at = key_ids + row * n;
const Stretches<decltype(visited_at), decltype(offsets_at)> stretches = {
    visited_at, offsets_at, uint(offsets_shape[2]) - 1, n};
const ExactKeys exact = exact_keys(length, covered[at.z], sink_tokens, left_padding[at.z]);
stretch_ends(stretches, SLOTS, ends, partial, place);
const uint count = min(exact.count + ends[SLOTS - 1], room);
const uint end = min((at.x + 1) * LIST_TILE, room);
for (uint entry = at.x * LIST_TILE + place.index(); entry < end; entry += place.threads()) {
  int key = NO_KEY;
  if (entry < exact.count) {
    key = int(exact.key(entry));
  } else if (entry < count) {
    key = bucket_key(entry - exact.count, stretches, SLOTS, keys_at, ends);
  }
  indices[row * room + entry] = key;
}
if (at.x == 0 && place.index() == 0) {
  counts[row] = int(count);
}
