#include "operators.h"

#include <cmath>
#include <limits>

#include "attention.h"
#include "dispatch.h"

namespace sparse {

namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
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
  attend_densely(a, Pool(context.api(), context.context()));
}

void compute_sparq_attention(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(8, "left_padding", 'i');
  const Tensor past_key_t = context.input(4, "past_key_t", 'T'), past_sums = context.input(6, "past_sums", 'f');
  const Caches caches(context, 1, 3, 5, 7);
  Append append = caches.append(context);
  Scratch scratch(Scratch::kLengths, Scratch::size<int64_t>(caches.key.shape[0]));
  int64_t* length = scratch.take<int64_t>(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, length);
  past_key_t.expect({a.B, a.Hkv, a.C, a.D});
  past_sums.expect({a.B, a.Hkv, 3, a.D});
  const int64_t lanes = attributes.lanes;
  if (a.C % lanes) fail("lanes", "a divisor of the capacity C=" + to_string(a.C), to_string(lanes));
  SparQ s = sparq_of(attributes, a.D);
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  a.keys = append.present_key = context.output(1, {a.B, a.Hkv, a.C, a.D});
  append.present_key_t = context.output(2, {a.B, a.Hkv, a.C, a.D});
  a.values = append.present_value = context.output(3, {a.B, a.Hkv, a.C, a.D});
  append.present_sums = static_cast<float*>(context.output(4, {a.B, a.Hkv, 3, a.D}));
  append.past_key_t = past_key_t.data, append.past_sums = past_sums.floats();
  append.lanes = lanes, append.first = a.first;
  const Pool pool(context.api(), context.context());
  if (a.L > 1 || longest_of(a) < attributes.dense_below) return attend_densely(a, pool);
  s.keys_t = append.present_key_t, s.lanes = lanes, s.plane = a.C * a.D, s.sums = append.present_sums;
  clamp_choice(s, longest_of(a));
  attend_sparsely(a, s, pool);
}

struct IntAttribute {
  const char* name;
  int64_t Attributes::*to;
  int64_t low, high;
  bool Signature::*of;
};

constexpr IntAttribute kInts[] = {
    {"rank", &Attributes::rank, 1, kMost, &Signature::sparq},
    {"top_k", &Attributes::top_k, 1, kMost, &Signature::sparq},
    {"local_window", &Attributes::local_window, 0, kMost, &Signature::sparq},
    {"reallocate", &Attributes::reallocate, 0, 1, &Signature::sparq},
    {"group_reduce", &Attributes::group_reduce, 0, 1, &Signature::sparq},
    {"component_score", &Attributes::component_score, 0, 1, &Signature::sparq},
    {"window", &Attributes::window, 0, std::numeric_limits<int64_t>::max(), &Signature::windowed},
    {"lanes", &Attributes::lanes, 1, kMost, &Signature::chunked},
    {"dense_below", &Attributes::dense_below, 0, std::numeric_limits<int64_t>::max(), &Signature::chunked},
};

}  // namespace

const Signature kSignatures[kOperators] = {
    {"SparQ", "TTTTiiff", "Tn", {0, -1}, true, true, false, false, compute_sparq},
    {"DenseAttention", "TTTii", "T", {0}, false, true, true, false, compute_dense},
    {"Append", "TTTTi", "TT", {2, 3}, false, false, false, false, compute_append},
    {"CachedAttention", "TTTTTii", "TTT", {0, 3, 4}, false, true, true, false, compute_cached},
    {"SparQAttention", "TTTTTTfii", "TTTTf", {0, 3, 4, 5, 6}, true, true, false, true, compute_sparq_attention},
};

Attributes read_attributes(const Signature& signature, const ort::Api* api, const ort::KernelInfo* info) {
  Attributes read;
  const auto integer = [&](const char* name) {
    int64_t value = 0;
    if (ort::Status* status = ort::GetAttributeInt::call(api, info, name, &value)) {
      ort::ReleaseStatus::call(api, status);
      fail(name, "an integer attribute", "none");
    }
    return value;
  };
  if (const int64_t spec = integer("spec"); spec != kSpec) {
    fail("spec", to_string(kSpec) + ", which this library knows", to_string(spec));
  }
  for (const IntAttribute& each : kInts) {
    if (!(signature.*each.of)) continue;
    const int64_t value = integer(each.name);
    if (value < each.low || value > each.high) {
      fail(each.name, to_string(each.low) + " to " + to_string(each.high), to_string(value));
    }
    read.*each.to = value;
  }
  if (read.local_window > read.top_k) {
    fail("local_window", "at most top_k=" + to_string(read.top_k) + ", which includes it",
         to_string(read.local_window));
  }
  if (signature.attends) {
    if (ort::Status* status = ort::GetAttributeFloat::call(api, info, "scale", &read.scale)) {
      ort::ReleaseStatus::call(api, status);
      fail("scale", "a float attribute", "none");
    }
    if (!std::isfinite(read.scale)) fail("scale", "a finite number", to_string(read.scale));
  }
  return read;
}

}  // namespace sparse
