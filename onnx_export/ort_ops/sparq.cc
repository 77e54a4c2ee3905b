// One decode step of SparQ, docs/spec/sparq.md. A head is one task; where there are fewer heads than workers, its keys
// are cut into parts, scored and searched each for itself.

#include <cmath>

#include "attention.h"
#include "select.h"

namespace sparse {

namespace {

constexpr int64_t kLeastKeys = 2048;  // of a part
constexpr int64_t kCollected = 256;   // keys between looks at the reservoir
constexpr int64_t kUnbroken = int64_t(1) << 40;  // keys of a chunk where there are no chunks

// How the keys of a head are cut into blocks of scores: at most kScoreBlock keys of one chunk. Coded ones count from the
// first valid key, so that their blocks are whole groups.
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

// One head: its queries and components, and the scores of its valid keys [first, end).
struct Head {
  int64_t b, h, first, end;
  int64_t block0, blocks;  // of the grid
  bool everything;         // no choice to be made
  Rows rows;               // exact queries, and the output
  float* packed;           // queries over the components, times c / t: as `approximate` takes them
  int32_t* components;
  float *mean, *deviation;  // (D)
  const float* centre;      // (D), of coded keys
  float* component;         // (D): scores of the components
  int32_t* work;            // (D)
  float* scores;            // (blocks, G, stride): exp(a - top) of the block, or a itself with by_logits
  float* tops;              // (G, blocks): largest a of the block, then exp(top - largest of all)
  float* sums;              // (G, blocks): of exp(a - top)
  float* factors;           // (blocks, G): what makes s of the scores, or 1 with by_logits
  float *most, *total;      // (G): largest a, sum of exp(a - most)
};

class Step {
 public:
  Step(const Attention& a, const SparQ& s) : a(a), s(s), grid(s.codes || s.by_rows ? kUnbroken : s.lanes), G(a.G()) {}

  void run(const Pool& pool) const;

 private:
  size_t head_bytes(int64_t blocks) const;
  Head take_head(Scratch&, int64_t b, int64_t h, int64_t blocks) const;
  int64_t blocks_of(int64_t b) const {
    if (a.first[b] >= a.length[b]) return 0;
    return grid.block_of(a.length[b] - 1 - origin(b)) - grid.block_of(a.first[b] - origin(b)) + 1;
  }
  int64_t origin(int64_t b) const { return s.codes ? a.first[b] : 0; }  // the grid's first key
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
  int64_t chosen(const Head& head) const {  // keys that compete: all but the local ones
    return s.top_k - std::min(s.local_window, head.end - head.first);
  }
  size_t finish_bytes() const { return Scratch::size<int32_t>(s.top_k) + Scratch::size<float>(G * kBlock); }

  void prepare(Head&) const;
  void pack(const Head&, int64_t g) const;
  Span keys_of(const Head&, int64_t block) const;
  void statistics(Head&) const;
  void score(const Head&, int64_t from, int64_t to) const;
  void score_codes(const Head&, Span keys, float* scores) const;
  void score_rows(const Head&, Span keys, float* scores) const;
  void normalise(const Head&) const;
  void search(const Head&, int64_t from, int64_t to, Reservoir&) const;
  void finish(const Head&, const int32_t* best, int64_t count, Scratch&) const;
  float share(const Head&, int64_t g, int64_t key) const;
  void mix(const Head&, int64_t g, const int32_t* chosen, int64_t count) const;
  void whole_head(int64_t b, int64_t h) const;
  void in_parts(int64_t parts, const Pool& pool) const;

  const Attention& a;
  const SparQ& s;
  const Grid grid;
  const int64_t G;
};

size_t Step::head_bytes(int64_t blocks) const {
  return rows_bytes(G, a.D) + Scratch::size<float>(G * s.rank) + Scratch::size<int32_t>(s.rank) +
         3 * Scratch::size<float>(a.D) + Scratch::size<int32_t>(a.D) + Scratch::size<float>(blocks * G * grid.stride) +
         3 * Scratch::size<float>(blocks * G) + 2 * Scratch::size<float>(G);
}

Head Step::take_head(Scratch& scratch, int64_t b, int64_t h, int64_t blocks) const {
  Head head{};
  head.b = b, head.h = h, head.first = a.first[b], head.end = std::max(a.first[b], a.length[b]);
  head.blocks = blocks_of(b);
  head.block0 = head.blocks ? grid.block_of(head.first - origin(b)) : 0;
  head.everything = head.end - head.first <= s.top_k;
  head.rows = take_rows(scratch, G, a.D);
  head.packed = scratch.take<float>(G * s.rank);
  head.components = scratch.take<int32_t>(s.rank);
  head.mean = scratch.take<float>(a.D), head.deviation = scratch.take<float>(a.D);
  head.component = scratch.take<float>(a.D), head.work = scratch.take<int32_t>(a.D);
  head.scores = scratch.take<float>(blocks * G * grid.stride);
  head.tops = scratch.take<float>(blocks * G), head.sums = scratch.take<float>(blocks * G);
  head.factors = scratch.take<float>(blocks * G);
  head.most = scratch.take<float>(G), head.total = scratch.take<float>(G);
  return head;
}

// Mean value (sparq.9) and deviation of (sparq.1), or what takes its place.
void Step::statistics(Head& head) const {
  const int64_t D = a.D, at = (head.b * a.Hkv + head.h) * D;
  if (s.codes) {
    const float *summary = s.summary + 3 * at, count = float(std::max<int64_t>(1, head.end - head.first));
    for (int64_t d = 0; d < D; d++) head.mean[d] = summary[d] / count;
    std::copy(summary + 2 * D, summary + 3 * D, head.deviation);
    return;
  }
  if (s.by_rows) {
    const float count = float(std::max<int64_t>(1, head.end - head.first));
    for (int64_t d = 0; d < D; d++) head.mean[d] = s.sums[at + d] / count;
    return;
  }
  if (!s.sums) {
    std::copy(s.value_mean + at, s.value_mean + at + D, head.mean);
    std::copy(s.deviation + at, s.deviation + at + D, head.deviation);
    return;
  }
  sums_to_statistics(s.sums + 3 * at, head.end - head.first, D, head.mean, head.deviation);
}

// (sparq.1), (sparq.2), and the queries of (sparq.3) with their factor c / t.
void Step::prepare(Head& head) const {
  const int64_t D = a.D;
  float* q = const_cast<float*>(head.rows.q);
  a.typed().widen(q, static_cast<const char*>(a.query) + a.group_offset(head.b, head.h), G * D);
  if (s.reallocate || s.by_key) statistics(head);
  if (s.codes) head.centre = s.summary + ((head.b * a.Hkv + head.h) * 3 + 1) * D;
  if (!head.everything && !s.by_rows) {
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

// (sparq.3) and the exponentials of (sparq.4), relative to the largest logit of each block.
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
    if (s.codes) {
      score_codes(head, keys, scores);
    } else if (s.by_rows) {
      score_rows(head, keys, scores);
    } else {
      columns.lanes = column(keys.low);
      columns.next = column(keys_of(head, block + 1 < to ? block + 1 : block).low);
      columns.count = int(n);
      columns.readable = int(std::min<int64_t>(s.lanes - keys.low % s.lanes, 2 * kScoreBlock));
      a.typed().approximate(columns, head.packed, scores, grid.stride);
    }
    if (s.by_logits && !s.reallocate) continue;
    for (int64_t g = 0; g < G; g++) {
      const int64_t at = g * head.blocks + block;
      a.kernels->exponentials(scores + g * grid.stride, int(n), !s.by_logits, head.tops + at, head.sums + at);
    }
  }
}

// (sparq.21) of the keys of a block: whole groups, and the tail from rows of K.
void Step::score_codes(const Head& head, Span keys, float* scores) const {
  const int64_t record = CodedKeys::record_of(s.bits), row = s.groups * record, rank = s.rank, D = a.D;
  const int64_t place = keys.low - head.first, tail = head.first + (head.end - head.first) / kGroup * kGroup;
  const int64_t coded = std::max<int64_t>(0, std::min(keys.high, tail) - keys.low);
  Scratch scratch(Scratch::kPart, Scratch::size<float>(4 * rank) + Scratch::size<float>(kGroup * rank) +
                                      Scratch::size<float>(D) + Scratch::size<float>(G * rank) +
                                      Scratch::size<float>(G * kBlock));
  float *work = scratch.take<float>(4 * rank), *rows = scratch.take<float>(kGroup * rank);
  float *whole = scratch.take<float>(D), *q = scratch.take<float>(G * rank), *found = scratch.take<float>(G * kBlock);
  if (coded) {
    const uint8_t* records = s.codes + (head.b * a.Hkv + head.h) * D * row + place / kGroup * record;
    const Codes codes{records, row, head.components, int(rank), int(G), int(s.bits), int(coded / kGroup),
                      kScoreBlock / kGroup * record};
    a.kernels->approximate_codes(codes, head.packed, work, scores, grid.stride);
  }
  const int64_t from = std::max(keys.low, tail), count = keys.high - from;
  if (count <= 0) return;
  for (int64_t j = 0; j < count; j++) {
    read_rows(whole, a.rows, a.plane(a.keys, head.b, head.h), from + j, 1);
    for (int64_t i = 0; i < rank; i++) {
      const int32_t d = head.components[i];
      rows[j * rank + i] = whole[d] - head.centre[d];
    }
  }
  for (int64_t g = 0; g < G; g++) {
    const int64_t tile = g / 4 * 4, heads = std::min<int64_t>(4, G - tile);
    for (int64_t i = 0; i < rank; i++) q[g * rank + i] = head.packed[tile * rank + i * heads + g - tile];
  }
  const Keys block{rows, rows, nullptr, 0, int(count), 0, nullptr, nullptr};
  a.kernels->type[kTypeFloat].score({int(G), int(rank), q, nullptr, nullptr, nullptr}, block, found);
  for (int64_t g = 0; g < G; g++) {
    std::copy(found + g * kBlock, found + g * kBlock + count, scores + g * grid.stride + from - keys.low);
  }
}

// (sparq.3) with all components, from the rows themselves.
void Step::score_rows(const Head& head, Span keys, float* scores) const {
  const char* plane = a.plane(a.keys, head.b, head.h);
  if (a.rows.bits) {
    const PackedRows packed = packed_rows(a.rows, plane, nullptr, keys.low, keys.high - keys.low);
    return a.kernels->type[a.rows.type].score_packed(packed, head.rows.q, int(G), scores, grid.stride);
  }
  const Rows queries{int(G), int(a.D), head.rows.q, nullptr, nullptr, nullptr};
  Scratch scratch(Scratch::kPart, Scratch::size<float>(kBlock * a.D) + Scratch::size<float>(G * kBlock));
  float *k = scratch.take<float>(kBlock * a.D), *found = scratch.take<float>(G * kBlock);
  for (int64_t j = keys.low; j < keys.high; j += kBlock) {
    const int64_t n = std::min<int64_t>(kBlock, keys.high - j);
    read_rows(k, a.rows, plane, j, n);
    a.kernels->type[kTypeFloat].score(queries, {k, k, nullptr, 0, int(n), 0, nullptr, nullptr}, found);
    for (int64_t g = 0; g < G; g++) {
      std::copy(found + g * kBlock, found + g * kBlock + n, scores + g * grid.stride + j - keys.low);
    }
  }
}

// The sums of (sparq.4). A head with a logit that is NaN or +inf has no softmax and ranks nothing but those keys, whose
// scores are NaN.
void Step::normalise(const Head& head) const {
  for (int64_t g = 0; g < G; g++) {
    float *tops = head.tops + g * head.blocks, *sums = head.sums + g * head.blocks, unused;
    double total = 0;
    if (!s.by_logits || s.reallocate) {
      a.kernels->exponentials(tops, int(head.blocks), true, head.most + g, &unused);
      for (int64_t i = 0; i < head.blocks; i++) total += double(tops[i]) * sums[i];
    }
    head.total[g] = float(total);
    for (int64_t i = 0; i < head.blocks; i++) {
      head.factors[i * G + g] = s.by_logits ? 1.0f : head.total[g] > 0 ? tops[i] / head.total[g] : 0.0f;
    }
  }
}

// (sparq.5), and the best keys of (sparq.6) that are not local.
void Step::search(const Head& head, int64_t from, int64_t to, Reservoir& best) const {
  const int64_t local = head.end - std::min(s.local_window, head.end - head.first);
  for (int64_t block = from; block < to; block++) {
    const Span keys = keys_of(head, block);
    const float* scores = head.scores + block * G * grid.stride;
    for (int64_t key = keys.low; key < std::min(keys.high, local); key += kCollected) {
      const int64_t n = std::min(kCollected, std::min(keys.high, local) - key);
      best.added(a.kernels->collect(scores + key - keys.low, grid.stride, head.factors + block * G, int(G), int(n),
                                    int32_t(key), best.threshold(), best.end_z(), best.end_index()));
    }
  }
  best.prune();
}

// s of (sparq.4).
float Step::share(const Head& head, int64_t g, int64_t key) const {
  const int64_t block = grid.block_of(key - origin(head.b)) - head.block0;
  const float score = head.scores[(block * G + g) * grid.stride + key - keys_of(head, block).low];
  if (!s.by_logits) return score * head.factors[block * G + g];
  return head.total[g] > 0 ? std::exp(score - head.most[g]) / head.total[g] : 0.0f;
}

// (sparq.8), (sparq.10): the mass that was not attended goes to the mean value.
void Step::mix(const Head& head, int64_t g, const int32_t* chosen, int64_t count) const {
  float *out = head.rows.output + g * a.D, alpha = 0;
  for (int64_t i = 0; i < count; i++) alpha += share(head, g, chosen[i]);
  for (int64_t d = 0; d < a.D; d++) out[d] = alpha == 1 ? out[d] : alpha * out[d] + (1 - alpha) * head.mean[d];
}

// (sparq.7) to (sparq.10) over the best keys and the local ones, then what several queries attend to besides.
void Step::finish(const Head& head, const int32_t* best, int64_t count, Scratch& scratch) const {
  const int64_t valid = head.end - head.first, D = a.D;
  int32_t* chosen = scratch.take<int32_t>(s.top_k);
  float* weights = scratch.take<float>(G * kBlock);
  const int64_t local = head.everything ? valid : std::min(s.local_window, valid);
  if (count) std::copy(best, best + count, chosen);
  for (int64_t i = 0; i < local; i++) chosen[count + i] = int32_t(head.end - local + i);
  count += local;
  if (s.indices) {
    int32_t* out = s.indices + (head.b * a.Hkv + head.h) * s.slots;
    std::copy(chosen, chosen + count, out);
    std::fill(out + count, out + s.slots, -1);
  }
  Keys block{a.plane(a.keys, head.b, head.h), a.plane(a.values, head.b, head.h), chosen, 0, 0, 0, nullptr, nullptr};
  for (int64_t i = 0; i < count; i += kBlock) {
    block.index = chosen + i;
    block.count = int(std::min<int64_t>(kBlock, count - i));
    block.next = int(std::min<int64_t>(kBlock, count - i - block.count));
    a.attend(head.rows, block, weights);
  }
  const auto divide = [&](int64_t g) {
    const float factor = head.rows.sum[g] == 0 ? 0 : 1 / head.rows.sum[g];
    for (float* out = head.rows.output + g * D; out < head.rows.output + (g + 1) * D; out++) *out *= factor;
  };
  for (int64_t g = 0; g < G; g++) {
    divide(g);
    if (s.reallocate && !head.everything) mix(head, g, chosen, count);
  }
  if (a.own) {
    for (int64_t g = 0; g < G; g++) {
      float* out = head.rows.output + g * D;
      for (int64_t d = 0; d < D; d++) out[d] *= head.rows.sum[g];
    }
    attend_own(a, head.rows, head.b, head.h, weights);
    for (int64_t g = 0; g < G; g++) divide(g);
  }
  a.typed().narrow(static_cast<char*>(a.output) + a.group_offset(head.b, head.h), head.rows.output, G * D);
}

void Step::whole_head(int64_t b, int64_t h) const {
  if (a.append) a.append->head(b, h);
  const int64_t blocks = blocks_of(b);
  Scratch scratch(Scratch::kTask, head_bytes(blocks) + reservoir_bytes() + finish_bytes());
  Head head = take_head(scratch, b, h, blocks);
  prepare(head);
  Reservoir best = take_reservoir(scratch, chosen(head));
  if (!head.everything) {
    score(head, 0, head.blocks);
    normalise(head);
    search(head, 0, head.blocks, best);
  }
  finish(head, best.indices(), best.size(), scratch);
}

// The same with the keys of each head cut into parts; every part brings its own best keys.
void Step::in_parts(int64_t parts, const Pool& pool) const {
  const int64_t heads = a.B * a.Hkv;
  int64_t blocks = 0;
  for (int64_t b = 0; b < a.B; b++) blocks = std::max(blocks, blocks_of(b));
  struct Found {
    int64_t count;
    float* z;
    int32_t* index;
  };
  Scratch shared(Scratch::kCall, heads * (head_bytes(blocks) + Scratch::size<Head>(1)) +
                                     Scratch::size<Found>(heads * parts) +
                                     heads * parts * (Scratch::size<float>(s.top_k) + Scratch::size<int32_t>(s.top_k)));
  Head* all = shared.take<Head>(heads);
  Found* found = shared.take<Found>(heads * parts);
  for (int64_t i = 0; i < heads; i++) all[i] = take_head(shared, i / a.Hkv, i % a.Hkv, blocks);
  for (int64_t i = 0; i < heads * parts; i++)
    found[i] = {0, shared.take<float>(s.top_k), shared.take<int32_t>(s.top_k)};
  const auto from = [&](const Head& head, int64_t part) { return head.blocks * part / parts; };
  pool.run(heads, [&](int64_t i) {
    if (a.append) a.append->head(i / a.Hkv, i % a.Hkv);
    prepare(all[i]);
  });
  pool.run(heads * parts, [&](int64_t i) {
    const Head& head = all[i / parts];
    if (!head.everything) score(head, from(head, i % parts), from(head, i % parts + 1));
  });
  pool.run(heads, [&](int64_t i) {
    if (!all[i].everything) normalise(all[i]);
  });
  pool.run(heads * parts, [&](int64_t i) {
    const Head& head = all[i / parts];
    if (head.everything) return;
    Scratch scratch(Scratch::kTask, reservoir_bytes());
    Reservoir best = take_reservoir(scratch, chosen(head));
    search(head, from(head, i % parts), from(head, i % parts + 1), best);
    found[i].count = best.size();
    std::copy(best.numbers(), best.numbers() + best.size(), found[i].z);
    std::copy(best.indices(), best.indices() + best.size(), found[i].index);
  });
  pool.run(heads, [&](int64_t i) {
    Scratch scratch(Scratch::kTask, reservoir_bytes() + finish_bytes());
    Reservoir best = take_reservoir(scratch, chosen(all[i]));
    for (int64_t part = i * parts; part < (i + 1) * parts; part++)
      best.add(found[part].z, found[part].index, found[part].count);
    best.prune();
    finish(all[i], best.indices(), best.size(), scratch);
  });
}

void Step::run(const Pool& pool) const {
  int64_t longest = 0;
  for (int64_t b = 0; b < a.B; b++) longest = std::max(longest, a.length[b] - a.first[b]);
  const int64_t heads = a.B * a.Hkv, parts = parts_for(heads, longest, kLeastKeys, 2);
  if (parts > 1) return in_parts(parts, pool);
  pool.run(heads, [&](int64_t i) { whole_head(i / a.Hkv, i % a.Hkv); });
}

}  // namespace

void sums_to_statistics(const float* sums, int64_t valid, int64_t D, float* mean, float* deviation) {
  const float count = float(std::max<int64_t>(1, valid));
  for (int64_t d = 0; d < D; d++) {
    mean[d] = sums[d] / count;
    deviation[d] = std::sqrt(sums[2 * D + d] / count);
  }
}

void attend_sparsely(const Attention& a, const SparQ& s, const Pool& pool) { Step(a, s).run(pool); }

}  // namespace sparse
