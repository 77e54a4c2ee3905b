#include "sample.h"

#include <cmath>
#include <numeric>

#include "prompt.h"
#include "select.h"

namespace sparse {

namespace {

// (sample.6): marks the fewest largest scores whose share of the total reaches alpha - 1e-6. If the share is NaN, all
// scores are marked. `order` needs space for n.
void keep(const float* scores, int64_t n, float alpha, char* kept, int32_t* order) {
  std::iota(order, order + n, 0);
  std::sort(order, order + n, [scores](int32_t i, int32_t j) {
    const int32_t a = key_of(scores[i]), b = key_of(scores[j]);
    return a != b ? a > b : i < j;
  });
  const float total = std::accumulate(scores, scores + n, 0.0f);
  float sum = 0;
  for (int64_t i = 0; i < n; i++) {
    kept[order[i]] = i == 0 || !(sum / total >= alpha - 1e-6f);
    sum += scores[order[i]];
  }
}

}  // namespace

// (sample.1), (sample.2): computes the regions and their samples.
Sample::Sample(const Attention& a, const SampleSettings& s) : a_(a), s_(s) {
  S_ = a.length[0], offset_ = S_ - a.L, first_ = offset_ / s.block, Nk_ = (S_ + s.block - 1) / s.block;
  R_ = Nk_ - first_, C_ = std::min(s.chunks, R_);
  int64_t sampled = 0;
  for (int64_t c = 0; c < C_; c++) {
    Region region{first_ + c * R_ / C_, first_ + (c + 1) * R_ / C_, 0, 0};
    region.end = std::min(region.stop * s.block - offset_, a.L);
    region.row = std::max({region.end - s.block, region.first * s.block - offset_, int64_t(0)});
    sampled += (offset_ + region.end - 1) / s.block - (offset_ + region.row) / s.block + 1;
    regions_.push_back(region);
  }
  everything_ = sampled == R_ || s.alpha_column >= 1 || s.alpha_slash >= 1;
}

// (sample.3) to (sample.6) for one head and region, in one pass over the keys. For a row with index t in its row block,
// the first t + 1 keys of a key block are in one bin, and the other keys are in the previous bin.
void Sample::score(int64_t head, int64_t c) {
  const Region& region = regions_[c];
  const int64_t n = region.end - region.row, block = s_.block, start = offset_ + region.row;
  const int64_t width = (n + kTileLanes - 1) / kTileLanes * kTileLanes;
  Scratch scratch(Scratch::kTask, RowTile::bytes(a_, n) + 3 * Scratch::size<float>(Nk_ * width) +
                                      Scratch::size<float>(block * width) + 2 * Scratch::size<float>(width) +
                                      2 * Scratch::size<float>(Nk_) + Scratch::size<int32_t>(Nk_));
  RowTile tile(a_, {head / a_.Hq, head % a_.Hq, 1, region.row, n}, scratch);
  const Tiles& tiles = *a_.kernels->tiles;
  float *top = scratch.take<float>(Nk_ * width), *near = scratch.take<float>(Nk_ * width);
  float *far = scratch.take<float>(Nk_ * width), *is_near = scratch.take<float>(block * width);
  float *most = scratch.take<float>(width), *inverse = scratch.take<float>(width);
  float *column = scratch.take<float>(Nk_), *slash = scratch.take<float>(Nk_);
  for (int64_t u = 0; u < block; u++) {
    for (int64_t i = 0; i < width; i++) is_near[u * width + i] = u <= (start + i) % block;
  }
  const int64_t end = offset_ + region.end, blocks = (end + block - 1) / block;
  std::fill(most, most + width, -INFINITY);
  for (int64_t m = 0; m < blocks; m++) {
    const int keys = int(std::min(block, end - m * block));
    const int64_t at = m * width;
    tiles.masses(tile.logits(m * block, keys), is_near, keys, int(width), top + at, near + at, far + at);
    for (int64_t i = 0; i < width; i++) most[i] = std::max(most[i], top[at + i]);
  }
  std::fill(inverse, inverse + width, 0.0f);
  for (int64_t m = 0; m < blocks; m++) {
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = m * width + i;
      if (near[at] + far[at] != 0) inverse[i] += (near[at] + far[at]) * std::exp(top[at] - most[i]);
    }
  }
  for (int64_t i = 0; i < n; i++) inverse[i] = inverse[i] == 0 ? 0 : 1 / inverse[i];  // 0: all logits are -inf
  std::fill(column, column + Nk_, 0.0f);
  std::fill(slash, slash + Nk_, 0.0f);
  for (int64_t m = 0; m < blocks; m++) {
    const int64_t at = m * width;
    tiles.share(top + at, most, inverse, int(width), near + at, far + at);
    for (int64_t i = 0; i < n; i++) {
      const int64_t bin = (start + i) / block - m;
      column[m] += near[at + i] + far[at + i];
      if (bin >= 0) slash[bin] += near[at + i];
      if (bin >= 1) slash[bin - 1] += far[at + i];
    }
  }
  int32_t* order = scratch.take<int32_t>(Nk_);
  char* kept = kept_.data() + (head * C_ + c) * 2 * Nk_;
  keep(column, Nk_, s_.alpha_column, kept, order);
  keep(slash, Nk_, s_.alpha_slash, kept + Nk_, order);
}

void Sample::select_blocks(const Pool& pool) {
  kept_.resize(a_.B * a_.Hq * C_ * 2 * Nk_);
  pool.run(a_.B * a_.Hq * C_, [&](int64_t i) { score(i / C_, i % C_); });
}

const Sample::Region& Sample::region_of(int64_t r) const {
  return *std::find_if(regions_.begin(), regions_.end(), [r](const Region& region) { return r < region.stop; });
}

// (sample.7): returns true if row block r attends to a key block up to r.
bool Sample::attended(const char* kept, const Region& region, int64_t r, int64_t block) const {
  if (block == 0 || block == r || everything_) return true;
  if (r >= (offset_ + region.row) / s_.block && r <= (offset_ + region.end - 1) / s_.block) return true;
  const char* bins = kept + Nk_;
  return kept[block] || bins[r - block] || bins[r - block - 1];
}

// (sample.8): attends to the listed key blocks.
void Sample::attend(const Pool& pool) const {
  const int64_t heads = a_.B * a_.Hq;
  pool.run(heads * R_, [&](int64_t i) {
    const int64_t r = Nk_ - 1 - i / heads, head = i % heads;  // the row blocks with the most keys first
    const Region& region = region_of(r);
    const char* kept = kept_of(head, &region - regions_.data());
    attend_row_block(a_, head, r, s_.block, [&](int64_t block) { return attended(kept, region, r, block); });
  });
}

int64_t Sample::longest_list() const {
  if (everything_) return Nk_;
  int64_t longest = 0;
  for (int64_t head = 0; head < a_.B * a_.Hq; head++) {
    for (int64_t r = first_; r < Nk_; r++) {
      const Region& region = region_of(r);
      const char* kept = kept_of(head, &region - regions_.data());
      int64_t count = 0;
      for (int64_t block = 0; block <= r; block++) count += attended(kept, region, r, block);
      longest = std::max(longest, count);
    }
  }
  return longest;
}

void Sample::write_lists(int32_t* lists, int64_t width) const {
  for (int64_t head = 0; head < a_.B * a_.Hq; head++) {
    for (int64_t r = first_; r < Nk_; r++) {
      const Region& region = region_of(r);
      const char* kept = everything_ ? nullptr : kept_of(head, &region - regions_.data());
      int64_t count = 0;
      for (int64_t block = 0; block <= r; block++) {
        if (attended(kept, region, r, block)) lists[count++] = int32_t(block);
      }
      std::fill(lists + count, lists + width, -1);
      lists += width;
    }
  }
}

}  // namespace sparse
