// A decode step of SparQ: the grid of blocks, the data of a head, and the functions of the step.
#pragma once

#include "attention.h"
#include "select.h"

namespace sparse::sparq {

constexpr int64_t kUnbroken = int64_t(1) << 40;  // chunk length for caches without chunks

// Division of the keys of a head into blocks of at most kScoreBlock keys of one chunk. Blocks of quantized keys are
// counted from the first valid key, so that they are whole groups.
struct Grid {
  int64_t lanes, size, per_chunk, stride;

  explicit Grid(int64_t lanes) : lanes(lanes), size(std::min<int64_t>(lanes, kScoreBlock)) {
    per_chunk = (lanes + size - 1) / size;
    stride = (size + 15) / 16 * 16;
  }
  int64_t block_of(int64_t key) const { return key / lanes * per_chunk + key % lanes / size; }
  int64_t first_key(int64_t block) const { return block / per_chunk * lanes + block % per_chunk * size; }
  int64_t end_key(int64_t block) const { return std::min(first_key(block) + size, (block / per_chunk + 1) * lanes); }
};

// Data of one head: queries, components, and scores of the valid keys [first, end).
struct Head {
  int64_t b, h, first, end;
  int64_t block0, blocks;  // first block and number of blocks in the grid
  bool everything;         // true: attend to all keys without selection
  Rows rows;               // exact queries, and the output
  float* packed;           // queries over the components, times c / t, in the layout of `approximate`
  int32_t* components;
  float *mean, *deviation;  // (Dv), (D)
  const float* center;      // (D), of int4 scoring keys
  float* component;         // (D): scores of the components
  int32_t* work;            // (D)
  float* scores;            // (blocks, G, stride): exp(a - top) of the block
  float* tops;              // (G, blocks): largest a of the block, then exp(top - largest of all)
  float* sums;              // (G, blocks): sum of exp(a - top)
  float* factors;           // (blocks, G): factors that convert scores to s
};

// sparq_scores.cc computes the scores, sparq.cc the selection and the attention.
class Step {
 public:
  Step(const Attention& a, const SparQ& s) : a(a), s(s), grid(s.codes.codes ? kUnbroken : s.lanes), G(a.G()) {}

  void run(const Pool& pool) const;

 private:
  size_t head_bytes(int64_t blocks) const;
  Head take_head(Scratch&, int64_t b, int64_t h, int64_t blocks) const;
  int64_t blocks_of(int64_t b) const {
    if (a.first[b] >= a.length[b]) return 0;
    return grid.block_of(a.length[b] - 1 - origin(b)) - grid.block_of(a.first[b] - origin(b)) + 1;
  }
  int64_t origin(int64_t b) const { return s.codes.codes ? a.first[b] : 0; }  // first key of the grid
  size_t reservoir_bytes() const {
    const int64_t room = Reservoir::capacity(s.top_k);
    return Scratch::size<float>(room) + Scratch::size<int32_t>(room) + Scratch::size<int32_t>(room);
  }
  Reservoir take_reservoir(Scratch& scratch, int64_t k) const {
    const int64_t room = Reservoir::capacity(s.top_k);
    float* z = scratch.take<float>(room);
    int32_t* index = scratch.take<int32_t>(room);
    return Reservoir(*a.kernels, k, z, index, scratch.take<int32_t>(room));
  }
  int64_t chosen(const Head& head) const {  // number of selected keys outside the local window
    return s.top_k - std::min(s.local_window, head.end - head.first);
  }
  size_t finish_bytes() const { return Scratch::size<int32_t>(s.top_k) + Scratch::size<float>(G * kBlock); }

  void prepare(Head&) const;
  void pack(const Head&, int64_t g) const;
  Span keys_of(const Head&, int64_t block) const;
  void statistics(Head&) const;
  void score(const Head&, int64_t from, int64_t to) const;
  void score_codes(const Head&, Span keys, float* scores) const;
  void add_bias(const Head&, Span keys, float* scores) const;
  int64_t drop_hidden(const Head&, float* z, int32_t* index, int64_t n) const;
  int64_t window_start(const Head&) const;
  void normalise(const Head&) const;
  void search(const Head&, int64_t from, int64_t to, Reservoir&) const;
  void finish(const Head&, const int32_t* best, int64_t count, Scratch&) const;
  float share(const Head&, int64_t g, int64_t key) const;
  void mix(const Head&, int64_t g, float alpha) const;
  void whole_head(int64_t b, int64_t h) const;
  void in_parts(int64_t parts, const Pool& pool) const;

  const Attention& a;
  const SparQ& s;
  const Grid grid;
  const int64_t G;
};

}  // namespace sparse::sparq
