// SAAP, docs/spec/saap.md: assigns new keys to buckets, and runs a decode step. ONNX files have no lists of keys by
// bucket. Their step reads the bucket numbers of all keys of a head, 2 bytes per key.

#include "saap.h"

#include "select.h"

namespace sparse {

namespace {

constexpr int64_t kTokens = 16;  // tokens that are assigned to buckets at a time

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// One layer of the query network of a KV head.
struct Layer {
  const char *weight, *bias;  // (n, width), (width)
  int64_t n, width;
};

class Step {
 public:
  Step(const Attention& a, const Saap& s)
      : a(a), s(s), G(a.G()), features(s.hidden ? s.hidden : a.D), widest(std::max({a.D, s.hidden, s.buckets})) {}

  void run(const Pool& pool) const;

 private:
  Layer layer(const void* weight, const void* bias, int64_t h, int64_t n, int64_t width) const {
    const int64_t item = size_of(s.weights);
    return {static_cast<const char*>(weight) + h * n * width * item, static_cast<const char*>(bias) + h * width * item,
            n, width};
  }
  size_t network_bytes() const {
    return 2 * Scratch::size<float>(G * padded(widest)) + Scratch::size<float>(G * widest) +
           Scratch::size<float>(widest) + 2 * Scratch::size<int32_t>(widest) + Scratch::size<int32_t>(s.probes) +
           Scratch::size<uint8_t>(s.buckets + 1);
  }
  void apply(const Layer&, const float* x, float* y, Scratch&) const;
  const uint8_t* route(int64_t b, int64_t h, Scratch&) const;
  int64_t list(int64_t b, int64_t h, const uint8_t* visited, int32_t* listed) const;
  int64_t select_keys(int64_t b, int64_t h, int32_t* listed) const;

  const Attention& a;
  const Saap& s;
  const int64_t G, features, widest;
};

// Computes y (G, padded width) = x (G, padded n) weight + bias. Rows of weights whose factor is 0 are not read.
void Step::apply(const Layer& layer, const float* x, float* y, Scratch& scratch) const {
  const TypeKernels& kernels = a.kernels->type[s.weights];
  const int64_t stride = padded(layer.width);
  int32_t* components = scratch.take<int32_t>(widest);
  float* packed = scratch.take<float>(G * widest);
  float* bias = scratch.take<float>(widest);
  int64_t rank = 0;
  for (int64_t i = 0; i < layer.n; i++) {
    bool used = false;
    for (int64_t g = 0; g < G; g++) used = used || x[g * padded(layer.n) + i] != 0;
    if (used) components[rank++] = int32_t(i);
  }
  for (int64_t g = 0; g < G; g++) {
    const int64_t tile = g / 4 * 4, heads = std::min<int64_t>(4, G - tile);
    for (int64_t i = 0; i < rank; i++) {
      packed[tile * rank + i * heads + g - tile] = x[g * padded(layer.n) + components[i]];
    }
  }
  if (!rank) std::fill(y, y + G * stride, 0.0f);
  Columns columns{};
  columns.stride = layer.width, columns.components = components, columns.rank = int(rank), columns.G = int(G);
  for (int64_t j = 0; rank && j < layer.width; j += kScoreBlock) {
    const int64_t next = std::min<int64_t>(j + kScoreBlock, layer.width - 1), item = size_of(s.weights);
    columns.lanes = layer.weight + j * item, columns.next = layer.weight + next * item;
    columns.count = int(std::min<int64_t>(kScoreBlock, layer.width - j));
    columns.readable = int(std::min<int64_t>(2 * kScoreBlock, layer.width - j));
    kernels.approximate(columns, packed, y + j, stride);
  }
  kernels.widen(bias, layer.bias, layer.width);
  for (int64_t g = 0; g < G; g++) {
    for (int64_t i = 0; i < layer.width; i++) y[g * stride + i] += bias[i];
  }
}

// (saap.5), (saap.8): sets the flag of each visited bucket. The last flag is for keys without a bucket.
const uint8_t* Step::route(int64_t b, int64_t h, Scratch& scratch) const {
  const int64_t D = a.D, N = s.buckets;
  float *x = scratch.take<float>(G * padded(widest)), *y = scratch.take<float>(G * padded(widest));
  int32_t *chosen = scratch.take<int32_t>(s.probes), *work = scratch.take<int32_t>(widest);
  uint8_t* visited = scratch.take<uint8_t>(N + 1);
  const char* query = static_cast<const char*>(s.query_before) + a.group_offset(D, b, h);
  for (int64_t g = 0; g < G; g++) {
    a.query_kernels().widen(x + g * padded(D), query + g * D * size_of(a.query_type), D);
  }
  const auto through = [&](const Layer& layer) {
    Scratch room = scratch;  // both layers reuse the same memory
    apply(layer, x, y, room);
    std::swap(x, y);
  };
  if (s.hidden) {
    through(layer(s.hidden_weight, s.hidden_bias, h, D, s.hidden));
    for (int64_t i = 0; i < G * padded(s.hidden); i++) x[i] = std::max(x[i], 0.0f);
  }
  through(layer(s.out_weight, s.out_bias, h, features, N));
  float* score = y;
  std::fill(score, score + N, 0.0f);
  for (int64_t g = 0; g < G; g++) {
    float *logits = x + g * padded(N), top, sum;
    a.kernels->exponentials(logits, int(N), true, &top, &sum);
    // If a logit is NaN or +inf, the head has no softmax. NaN and +inf logits become NaN, and all others 0.
    const float total = sum > 0 ? sum : __builtin_inff();
    for (int64_t i = 0; i < N; i++) score[i] += logits[i] / total;
  }
  largest(*a.kernels, score, N, s.probes, chosen, work);
  std::fill(visited, visited + N + 1, 0);
  for (int64_t i = 0; i < s.probes; i++) visited[chosen[i]] = 1;
  return visited;
}

// (saap.10): lists the first keys, the keys of the visited buckets and the last keys. `listed` needs space for one
// number more than the row has keys.
int64_t Step::list(int64_t b, int64_t h, const uint8_t* visited, int32_t* listed) const {
  const int64_t first = a.first[b], end = std::max(first, a.length[b]);
  const int64_t recent = end - std::min(s.recent_tokens, end - first);
  const int64_t sinks = first + std::min(s.sink_tokens, recent - first);
  const int16_t* ids = s.ids + (b * a.Hkv + h) * a.C;
  int64_t count = 0;
  for (int64_t j = first; j < sinks; j++) listed[count++] = int32_t(j);
  for (int64_t j = sinks; j < recent; j++) {
    const int64_t id = std::min<int64_t>(uint16_t(ids[j]), s.buckets);
    listed[count] = int32_t(j);
    count += visited[id];
  }
  for (int64_t j = recent; j < end; j++) listed[count++] = int32_t(j);
  return count;
}

// Appends the new keys of a head and lists the keys that its queries attend to.
int64_t Step::select_keys(int64_t b, int64_t h, int32_t* listed) const {
  if (a.append) a.append->head(b, h);
  Scratch scratch(Scratch::kTask, network_bytes());
  return list(b, h, route(b, h, scratch), listed);
}

void Step::run(const Pool& pool) const {
  int64_t room = 1;
  for (int64_t b = 0; b < a.B; b++) room = std::max(room, a.length[b] - a.first[b] + 1);
  attend_lists(a, room, [&](int64_t b, int64_t h, int32_t* listed) { return select_keys(b, h, listed); }, pool);
}

}  // namespace

void attend_buckets(const Attention& a, const Saap& s, const Pool& pool) { Step(a, s).run(pool); }

// (saap.10): the sinks, the keys outside the index, then the keys of the visited buckets.
void list_buckets(const BucketLists& l) {
  for (int64_t i = 0; i < l.B * l.Hkv; i++) {
    const int64_t b = i / l.Hkv, first = l.first[b], covered = l.covered[b];
    const int32_t *offsets = l.offsets + i * (l.buckets + 1), *ids = l.key_ids + i * l.listed;
    int32_t* to = l.indices + i * l.capacity;
    int64_t count = 0;
    const auto add = [&](int32_t key) {
      if (count < l.capacity) to[count++] = key;
    };
    const int64_t sinks = std::min(first + std::min(l.sink_tokens, l.length), covered);
    for (int64_t j = first; j < sinks; j++) add(int32_t(j));
    for (int64_t j = std::max(first, covered); j < l.length; j++) add(int32_t(j));
    for (int64_t v = 0; v < l.n; v++) {
      const int32_t bucket = l.visited[i * l.n + v];
      if (bucket < 0 || bucket >= l.buckets) continue;
      const int64_t low = std::max(0, offsets[bucket]), high = std::min<int64_t>(offsets[bucket + 1], l.listed);
      for (int64_t j = low; j < high; j++) add(ids[j]);
    }
    std::fill(to + count, to + l.capacity, -1);
    l.counts[i] = int32_t(count);
  }
}

void Assign::head(int64_t b, int64_t h) const {
  const int64_t plane = b * Hkv + h, key_item = size_of(type), item = size_of(weights);
  int16_t* ids = present_ids + plane * C;
  if (past_ids != present_ids) std::copy(past_ids + plane * C, past_ids + (plane + 1) * C, ids);
  ids += past_length[b];
  Scratch scratch(Scratch::kTask, Scratch::size<float>(kTokens * D) + Scratch::size<float>(kTokens * kBlock));
  float *rows = scratch.take<float>(kTokens * D), *scores = scratch.take<float>(kTokens * kBlock);
  const char* keys = static_cast<const char*>(key) + plane * L * D * key_item;
  const char* all = static_cast<const char*>(centroids) + h * buckets * D * item;
  for (int64_t i = 0; i < L; i += kTokens) {
    const int64_t n = std::min(kTokens, L - i);
    kernels->type[type].widen(rows, keys + i * D * key_item, n * D);
    const Rows tokens{int(n), int(D), int(D), rows, nullptr, nullptr, nullptr};
    float best[kTokens];
    std::fill(best, best + n, -__builtin_inff());
    std::fill(ids + i, ids + i + n, int16_t(0));  // keys with NaN or inf stay in bucket 0, because all products are NaN
    for (int64_t j = 0; j < buckets; j += kBlock) {
      const Keys block{all, all, nullptr, j, int(std::min<int64_t>(kBlock, buckets - j)), 0, nullptr, nullptr};
      kernels->type[weights].score(tokens, block, scores);
      for (int64_t t = 0; t < n; t++) {
        for (int c = 0; c < block.count; c++) {
          const float score = scores[t * kBlock + c];
          if (score > best[t] && score < __builtin_inff()) best[t] = score, ids[i + t] = int16_t(j + c);
        }
      }
    }
  }
}

}  // namespace sparse
