#include "caches.h"

#include "kernels.h"

namespace sparse {

void set_sizes(Attention& a, const Tensor& query, const Tensor& cache) {
  query.expect({-1, -1, -1, -1});
  cache.expect({query.shape[0], -1, -1, query.shape[3]});
  a.B = query.shape[0], a.Hq = query.shape[1], a.L = query.shape[2], a.D = a.Dv = query.shape[3];
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

Attention attention_of(const Attributes& attributes, const Context& context) {
  Attention a{};
  a.kernels = &kernels();
  a.type = a.query_type = context.type();
  a.scale = attributes.number("scale");
  a.window = attributes["window"];
  return a;
}

Append Caches::append(const Context& context) const {
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

void Caches::make(const Context& context, Append& append, int key_at, int value_at) const {
  const std::initializer_list<int64_t> shape = {key.shape[0], append.Hkv, append.C, append.D};
  append.present_key = context.output(key_at, shape);
  append.present_value = context.output(value_at, shape);
}

CachedCall::CachedCall(const Attributes& attributes, const Context& context, int past_key_at, int past_value_at,
                       int past_length_at)
    : caches(context, 1, past_key_at, past_value_at, past_length_at),
      append(caches.append(context)),
      lengths(caches.key.shape[0]),
      a(attention_of(attributes, context)) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(past_length_at + 1, "left_padding", 'i');
  set_sizes(a, query, caches.past_key);
  caches.key.expect({a.B, a.Hkv, a.L, a.D});
  padding.expect({a.B});
  check_padding(padding);
  for (int64_t b = 0; b < a.B; b++) lengths.all[b] = append.past_length[b] + a.L;
  a.query = query.data, a.first = padding.ints(), a.length = lengths.all, a.append = &append;
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
}

void CachedCall::make(const Context& context, int key_at, int value_at) {
  caches.make(context, append, key_at, value_at);
  a.keys = append.present_key, a.values = append.present_value;
}

SampleSettings sample_of(const Attributes& attributes) {
  return {attributes.number("alpha_column"), attributes.number("alpha_slash"), attributes["chunks"],
          attributes["block_size"]};
}

bool chooses(const Attributes& attributes, const Attention& a) {
  return a.L == 1 && longest_of(a) >= attributes["dense_below"];
}

void attend_prompt(const Attributes& attributes, Attention& a, const Pool& pool) {
  const int64_t block_size = attributes["block_size"];
  bool sampled = block_size && a.L > block_size && a.length[0] >= attributes["dense_prompt_below"];
  for (int64_t b = 0; b < a.B; b++) sampled = sampled && a.first[b] == 0 && a.length[b] == a.length[0];
  if (!sampled) return attend_densely(a, pool);
  Sample sample(a, sample_of(attributes));
  if (sample.everything()) return attend_densely(a, pool);
  append_all(*a.append, a.B, pool);
  sample.select_blocks(pool);
  sample.attend(pool);
}

}  // namespace sparse
