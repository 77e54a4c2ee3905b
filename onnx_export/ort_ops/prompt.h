// Running softmax of the query rows of prefill over blocks of keys, one tile of rows at a time.
#pragma once

#include "attention.h"
#include "kernels.h"

namespace sparse {

// n queries of each of `heads` query heads of one group: row g * n + i is query i0 + i of head h0 + g.
struct RowSet {
  int64_t b, h0, heads, i0, n;
  int64_t count() const { return heads * n; }
};

class RowTile {
 public:
  // Bytes for `count` rows and up to kBlock keys at a time.
  static size_t bytes(const Attention&, int64_t count);
  RowTile(const Attention&, const RowSet&, Scratch&);

  // Returns logits (n, width) of keys j to j + n - 1, n <= kBlock; -inf for keys outside a row's span. The next call
  // overwrites the logits.
  float* logits(int64_t j, int n);
  // Updates the running softmax of every row with keys j to j + n - 1.
  void attend(int64_t j, int n);
  // Divides the outputs by the sums and writes them. The output of a query without keys is 0.
  void write();

  int width() const { return width_; }

 private:
  const float* widened(const void* plane, int64_t j, int n, float* room) const;
  void load();
  void mask(int64_t j, int n);

  const Attention& a_;
  const RowSet rows_;
  const Tiles& tiles_;
  const int64_t kv_head_;
  int width_;
  float *rows_room_, *queries_, *output_, *logits_, *top_, *sum_, *faded_, *keys_, *values_;
};

// Returns the span of keys that query i attends to.
Span span(const Attention&, int64_t b, int64_t i);

}  // namespace sparse
