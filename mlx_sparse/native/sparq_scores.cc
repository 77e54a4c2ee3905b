// Components, scores and softmax of a decode step of SparQ: equations (sparq.1) to (sparq.4), docs/spec/sparq.md.

#include <cmath>

#include "sparq_step.h"

namespace sparse::sparq {

// Computes the mean value (sparq.9), and the deviation of (sparq.1) or the spread (sparq.22) that replaces it.
void Step::statistics(Head& head) const {
  const int64_t D = a.D, Dv = a.Dv, plane = head.b * a.Hkv + head.h, at = plane * D;
  if (s.summary) {
    const float *summary = s.summary + 3 * at, count = float(std::max<int64_t>(1, head.end - head.first));
    for (int64_t d = 0; d < D; d++) head.mean[d] = summary[d] / count;
    std::copy(summary + 2 * D, summary + 3 * D, head.deviation);
    return;
  }
  if (!s.sums) {
    if (s.value_mean) std::copy(s.value_mean + plane * Dv, s.value_mean + (plane + 1) * Dv, head.mean);
    if (s.deviation) std::copy(s.deviation + at, s.deviation + at + D, head.deviation);
    return;
  }
  sums_to_statistics(s.sums + 3 * at, head.end - head.first, D, head.mean, head.deviation);
}

// Selects components, (sparq.1) and (sparq.2), and computes the queries of (sparq.3) times the factor c / t.
void Step::prepare(Head& head) const {
  const int64_t D = a.D;
  float* q = const_cast<float*>(head.rows.q);
  a.query_kernels().widen(q, static_cast<const char*>(a.query) + a.group_offset(D, head.b, head.h), G * D);
  if (s.reallocate || s.by_key) statistics(head);
  const int64_t plane = head.b * a.Hkv + head.h;
  if (s.codes.codes) head.center = s.summary ? s.summary + (plane * 3 + 1) * D : s.center + plane * D;
  if (!head.everything) {
    std::fill(head.component, head.component + D, 0.0f);
    for (int64_t g = 0; g < G; g++) {
      for (int64_t d = 0; d < D; d++) head.component[d] += std::fabs(q[g * D + d]);
    }
    for (int64_t d = 0; s.by_key && d < D; d++) head.component[d] *= head.deviation[d];
    largest(*a.kernels, head.component, D, s.rank, head.components, head.work);
    for (int64_t g = 0; g < G; g++) pack(head, g);
  }
  for (int64_t i = 0; i < G * D; i++) q[i] *= a.scale;
}

void Step::pack(const Head& head, int64_t g) const {
  const float* q = head.rows.q + g * a.D;
  float total = 0, covered = 0;
  for (int64_t d = 0; d < a.D; d++) total += std::fabs(q[d]);
  for (int64_t i = 0; i < s.rank; i++) covered += std::fabs(q[head.components[i]]);
  const bool as_is = s.by_key || total == 0 || covered == 0;
  const float factor = as_is ? a.scale : a.scale / std::sqrt(covered / total);
  const int64_t tile = g / 4 * 4, heads = std::min<int64_t>(4, G - tile);
  float* to = head.packed + tile * s.rank + g - tile;
  for (int64_t i = 0; i < s.rank; i++) to[i * heads] = q[head.components[i]] * factor;
}

Span Step::keys_of(const Head& head, int64_t block) const {
  const int64_t id = head.block0 + block, from = origin(head.b);
  return {std::max(head.first, from + grid.first_key(id)), std::min(head.end, from + grid.end_key(id))};
}

// Computes (sparq.3) and the exponentials of (sparq.4), relative to the largest logit of each block.
void Step::score(const Head& head, int64_t from, int64_t to) const {
  const int64_t item = size_of(a.type);
  const char* plane = static_cast<const char*>(s.keys_t) + (head.b * a.Hkv + head.h) * s.plane * item;
  const auto column = [&](int64_t key) { return plane + (key / s.lanes * a.D * s.lanes + key % s.lanes) * item; };
  Columns columns{};
  columns.stride = s.lanes, columns.components = head.components, columns.rank = int(s.rank), columns.G = int(G);
  for (int64_t block = from; block < to; block++) {
    const Span keys = keys_of(head, block);
    const int64_t n = keys.high - keys.low;
    float* scores = head.scores + block * G * grid.stride;
    if (s.codes.codes) {
      score_codes(head, keys, scores);
    } else {
      columns.lanes = column(keys.low);
      columns.next = column(keys_of(head, block + 1 < to ? block + 1 : block).low);
      columns.count = int(n);
      columns.readable = int(std::min<int64_t>(s.lanes - keys.low % s.lanes, 2 * kScoreBlock));
      a.typed().approximate(columns, head.packed, scores, grid.stride);
    }
    if (a.bias.data) add_bias(head, keys, scores);
    for (int64_t g = 0; g < G; g++) {
      const int64_t at = g * head.blocks + block;
      a.kernels->exponentials(scores + g * grid.stride, int(n), true, head.tops + at, head.sums + at);
    }
  }
}

// Computes (sparq.21) for the keys of a block: full groups from the codes, and the tail from rows of K.
void Step::score_codes(const Head& head, Span keys, float* scores) const {
  const int64_t rank = s.rank, D = a.D;
  const int64_t place = keys.low - head.first, tail = head.first + (head.end - head.first) / kGroup * kGroup;
  const int64_t coded = std::max<int64_t>(0, std::min(keys.high, tail) - keys.low);
  Scratch scratch(Scratch::kPart, Scratch::size<float>(4 * rank) + Scratch::size<float>(kGroup * rank) +
                                      Scratch::size<float>(D) + Scratch::size<float>(G * rank) +
                                      Scratch::size<float>(G * kBlock));
  float *work = scratch.take<float>(4 * rank), *rows = scratch.take<float>(kGroup * rank);
  float *whole = scratch.take<float>(D), *q = scratch.take<float>(G * rank), *found = scratch.take<float>(G * kBlock);
  if (coded) {
    const CodePlanes& all = s.codes;
    const int64_t group = (head.b * a.Hkv + head.h) * D * all.groups + place / kGroup;
    const Codes codes{all.codes + group * all.code_size,
                      all.lo + group * all.range_size,
                      all.step + group * all.range_size,
                      all.groups * all.code_size,
                      all.groups * all.range_size,
                      all.code_size,
                      all.range_size,
                      head.components,
                      int(rank),
                      int(G),
                      int(coded / kGroup),
                      kScoreBlock / kGroup * all.code_size};
    a.kernels->approximate_codes(codes, head.packed, work, scores, grid.stride);
  }
  const int64_t from = std::max(keys.low, tail), count = keys.high - from;
  if (count <= 0) return;
  for (int64_t j = 0; j < count; j++) {
    a.typed().widen(whole, a.row(a.keys, D, head.b, head.h, from + j), D);
    for (int64_t i = 0; i < rank; i++) {
      const int32_t d = head.components[i];
      rows[j * rank + i] = whole[d] - head.center[d];
    }
  }
  for (int64_t g = 0; g < G; g++) {
    const int64_t tile = g / 4 * 4, heads = std::min<int64_t>(4, G - tile);
    for (int64_t i = 0; i < rank; i++) q[g * rank + i] = head.packed[tile * rank + i * heads + g - tile];
  }
  const Keys block{rows, rows, nullptr, 0, int(count), 0, nullptr, nullptr};
  a.kernels->type[kTypeFloat].score({int(G), int(rank), int(rank), q, nullptr, nullptr, nullptr}, block, found);
  for (int64_t g = 0; g < G; g++) {
    std::copy(found + g * kBlock, found + g * kBlock + count, scores + g * grid.stride + from - keys.low);
  }
}

// Adds the bias to the logits of a block (sparq.25). The logits of hidden keys become -inf.
void Step::add_bias(const Head& head, Span keys, float* scores) const {
  const int64_t n = keys.high - keys.low;
  Scratch scratch(Scratch::kPart, Scratch::size<float>(kScoreBlock));
  float* numbers = scratch.take<float>(kScoreBlock);
  for (int64_t g = 0; g < G; g++) {
    a.read_bias(numbers, head.b, head.h * G + g, keys.low, n);
    float* row = scores + g * grid.stride;
    for (int64_t j = 0; j < n; j++) row[j] = numbers[j] <= a.bias.lowest ? -INFINITY : row[j] + numbers[j];
  }
}

// Drops the hidden keys of n collected keys, and returns the number of the other keys.
int64_t Step::drop_hidden(const Head& head, float* z, int32_t* index, int64_t n) const {
  if (!a.bias.data) return n;
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i++) {
    z[kept] = z[i], index[kept] = index[i];
    kept += !a.hidden(head.b, head.h, index[i]);
  }
  return kept;
}

// Returns the first key of the local window of (sparq.6), which has the last keys that are not hidden.
int64_t Step::window_start(const Head& head) const {
  int64_t start = head.end;
  for (int64_t left = s.local_window; left > 0 && start > head.first;) left -= !a.hidden(head.b, head.h, --start);
  return start;
}

// Computes the sums of (sparq.4). If a logit is NaN or +inf, the head has no softmax. The scores of keys with these
// logits are NaN, and the head does not rank other keys.
void Step::normalise(const Head& head) const {
  for (int64_t g = 0; g < G; g++) {
    float *tops = head.tops + g * head.blocks, *sums = head.sums + g * head.blocks, most, unused;
    double total = 0;
    a.kernels->exponentials(tops, int(head.blocks), true, &most, &unused);
    for (int64_t i = 0; i < head.blocks; i++) total += double(tops[i]) * sums[i];
    const float sum = float(total);
    for (int64_t i = 0; i < head.blocks; i++) {
      head.factors[i * G + g] = sum > 0 ? tops[i] / sum : 0.0f;
    }
  }
}

}  // namespace sparse::sparq
