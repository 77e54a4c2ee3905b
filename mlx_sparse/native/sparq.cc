// One decode step of SparQ, docs/spec/sparq.md. A task is one head. If there are fewer heads than workers, a task is
// one split of the keys of a head, which is scored and searched separately.

#include <cmath>

#include "sparq_step.h"

namespace sparse {

namespace sparq {

constexpr int64_t kLeastKeys = 2048;  // minimum keys per split
constexpr int64_t kCollected = 256;   // keys between two reservoir updates

size_t Step::head_bytes(int64_t blocks) const {
  return rows_bytes(G, a) + Scratch::size<float>(G * s.rank) + Scratch::size<int32_t>(s.rank) +
         2 * Scratch::size<float>(a.D) + Scratch::size<float>(a.Dv) + Scratch::size<int32_t>(a.D) +
         Scratch::size<float>(blocks * G * grid.stride) + 3 * Scratch::size<float>(blocks * G);
}

Head Step::take_head(Scratch& scratch, int64_t b, int64_t h, int64_t blocks) const {
  Head head{};
  head.b = b, head.h = h, head.first = a.first[b], head.end = std::max(a.first[b], a.length[b]);
  head.blocks = blocks_of(b);
  head.block0 = head.blocks ? grid.block_of(head.first - origin(b)) : 0;
  head.everything = head.end - head.first <= s.top_k;
  head.rows = take_rows(scratch, G, a);
  head.packed = scratch.take<float>(G * s.rank);
  head.components = scratch.take<int32_t>(s.rank);
  head.mean = scratch.take<float>(a.Dv), head.deviation = scratch.take<float>(a.D);
  head.component = scratch.take<float>(a.D), head.work = scratch.take<int32_t>(a.D);
  head.scores = scratch.take<float>(blocks * G * grid.stride);
  head.tops = scratch.take<float>(blocks * G), head.sums = scratch.take<float>(blocks * G);
  head.factors = scratch.take<float>(blocks * G);
  return head;
}

// Computes (sparq.5) and collects the best keys of (sparq.6) outside the local window.
void Step::search(const Head& head, int64_t from, int64_t to, Reservoir& best) const {
  const int64_t local = window_start(head);
  for (int64_t block = from; block < to; block++) {
    const Span keys = keys_of(head, block);
    const float* scores = head.scores + block * G * grid.stride;
    for (int64_t key = keys.low; key < std::min(keys.high, local); key += kCollected) {
      const int64_t n = std::min(kCollected, std::min(keys.high, local) - key);
      const int found =
          a.kernels->collect(scores + key - keys.low, grid.stride, head.factors + block * G, int(G), int(n),
                             int32_t(key), best.threshold(), best.end_z(), best.end_index());
      best.added(drop_hidden(head, best.end_z(), best.end_index(), found));
    }
  }
  best.prune();
}

// Returns s of (sparq.4).
float Step::share(const Head& head, int64_t g, int64_t key) const {
  const int64_t block = grid.block_of(key - origin(head.b)) - head.block0;
  const float score = head.scores[(block * G + g) * grid.stride + key - keys_of(head, block).low];
  return score * head.factors[block * G + g];
}

// (sparq.8), (sparq.10): adds the mean value, weighted by the softmax mass of the unselected keys.
void Step::mix(const Head& head, int64_t g, float alpha) const {
  float* out = head.rows.output + g * a.Dv;
  for (int64_t d = 0; d < a.Dv; d++) out[d] = alpha == 1 ? out[d] : alpha * out[d] + (1 - alpha) * head.mean[d];
}

// Computes (sparq.7) to (sparq.10) over the best keys and the local window.
void Step::finish(const Head& head, const int32_t* best, int64_t count, Scratch& scratch) const {
  const int64_t Dv = a.Dv;
  int32_t* chosen = scratch.take<int32_t>(s.top_k);
  float* weights = scratch.take<float>(G * kBlock);
  if (count) std::copy(best, best + count, chosen);
  for (int64_t key = head.everything ? head.first : window_start(head); key < head.end; key++) {
    if (!a.hidden(head.b, head.h, key)) chosen[count++] = int32_t(key);
  }
  if (s.indices) {
    int32_t* out = s.indices + (head.b * a.Hkv + head.h) * s.slots;
    std::copy(chosen, chosen + count, out);
    std::fill(out + count, out + s.slots, -1);
  }
  attend_keys(a, head.rows, head.b, head.h, {0, count}, weights, chosen);
  float recall = 0;
  for (int64_t g = 0; g < G; g++) {
    const float sum = head.rows.sum[g], factor = sum == 0 ? 0 : 1 / sum;
    for (float* out = head.rows.output + g * Dv; out < head.rows.output + (g + 1) * Dv; out++) *out *= factor;
    float alpha = sum == 0 ? 0 : sum * factor;  // 1, or NaN
    if (!head.everything && (s.reallocate || s.recall)) {
      alpha = 0;
      for (int64_t i = 0; i < count; i++) alpha += share(head, g, chosen[i]);
    }
    if (s.reallocate && !head.everything && sum != 0) mix(head, g, alpha);
    recall += alpha;
    if (a.lse) a.lse[head.b * a.Hq + head.h * G + g] = lse_of(head.rows.top[g], sum);
  }
  if (s.recall) s.recall[head.b * a.Hkv + head.h] = recall / float(G);
  char* output = static_cast<char*>(a.output) + a.group_offset(Dv, head.b, head.h);
  a.query_kernels().narrow(output, head.rows.output, G * Dv);
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

// Runs the step with the keys of each head divided into splits. Every split contributes its best keys.
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

}  // namespace sparq

void sums_to_statistics(const float* sums, int64_t valid, int64_t D, float* mean, float* deviation) {
  const float count = float(std::max<int64_t>(1, valid));
  for (int64_t d = 0; d < D; d++) {
    mean[d] = sums[d] / count;
    deviation[d] = std::sqrt(sums[2 * D + d] / count);
  }
}

void attend_sparsely(const Attention& a, const SparQ& s, const Pool& pool) { sparq::Step(a, s).run(pool); }

}  // namespace sparse
