// SampleAttention of a prefill chunk, docs/spec/sample.md.
#pragma once

#include <vector>

#include "attention.h"

namespace sparse {

struct SampleSettings {
  float alpha_column, alpha_slash;
  int64_t chunks, block;
};

// Selection of key blocks for rows of equal length without padding, and attention over these blocks.
class Sample {
 public:
  Sample(const Attention&, const SampleSettings&);

  // Returns true if attention is dense.
  bool everything() const { return everything_; }
  int64_t row_blocks() const { return R_; }
  int64_t key_blocks() const { return Nk_; }

  void select_blocks(const Pool&);
  void attend(const Pool&) const;
  // longest_list returns the length of the longest list. write_lists writes the lists (B, Hq, R, width), ascending,
  // then -1. If attention is dense, the lists contain all causal key blocks.
  int64_t longest_list() const;
  void write_lists(int32_t* lists, int64_t width) const;

 private:
  struct Region {
    int64_t first, stop;  // absolute row blocks
    int64_t row, end;     // query rows of the sample
  };
  const char* kept_of(int64_t head, int64_t c) const { return kept_.data() + (head * C_ + c) * 2 * Nk_; }
  bool attended(const char* kept, const Region&, int64_t r, int64_t block) const;
  const Region& region_of(int64_t r) const;
  void score(int64_t head, int64_t c);

  const Attention& a_;
  const SampleSettings s_;
  int64_t S_, offset_, first_, Nk_, R_, C_;
  std::vector<Region> regions_;
  bool everything_;
  std::vector<char> kept_;  // (B, Hq, C, 2, Nk): columns, offset bins
};

}  // namespace sparse
