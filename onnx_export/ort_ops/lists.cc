#include "attention.h"

namespace sparse {

namespace {

constexpr int64_t kLeastKeys = 512;  // of a part

void attend(const Attention& a, const Rows& rows, int64_t b, int64_t h, const int32_t* listed, int64_t count) {
  Scratch scratch(Scratch::kTask, Scratch::size<float>(rows.count * kBlock));
  float* weights = scratch.take<float>(rows.count * kBlock);
  load_queries(a, rows, b, h, 0, 1);
  Keys block{a.plane(a.keys, b, h), a.plane(a.values, b, h), listed, 0, 0, 0, nullptr, nullptr};
  for (int64_t i = 0; i < count; i += kBlock) {
    block.index = listed + i;
    block.count = int(std::min<int64_t>(kBlock, count - i));
    block.next = int(std::min<int64_t>(kBlock, count - i - block.count));
    a.typed().attend(rows, block, weights);
  }
}

}  // namespace

void attend_lists(const Attention& a, int64_t room, const Choose& choose, const Pool& pool) {
  const int64_t heads = a.B * a.Hkv, most_parts = parts_for(heads, room, kLeastKeys, 4);
  struct Found {
    int64_t count;
    int32_t* listed;
  };
  Scratch shared(Scratch::kCall, heads * (Scratch::size<int32_t>(room) + most_parts * rows_bytes(a.G(), a.D)) +
                                     Scratch::size<Found>(heads) + Scratch::size<Rows>(heads * most_parts));
  Found* found = shared.take<Found>(heads);
  for (int64_t i = 0; i < heads; i++) found[i] = {0, shared.take<int32_t>(room)};
  pool.run(heads, [&](int64_t i) { found[i].count = choose(i / a.Hkv, i % a.Hkv, found[i].listed); });
  int64_t longest = 0;
  for (int64_t i = 0; i < heads; i++) longest = std::max(longest, found[i].count);
  const int64_t parts = parts_for(heads, longest, kLeastKeys, 4);
  Rows* rows = shared.take<Rows>(heads * parts);
  for (int64_t i = 0; i < heads * parts; i++) rows[i] = take_rows(shared, a.G(), a.D);
  pool.run(heads * parts, [&](int64_t i) {
    const Found& of = found[i / parts];
    const int64_t low = of.count * (i % parts) / parts, high = of.count * (i % parts + 1) / parts;
    attend(a, rows[i], i / parts / a.Hkv, i / parts % a.Hkv, of.listed + low, high - low);
  });
  pool.run(heads, [&](int64_t i) {
    merge(rows + i * parts, parts);
    store_rows(a, rows[i * parts], i / a.Hkv, i % a.Hkv, 0, 1);
  });
}

}  // namespace sparse
