// Query rows of a prompt on their way over blocks of keys, one tile at a time.
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
  // Room for `count` rows that see up to kBlock keys at a time.
  static size_t bytes(const Attention&, int64_t count);
  RowTile(const Attention&, const RowSet&, Scratch&);

  // Logits (n, width) of keys j to j + n - 1, n <= kBlock; -inf for keys outside a row's span. Until the next call.
  float* logits(int64_t j, int n);
  // Extends the running softmax of every row by these keys.
  void attend(int64_t j, int n);
  // Divides by the sums and writes the output; a query without a key gives 0.
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

// The keys that query i attends to.
Span span(const Attention&, int64_t b, int64_t i);

}  // namespace sparse
