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
  const float* widened(const void* cache, int64_t width, int64_t j, int n, float* room) const;
  void load();
  void mask(int64_t j, int n);

  const Attention& a_;
  const RowSet rows_;
  const Tiles& tiles_;
  const int64_t kv_head_;
  int width_;
  float *rows_room_, *queries_, *output_, *logits_, *top_, *sum_, *faded_, *keys_, *values_;
};

// Attends with the queries of row block r of a query head to the key blocks for which attends(block) is true.
template <class Attends>
void attend_row_block(const Attention& a, int64_t head, int64_t r, int64_t size, const Attends& attends) {
  const int64_t b = head / a.Hq, offset = a.length[b] - a.L, row = std::max<int64_t>(r * size - offset, 0);
  const int64_t n = std::min((r + 1) * size - offset, a.L) - row;
  Scratch scratch(Scratch::kTask, RowTile::bytes(a, n));
  RowTile tile(a, {b, head % a.Hq, 1, row, n}, scratch);
  for (int64_t block = 0; block <= r; block++) {
    if (!attends(block)) continue;
    const int64_t end = std::min((block + 1) * size, offset + row + n);  // no query of this part attends to later keys
    for (int64_t j = block * size; j < end; j += kBlock) tile.attend(j, int(std::min<int64_t>(kBlock, end - j)));
  }
  tile.write();
}

// Returns the span of keys that query i attends to.
Span span(const Attention&, int64_t b, int64_t i);

}  // namespace sparse
