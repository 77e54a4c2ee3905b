// Exact attention with a running softmax, over all keys in one pass over K and V, or over lists of keys.

#include <cmath>

#include "prompt.h"

namespace sparse {

namespace {

constexpr int64_t kRows = 128;        // query rows per block, for all heads of the group together
constexpr int64_t kLeastKeys = 1024;  // minimum keys per split; a smaller split costs more time than it saves

void attend_one_query(const Attention& a, const Pool& pool) {
  const int64_t heads = a.B * a.Hkv, G = a.G();
  int64_t longest = 0;
  for (int64_t b = 0; b < a.B; b++) longest = std::max(longest, span(a, b, 0).high - span(a, b, 0).low);
  const int64_t parts = parts_for(heads, longest, kLeastKeys, 4);
  if (parts > 1 && a.append) append_all(*a.append, a.B, pool);
  const size_t bytes = rows_bytes(G, a) + Scratch::size<float>(G * kBlock);
  if (parts == 1) {
    pool.run(heads, [&](int64_t i) {
      const int64_t b = i / a.Hkv, h = i % a.Hkv;
      if (a.append) a.append->head(b, h);
      Scratch scratch(Scratch::kTask, bytes);
      const Rows rows = take_rows(scratch, G, a);
      load_queries(a, rows, b, h, 0, 1);
      attend_keys(a, rows, b, h, span(a, b, 0), scratch.take<float>(G * kBlock));
      store_rows(a, rows, b, h, 0, 1);
    });
    return;
  }
  Scratch shared(Scratch::kCall, heads * parts * rows_bytes(G, a) + Scratch::size<Rows>(heads * parts));
  Rows* all = shared.take<Rows>(heads * parts);
  for (int64_t i = 0; i < heads * parts; i++) all[i] = take_rows(shared, G, a);
  pool.run(heads * parts, [&](int64_t i) {
    const int64_t b = i / parts / a.Hkv, h = i / parts % a.Hkv, part = i % parts;
    const Span keys = span(a, b, 0);
    const int64_t size = ((keys.high - keys.low + parts - 1) / parts + kBlock - 1) / kBlock * kBlock;
    const int64_t low = std::min(keys.high, keys.low + part * size);
    Scratch scratch(Scratch::kTask, Scratch::size<float>(G * kBlock));
    load_queries(a, all[i], b, h, 0, 1);
    attend_keys(a, all[i], b, h, {low, std::min(keys.high, low + size)}, scratch.take<float>(G * kBlock));
  });
  pool.run(heads, [&](int64_t i) {
    merge(all + i * parts, parts);
    store_rows(a, all[i * parts], i / a.Hkv, i % a.Hkv, 0, 1);
  });
}

// Attends with queries i0 to i0 + n - 1 of a group. Each query attends to the keys up to its position.
void attend_block(const Attention& a, int64_t b, int64_t h, int64_t i0, int64_t n) {
  Scratch scratch(Scratch::kTask, RowTile::bytes(a, a.G() * n));
  RowTile tile(a, {b, h * a.G(), a.G(), i0, n}, scratch);
  const int64_t start = span(a, b, i0).low, end = span(a, b, i0 + n - 1).high;
  for (int64_t j = start; j < end; j += kBlock) tile.attend(j, int(std::min<int64_t>(kBlock, end - j)));
  tile.write();
}

void attend_prompt(const Attention& a, const Pool& pool) {
  if (a.append) append_all(*a.append, a.B, pool);
  const int64_t n = std::max<int64_t>(1, std::min(a.L, kRows / a.G()));
  const int64_t blocks = (a.L + n - 1) / n, heads = a.B * a.Hkv;
  pool.run(heads * blocks, [&](int64_t i) {
    const int64_t head = i % heads, block = blocks - 1 - i / heads;  // the blocks with the most keys first
    attend_block(a, head / a.Hkv, head % a.Hkv, block * n, std::min(n, a.L - block * n));
  });
}

}  // namespace

void attend_keys(const Attention& a, const Rows& rows, int64_t b, int64_t h, Span keys, float* scores,
                 const int32_t* listed) {
  const Bias bias = a.group_bias(b, h);
  Keys block{a.row(a.keys, a.D, b, h, 0), a.row(a.values, a.Dv, b, h, 0), nullptr, 0, 0, 0, nullptr, nullptr};
  if (bias.data) block.bias = &bias;
  for (int64_t j = keys.low; j < keys.high; j += kBlock) {
    block.first = j;
    if (listed) block.index = listed + j;
    block.count = int(std::min<int64_t>(kBlock, keys.high - j));
    block.next = int(std::min<int64_t>(kBlock, keys.high - j - block.count));
    a.typed().attend(rows, block, scores);
  }
}

void load_queries(const Attention& a, const Rows& rows, int64_t b, int64_t h, int64_t i0, int64_t n) {
  const char* query = static_cast<const char*>(a.query) + a.group_offset(a.D, b, h);
  float* q = const_cast<float*>(rows.q);
  for (int64_t g = 0; g < a.G(); g++) {
    a.query_kernels().widen(q + g * n * a.D, query + (g * a.L + i0) * a.D * size_of(a.query_type), n * a.D);
  }
  for (int64_t d = 0; d < rows.count * a.D; d++) q[d] *= a.scale;
}

void store_rows(const Attention& a, const Rows& rows, int64_t b, int64_t h, int64_t i0, int64_t n) {
  char* output = static_cast<char*>(a.output) + a.group_offset(a.Dv, b, h);
  for (int64_t r = 0; r < rows.count; r++) {
    const float factor = rows.sum[r] == 0 ? 0 : 1 / rows.sum[r];
    float* row = rows.output + r * a.Dv;
    for (int64_t d = 0; d < a.Dv; d++) row[d] *= factor;
    const int64_t at = r / n * a.L + i0 + r % n;
    a.query_kernels().narrow(output + at * a.Dv * size_of(a.query_type), row, a.Dv);
    if (a.lse) a.lse[(b * a.Hq + h * a.G()) * a.L + at] = lse_of(rows.top[r], rows.sum[r]);
  }
}

float lse_of(float top, float sum) { return sum == 0 ? -INFINITY : top + std::log(sum); }

void merge(const Rows* parts, int64_t count) {
  const Rows& whole = parts[0];
  for (int64_t p = 1; p < count; p++) {
    for (int r = 0; r < whole.count; r++) {
      const float top = std::max(whole.top[r], parts[p].top[r]), shift = std::isinf(top) && top < 0 ? 0 : top;
      const float ours = std::exp(whole.top[r] - shift), theirs = std::exp(parts[p].top[r] - shift);
      float *to = whole.output + int64_t(r) * whole.Dv, *from = parts[p].output + int64_t(r) * whole.Dv;
      for (int d = 0; d < whole.Dv; d++) to[d] = ours * to[d] + theirs * from[d];
      whole.sum[r] = ours * whole.sum[r] + theirs * parts[p].sum[r];
      whole.top[r] = top;
    }
  }
}

size_t rows_bytes(int64_t count, const Attention& a) {
  return Scratch::size<float>(count * a.D) + Scratch::size<float>(count * a.Dv) + 2 * Scratch::size<float>(count);
}

Rows take_rows(Scratch& scratch, int64_t count, const Attention& a) {
  Rows rows;
  rows.count = int(count);
  rows.D = int(a.D), rows.Dv = int(a.Dv);
  rows.q = scratch.take<float>(count * a.D);
  rows.output = scratch.take<float>(count * a.Dv);
  rows.top = scratch.take<float>(count);
  rows.sum = scratch.take<float>(count);
  std::fill(rows.output, rows.output + count * a.Dv, 0.0f);
  std::fill(rows.top, rows.top + count, -INFINITY);
  std::fill(rows.sum, rows.sum + count, 0.0f);
  return rows;
}

void attend_densely(const Attention& a, const Pool& pool) {
  if (a.L == 1) {
    attend_one_query(a, pool);
  } else {
    attend_prompt(a, pool);
  }
}

namespace {

constexpr int64_t kLeastListed = 512;  // minimum keys per split of a list

void attend_listed(const Attention& a, const Rows& rows, int64_t b, int64_t h, const int32_t* listed, int64_t count) {
  Scratch scratch(Scratch::kTask, Scratch::size<float>(rows.count * kBlock));
  load_queries(a, rows, b, h, 0, 1);
  attend_keys(a, rows, b, h, {0, count}, scratch.take<float>(rows.count * kBlock), listed);
}

}  // namespace

void attend_lists(const Attention& a, int64_t room, const SelectKeys& select_keys, const Pool& pool) {
  const int64_t heads = a.B * a.Hkv, most_parts = parts_for(heads, room, kLeastListed, 4);
  struct Found {
    int64_t count;
    int32_t* listed;
  };
  Scratch shared(Scratch::kCall, heads * (Scratch::size<int32_t>(room) + most_parts * rows_bytes(a.G(), a)) +
                                     Scratch::size<Found>(heads) + Scratch::size<Rows>(heads * most_parts));
  Found* found = shared.take<Found>(heads);
  for (int64_t i = 0; i < heads; i++) found[i] = {0, shared.take<int32_t>(room)};
  pool.run(heads, [&](int64_t i) { found[i].count = select_keys(i / a.Hkv, i % a.Hkv, found[i].listed); });
  int64_t longest = 0;
  for (int64_t i = 0; i < heads; i++) longest = std::max(longest, found[i].count);
  const int64_t parts = parts_for(heads, longest, kLeastListed, 4);
  Rows* rows = shared.take<Rows>(heads * parts);
  for (int64_t i = 0; i < heads * parts; i++) rows[i] = take_rows(shared, a.G(), a);
  pool.run(heads * parts, [&](int64_t i) {
    const Found& of = found[i / parts];
    const int64_t low = of.count * (i % parts) / parts, high = of.count * (i % parts + 1) / parts;
    attend_listed(a, rows[i], i / parts / a.Hkv, i / parts % a.Hkv, of.listed + low, high - low);
  });
  pool.run(heads, [&](int64_t i) {
    merge(rows + i * parts, parts);
    store_rows(a, rows[i * parts], i / a.Hkv, i % a.Hkv, 0, 1);
  });
}

}  // namespace sparse
