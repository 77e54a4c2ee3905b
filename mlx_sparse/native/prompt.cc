#include "prompt.h"

#include <cmath>

namespace sparse {

namespace {

int64_t width_of(int64_t count) { return (count + kTileLanes - 1) / kTileLanes * kTileLanes; }

}  // namespace

Span span(const Attention& a, int64_t b, int64_t i) {
  const int64_t p = a.length[b] - a.L + i;
  const int64_t low = std::max(a.first[b], a.window && a.window <= p ? p - a.window + 1 : 0);
  return {low, std::max(low, p + 1)};
}

size_t RowTile::bytes(const Attention& a, int64_t count) {
  const int64_t width = width_of(count), wide = a.type == kTypeFloat ? 0 : kBlock;
  return Scratch::size<float>(width * std::max(a.D, a.Dv)) + Scratch::size<float>(width * a.D) +
         Scratch::size<float>(width * a.Dv) + Scratch::size<float>(kBlock * width) +
         3 * Scratch::size<float>(width) + Scratch::size<float>(wide * a.D) + Scratch::size<float>(wide * a.Dv);
}

RowTile::RowTile(const Attention& a, const RowSet& rows, Scratch& scratch)
    : a_(a), rows_(rows), tiles_(*a.kernels->tiles), kv_head_(rows.h0 / a.G()), width_(int(width_of(rows.count()))) {
  const int64_t D = a.D, Dv = a.Dv, wide = a.type == kTypeFloat ? 0 : kBlock;
  rows_room_ = scratch.take<float>(width_ * std::max(D, Dv));
  queries_ = scratch.take<float>(width_ * D), output_ = scratch.take<float>(width_ * Dv);
  logits_ = scratch.take<float>(kBlock * width_);
  top_ = scratch.take<float>(width_), sum_ = scratch.take<float>(width_), faded_ = scratch.take<float>(width_);
  keys_ = scratch.take<float>(wide * D), values_ = scratch.take<float>(wide * Dv);
  std::fill(output_, output_ + width_ * Dv, 0.0f);
  std::fill(top_, top_ + width_, -INFINITY);
  std::fill(sum_, sum_ + width_, 0.0f);
  load();
}

// Stores the queries times the factor of the logits, component by component. Unused rows of the tile are zero.
void RowTile::load() {
  const int64_t D = a_.D, n = rows_.n;
  for (int64_t g = 0; g < rows_.heads; g++) {
    const int64_t at = ((rows_.b * a_.Hq + rows_.h0 + g) * a_.L + rows_.i0) * D;
    const char* query = static_cast<const char*>(a_.query) + at * size_of(a_.query_type);
    a_.query_kernels().widen(rows_room_ + g * n * D, query, n * D);
  }
  std::fill(rows_room_ + rows_.count() * D, rows_room_ + width_ * D, 0.0f);
  for (int64_t r = 0; r < width_; r += kTileLanes) {
    for (int64_t d = 0; d < D; d++) {
      for (int64_t i = 0; i < kTileLanes; i++) queries_[d * width_ + r + i] = a_.scale * rows_room_[(r + i) * D + d];
    }
  }
}

const float* RowTile::widened(const void* cache, int64_t width, int64_t j, int n, float* room) const {
  const char* row = a_.row(cache, width, rows_.b, kv_head_, j);
  if (a_.type == kTypeFloat) return reinterpret_cast<const float*>(row);
  a_.typed().widen(room, row, n * width);
  return room;
}

float* RowTile::logits(int64_t j, int n) {
  tiles_.multiply(widened(a_.keys, a_.D, j, n, keys_), a_.D, 1, queries_, logits_, n, int(a_.D), width_, false);
  const Span latest_start = span(a_, rows_.b, rows_.i0 + rows_.n - 1), earliest_end = span(a_, rows_.b, rows_.i0);
  if (j < latest_start.low || j + n > earliest_end.high) mask(j, n);
  return logits_;
}

void RowTile::mask(int64_t j, int n) {
  for (int64_t i = 0; i < rows_.n; i++) {
    const Span keys = span(a_, rows_.b, rows_.i0 + i);
    const int64_t low = std::clamp<int64_t>(keys.low - j, 0, n), high = std::clamp<int64_t>(keys.high - j, low, n);
    for (int64_t r = i; r < rows_.count(); r += rows_.n) {
      for (int64_t key = 0; key < low; key++) logits_[key * width_ + r] = -INFINITY;
      for (int64_t key = high; key < n; key++) logits_[key * width_ + r] = -INFINITY;
    }
  }
}

void RowTile::attend(int64_t j, int n) {
  logits(j, n);
  tiles_.weigh(logits_, n, width_, top_, sum_, faded_);
  const bool changed = std::any_of(faded_, faded_ + width_, [](float x) { return x != 1; });
  const int64_t Dv = a_.Dv;
  if (changed) tiles_.scale(output_, int(Dv), width_, faded_);
  tiles_.multiply(widened(a_.values, Dv, j, n, values_), 1, Dv, logits_, output_, int(Dv), n, width_, true);
}

void RowTile::write() {
  const int64_t Dv = a_.Dv, n = rows_.n;
  for (int r = 0; r < width_; r++) faded_[r] = sum_[r] == 0 ? 0 : 1 / sum_[r];
  tiles_.scale(output_, int(Dv), width_, faded_);
  for (int64_t r = 0; r < width_; r += kTileLanes) {
    for (int64_t d = 0; d < Dv; d++) {
      for (int64_t i = 0; i < kTileLanes; i++) rows_room_[(r + i) * Dv + d] = output_[d * width_ + r + i];
    }
  }
  for (int64_t g = 0; g < rows_.heads; g++) {
    const int64_t row = (rows_.b * a_.Hq + rows_.h0 + g) * a_.L + rows_.i0;
    char* output = static_cast<char*>(a_.output) + row * Dv * size_of(a_.query_type);
    a_.query_kernels().narrow(output, rows_room_ + g * n * Dv, n * Dv);
    for (int64_t i = 0; a_.lse && i < n; i++) a_.lse[row + i] = lse_of(top_[g * n + i], sum_[g * n + i]);
  }
}

// Exact attention over lists of key blocks, for all prefill methods.
void attend_blocks(const Attention& a, const int32_t* lists, int64_t N, int64_t size, const Pool& pool) {
  const int64_t first = (a.length[0] - a.L) / size, last = (a.length[0] - 1) / size, R = last - first + 1;
  const int64_t heads = a.B * a.Hq;
  pool.run(heads * R, [&](int64_t i) {
    const int64_t r = last - i / heads, head = i % heads;  // the row blocks with the most keys first
    Scratch scratch(Scratch::kPart, Scratch::size<char>(r + 1));
    char* listed = scratch.take<char>(r + 1);
    std::fill(listed, listed + r + 1, 0);
    const int32_t* list = lists + (head * R + r - first) * N;
    for (int64_t n = 0; n < N; n++) {
      if (list[n] >= 0 && list[n] <= r) listed[list[n]] = 1;
    }
    attend_row_block(a, head, r, size, [&](int64_t block) { return listed[block]; });
  });
}

}  // namespace sparse
