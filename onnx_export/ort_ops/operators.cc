#include "operators.h"

#include <limits>

#include "attention.h"
#include "dispatch.h"
#include "sample.h"

namespace sparse {

namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostBuckets = std::numeric_limits<int16_t>::max();
using std::to_string;

// Sizes of a query (B, Hq, L, D) and of caches (B, Hkv, C, D) that fit it.
void set_sizes(Attention& a, const Tensor& query, const Tensor& cache) {
  query.expect({-1, -1, -1, -1});
  cache.expect({query.shape[0], -1, -1, query.shape[3]});
  a.B = query.shape[0], a.Hq = query.shape[1], a.L = query.shape[2], a.D = query.shape[3];
  a.Hkv = cache.shape[1], a.C = cache.shape[2];
  if (a.Hq % a.Hkv) fail("query", "a multiple of Hkv=" + to_string(a.Hkv) + " heads", to_string(a.Hq));
  if (a.C > kMost) fail(cache.name, "a capacity below 2**31", to_string(a.C));
}

void check_range(const Tensor& tensor, int64_t low, int64_t high, const char* meaning) {
  for (int64_t i = 0; i < tensor.shape[0]; i++) {
    const int64_t value = tensor.ints()[i];
    if (value < low || value > high) {
      fail(tensor.name, to_string(low) + " to " + to_string(high) + " (" + meaning + ")", to_string(value));
    }
  }
}

void check_padding(const Tensor& left_padding) {
  check_range(left_padding, 0, std::numeric_limits<int64_t>::max(), "the first valid key");
}

// What DenseAttention and the operators with caches start from.
Attention attention_of(const Attributes& attributes, const Context& context) {
  Attention a{};
  a.kernels = &kernels();
  a.type = context.type();
  a.scale = attributes.scale;
  a.window = attributes.window;
  return a;
}

SparQ sparq_of(const Attributes& attributes, int64_t D) {
  if (attributes.rank > D) fail("rank", "at most the head dim D=" + to_string(D), to_string(attributes.rank));
  SparQ s{};
  s.rank = attributes.rank, s.top_k = attributes.top_k, s.local_window = attributes.local_window;
  s.reallocate = attributes.reallocate, s.by_logits = attributes.group_reduce, s.by_key = attributes.component_score;
  return s;
}

// No row has more keys than `most`, so a larger k means the same.
void clamp_choice(SparQ& s, int64_t most) {
  s.top_k = std::min(s.top_k, std::max<int64_t>(most, 1));
  s.local_window = std::min(s.local_window, s.top_k);
}

int64_t longest_of(const Attention& a) { return *std::max_element(a.length, a.length + a.B); }

void compute_sparq(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), keys = context.input(1, "keys", 'T');
  const Tensor keys_t = context.input(2, "keys_t", 'T'), values = context.input(3, "values", 'T');
  const Tensor padding = context.input(4, "left_padding", 'i'), length = context.input(5, "length", 'i');
  const Tensor mean = context.input(6, "value_mean", 'f'), deviation = context.input(7, "deviation", 'f');
  Attention a = attention_of(attributes, context);
  set_sizes(a, query, keys);
  query.expect({a.B, a.Hq, 1, a.D});
  keys_t.expect({a.B, a.Hkv, -1, a.D, -1});
  values.expect({a.B, a.Hkv, a.C, a.D});
  padding.expect({a.B});
  length.expect({a.B});
  mean.expect({a.B, a.Hkv, a.D});
  deviation.expect({a.B, a.Hkv, a.D});
  const int64_t lanes = keys_t.shape[4], chunks = keys_t.shape[2];
  if (lanes > kMost || chunks > kMost) fail("keys_t", "axes below 2**31", to_string(std::max(lanes, chunks)));
  check_padding(padding);
  check_range(length, 0, std::min(a.C, chunks * lanes), "the keys that fit in keys and keys_t");
  a.query = query.data, a.keys = keys.data, a.values = values.data, a.first = padding.ints(), a.length = length.ints();
  SparQ s = sparq_of(attributes, a.D);
  const int64_t longest = longest_of(a), touched = std::max<int64_t>(1, (longest + lanes - 1) / lanes);
  s.keys_t = keys_t.data, s.lanes = lanes, s.plane = chunks * a.D * lanes;
  s.value_mean = mean.floats(), s.deviation = deviation.floats();
  s.slots = std::min(s.top_k, touched * lanes);
  clamp_choice(s, longest);
  a.output = context.output(0, {a.B, a.Hq, 1, a.D});
  s.indices = static_cast<int32_t*>(context.output(1, {a.B, a.Hkv, s.slots}));
  attend_sparsely(a, s, Pool(context.api(), context.context()));
}

void compute_dense(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), keys = context.input(1, "keys", 'T');
  const Tensor values = context.input(2, "values", 'T');
  const Tensor padding = context.input(3, "left_padding", 'i'), length = context.input(4, "length", 'i');
  Attention a = attention_of(attributes, context);
  set_sizes(a, query, keys);
  values.expect({a.B, a.Hkv, a.C, a.D});
  padding.expect({a.B});
  length.expect({a.B});
  check_padding(padding);
  check_range(length, 0, a.C, "the capacity");
  a.query = query.data, a.keys = keys.data, a.values = values.data, a.first = padding.ints(), a.length = length.ints();
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  attend_densely(a, Pool(context.api(), context.context()));
}

// Inputs key, value, past_key and past_value, and what they are appended to.
struct Caches {
  Tensor key, value, past_key, past_value, past_length;

  Caches(const Context& context, int first, int past_key_at, int past_value_at, int past_length_at)
      : key(context.input(first, "key", 'T')),
        value(context.input(first + 1, "value", 'T')),
        past_key(context.input(past_key_at, "past_key", 'T')),
        past_value(context.input(past_value_at, "past_value", 'T')),
        past_length(context.input(past_length_at, "past_length", 'i')) {}

  Append append(const Context& context) const {
    key.expect({-1, -1, -1, -1});
    const int64_t B = key.shape[0], Hkv = key.shape[1], L = key.shape[2], D = key.shape[3];
    past_key.expect({B, Hkv, -1, D});
    const int64_t C = past_key.shape[2];
    value.expect({B, Hkv, L, D});
    past_value.expect({B, Hkv, C, D});
    past_length.expect({B});
    if (L > C) fail("key", "at most the capacity C=" + to_string(C) + " of tokens", to_string(L));
    check_range(past_length, 0, C - L, "the capacity less the new tokens");
    Append a{};
    a.type = context.type(), a.Hkv = Hkv, a.L = L, a.C = C, a.D = D;
    a.key = key.data, a.value = value.data, a.past_key = past_key.data, a.past_value = past_value.data;
    a.past_length = past_length.ints();
    a.kernels = &kernels().type[a.type];
    return a;
  }
};

void compute_append(const Attributes&, const Context& context) {
  const Caches caches(context, 0, 2, 3, 4);
  Append append = caches.append(context);
  const int64_t B = caches.key.shape[0];
  append.present_key = context.output(0, {B, append.Hkv, append.C, append.D});
  append.present_value = context.output(1, {B, append.Hkv, append.C, append.D});
  append_all(append, B, Pool(context.api(), context.context()));
}

SampleSettings sample_of(const Attributes& attributes) {
  return {attributes.alpha_column, attributes.alpha_slash, attributes.chunks, attributes.block_size};
}

void compute_sample(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), keys = context.input(1, "keys", 'T');
  const Tensor values = context.input(2, "values", 'T'), length = context.input(3, "length", 'i');
  Attention a = attention_of(attributes, context);
  set_sizes(a, query, keys);
  values.expect({a.B, a.Hkv, a.C, a.D});
  length.expect({1});
  if (a.L > a.C) fail("query", "at most the capacity C=" + to_string(a.C) + " of tokens", to_string(a.L));
  check_range(length, a.L, a.C, "the queries to the capacity");
  Scratch scratch(Scratch::kLengths, 2 * Scratch::size<int64_t>(a.B));
  int64_t *lengths = scratch.take<int64_t>(a.B), *padding = scratch.take<int64_t>(a.B);
  std::fill(lengths, lengths + a.B, length.ints()[0]);
  std::fill(padding, padding + a.B, 0);
  a.query = query.data, a.keys = keys.data, a.values = values.data, a.first = padding, a.length = lengths;
  const Pool pool(context.api(), context.context());
  Sample sample(a, sample_of(attributes));
  if (!sample.everything()) sample.choose(pool);
  const int64_t width = sample.longest_list();
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  sample.write_lists(static_cast<int32_t*>(context.output(1, {a.B, a.Hq, sample.row_blocks(), width})), width);
  if (sample.everything()) return attend_densely(a, pool);
  sample.attend(pool);
}

// The new tokens exactly, or by SampleAttention where there are attributes of it and it has something to leave out.
void attend_prompt(const Attributes& attributes, Attention& a, const Pool& pool) {
  bool sampled = attributes.block_size && a.L > attributes.block_size && a.length[0] >= attributes.dense_prompt_below;
  for (int64_t b = 0; b < a.B; b++) sampled = sampled && a.first[b] == 0 && a.length[b] == a.length[0];
  if (!sampled) return attend_densely(a, pool);
  Sample sample(a, sample_of(attributes));
  if (sample.everything()) return attend_densely(a, pool);
  append_all(*a.append, a.B, pool);
  sample.choose(pool);
  sample.attend(pool);
}

// The attention over caches to which `append` adds; `length` is room for B.
Attention attention_over(const Attributes& attributes, const Context& context, const Caches& caches,
                         const Append& append, const Tensor& query, const Tensor& padding, int64_t* length) {
  Attention a = attention_of(attributes, context);
  set_sizes(a, query, caches.past_key);
  caches.key.expect({a.B, a.Hkv, a.L, a.D});
  padding.expect({a.B});
  check_padding(padding);
  for (int64_t b = 0; b < a.B; b++) length[b] = append.past_length[b] + a.L;
  a.query = query.data, a.keys = append.present_key, a.values = append.present_value;
  a.first = padding.ints(), a.length = length, a.append = &append;
  return a;
}

void compute_cached(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(6, "left_padding", 'i');
  const Caches caches(context, 1, 3, 4, 5);
  Append append = caches.append(context);
  Scratch scratch(Scratch::kLengths, Scratch::size<int64_t>(caches.key.shape[0]));
  int64_t* length = scratch.take<int64_t>(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, length);
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  a.keys = append.present_key = context.output(1, {a.B, a.Hkv, a.C, a.D});
  a.values = append.present_value = context.output(2, {a.B, a.Hkv, a.C, a.D});
  attend_prompt(attributes, a, Pool(context.api(), context.context()));
}

// The caches that SparQ has besides: inputs `key_t_at` and `sums_at`, outputs from `first` on.
void add_sparq_caches(const Attributes& attributes, const Context& context, Append& append, int64_t B, int key_t_at,
                      int sums_at, int first, const int64_t* padding) {
  const int64_t Hkv = append.Hkv, C = append.C, D = append.D, lanes = attributes.lanes;
  const Tensor past_key_t = context.input(key_t_at, "past_key_t", 'T');
  const Tensor past_sums = context.input(sums_at, "past_sums", 'f');
  past_key_t.expect({B, Hkv, C, D});
  past_sums.expect({B, Hkv, 3, D});
  if (C % lanes) fail("lanes", "a divisor of the capacity C=" + to_string(C), to_string(lanes));
  append.present_key = context.output(first, {B, Hkv, C, D});
  append.present_key_t = context.output(first + 1, {B, Hkv, C, D});
  append.present_value = context.output(first + 2, {B, Hkv, C, D});
  append.present_sums = static_cast<float*>(context.output(first + 3, {B, Hkv, 3, D}));
  append.past_key_t = past_key_t.data, append.past_sums = past_sums.floats();
  append.lanes = lanes, append.first = padding;
}

void compute_sparq_append(const Attributes& attributes, const Context& context) {
  const Tensor padding = context.input(7, "left_padding", 'i');
  const Caches caches(context, 0, 2, 4, 6);
  Append append = caches.append(context);
  const int64_t B = caches.key.shape[0], Hkv = append.Hkv, D = append.D;
  padding.expect({B});
  check_padding(padding);
  add_sparq_caches(attributes, context, append, B, 3, 5, 0, padding.ints());
  float* mean = static_cast<float*>(context.output(4, {B, Hkv, D}));
  float* deviation = static_cast<float*>(context.output(5, {B, Hkv, D}));
  append_all(append, B, Pool(context.api(), context.context()));
  for (int64_t b = 0; b < B; b++) {
    const int64_t valid = append.past_length[b] + append.L - padding.ints()[b];
    for (int64_t h = b * Hkv; h < (b + 1) * Hkv; h++) {
      sums_to_statistics(append.present_sums + 3 * h * D, valid, D, mean + h * D, deviation + h * D);
    }
  }
}

void compute_sparq_attention(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(8, "left_padding", 'i');
  const Caches caches(context, 1, 3, 5, 7);
  Append append = caches.append(context);
  Scratch scratch(Scratch::kLengths, Scratch::size<int64_t>(caches.key.shape[0]));
  int64_t* length = scratch.take<int64_t>(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, length);
  SparQ s = sparq_of(attributes, a.D);
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  add_sparq_caches(attributes, context, append, a.B, 4, 6, 1, a.first);
  a.keys = append.present_key, a.values = append.present_value;
  const Pool pool(context.api(), context.context());
  if (a.L > 1 || longest_of(a) < attributes.dense_below) return attend_prompt(attributes, a, pool);
  s.keys_t = append.present_key_t, s.lanes = attributes.lanes, s.plane = a.C * a.D, s.sums = append.present_sums;
  clamp_choice(s, longest_of(a));
  attend_sparsely(a, s, pool);
}

// One layer of the query networks of all KV heads: x (.., n) to (.., width).
void check_layer(const Tensor& weight, const Tensor& bias, int64_t Hkv, int64_t n, int64_t width) {
  weight.expect({Hkv, n, width});
  bias.expect({Hkv, width});
}

void compute_saap_attention(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(9, "left_padding", 'i');
  const Tensor query_before = context.input(3, "query_before", 'T'), key_before = context.input(4, "key_before", 'T');
  const Tensor past_ids = context.input(7, "past_bucket_ids", 's'), centroids = context.input(10, "centroids", 'W');
  const Tensor hidden_weight = context.input(11, "hidden_weight", 'W'),
               hidden_bias = context.input(12, "hidden_bias", 'W');
  const Tensor out_weight = context.input(13, "out_weight", 'W'), out_bias = context.input(14, "out_bias", 'W');
  const Caches caches(context, 1, 5, 6, 8);
  Append append = caches.append(context);
  Scratch scratch(Scratch::kLengths, Scratch::size<int64_t>(caches.key.shape[0]));
  int64_t* length = scratch.take<int64_t>(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, length);
  query_before.expect({a.B, a.Hq, a.L, a.D});
  key_before.expect({a.B, a.Hkv, a.L, a.D});
  past_ids.expect({a.B, a.Hkv, a.C});
  centroids.expect({a.Hkv, -1, a.D});
  const int64_t N = centroids.shape[1], H = hidden_weight.axes == 3 ? hidden_weight.shape[2] : 1;
  if (N > kMostBuckets) fail("centroids", "at most " + to_string(kMostBuckets) + " buckets", to_string(N));
  if (attributes.probes > N) fail("probes", "at most the " + to_string(N) + " buckets", to_string(attributes.probes));
  check_layer(hidden_weight, hidden_bias, a.Hkv, a.D, H);
  check_layer(out_weight, out_bias, a.Hkv, H ? H : a.D, N);

  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  a.keys = append.present_key = context.output(1, {a.B, a.Hkv, a.C, a.D});
  a.values = append.present_value = context.output(2, {a.B, a.Hkv, a.C, a.D});
  int16_t* ids = static_cast<int16_t*>(context.output(3, {a.B, a.Hkv, a.C}));
  Assign assign{};
  assign.kernels = a.kernels, assign.type = a.type, assign.weights = context.weights();
  assign.Hkv = a.Hkv, assign.L = a.L, assign.C = a.C, assign.D = a.D, assign.buckets = N;
  assign.key = key_before.data, assign.centroids = centroids.data, assign.past_length = append.past_length;
  assign.past_ids = past_ids.shorts(), assign.present_ids = ids;
  append.assign = &assign;
  const Pool pool(context.api(), context.context());
  if (a.L > 1 || longest_of(a) < attributes.dense_below) return attend_prompt(attributes, a, pool);
  Saap s{};
  s.probes = attributes.probes, s.sink_tokens = attributes.sink_tokens, s.recent_tokens = attributes.recent_tokens;
  s.buckets = N, s.hidden = H, s.weights = context.weights();
  s.query_before = query_before.data, s.ids = ids;
  s.hidden_weight = hidden_weight.data, s.hidden_bias = hidden_bias.data;
  s.out_weight = out_weight.data, s.out_bias = out_bias.data;
  attend_buckets(a, s, pool);
}

}  // namespace

constexpr unsigned kSparQCaches = kScale | kSparQ | kLanes | kDenseBelow, kPrompts = kSample | kDensePrompt;
const Signature kSignatures[kOperators] = {
    {"SparQ", "TTTTiiff", "Tn", {0, -1}, kScale | kSparQ, compute_sparq},
    {"DenseAttention", "TTTii", "T", {0}, kScale | kWindow, compute_dense},
    {"Sample", "TTTi", "Tn", {0, -1}, kScale | kSample, compute_sample},
    {"Append", "TTTTi", "TT", {2, 3}, 0, compute_append},
    {"SparQAppend", "TTTTTfii", "TTTfff", {2, 3, 4, 5, -1, -1}, kLanes, compute_sparq_append},
    {"CachedAttention", "TTTTTii", "TTT", {0, 3, 4}, kScale | kWindow, compute_cached},
    {"SparQAttention", "TTTTTTfii", "TTTTf", {0, 3, 4, 5, 6}, kSparQCaches, compute_sparq_attention},
    {"SaapAttention", "TTTTTTTsiiWWWWW", "TTTs", {0, 5, 6, 7}, kScale | kSaap | kDenseBelow, compute_saap_attention},
    {"SampleAttention", "TTTTTii", "TTT", {0, 3, 4}, kScale | kPrompts, compute_cached},
    {"SampleSparQAttention", "TTTTTTfii", "TTTTf", {0, 3, 4, 5, 6}, kSparQCaches | kPrompts, compute_sparq_attention},
    {"SampleSaapAttention",
     "TTTTTTTsiiWWWWW",
     "TTTs",
     {0, 5, 6, 7},
     kScale | kSaap | kDenseBelow | kPrompts,
     compute_saap_attention},
};

}  // namespace sparse
