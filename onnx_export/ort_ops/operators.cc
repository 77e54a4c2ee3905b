#include "caches.h"

namespace sparse {

namespace {

SparQ sparq_of(const Attributes& attributes, int64_t D) {
  if (attributes["rank"] > D) fail("rank", "at most the head dim D=" + to_string(D), to_string(attributes["rank"]));
  SparQ s{};
  s.rank = attributes["rank"], s.top_k = attributes["top_k"], s.local_window = attributes["local_window"];
  s.reallocate = attributes["reallocate"],
  s.by_key = attributes["component_score"];
  return s;
}

// Clamp k to `most`, because no row has more keys.
void clamp_selection(SparQ& s, int64_t most) {
  s.top_k = std::min(s.top_k, std::max<int64_t>(most, 1));
  s.local_window = std::min(s.local_window, s.top_k);
}

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
  clamp_selection(s, longest);
  a.output = context.output(0, {a.B, a.Hq, 1, a.D});
  s.indices = static_cast<int32_t*>(context.output(1, {a.B, a.Hkv, s.slots}));
  attend_sparsely(a, s, SessionPool(context));
}

void compute_sparq_coded(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), keys = context.input(1, "keys", 'T');
  const Tensor codes = context.input(2, "key_codes", 'u'), values = context.input(3, "values", 'T');
  const Tensor summary = context.input(4, "summary", 'f');
  const Tensor padding = context.input(5, "left_padding", 'i'), length = context.input(6, "length", 'i');
  Attention a = attention_of(attributes, context);
  set_sizes(a, query, keys);
  SparQ s = sparq_of(attributes, a.D);
  const int64_t groups = CodedKeys::groups_of(a.C);
  query.expect({a.B, a.Hq, 1, a.D});
  codes.expect({a.B, a.Hkv * a.D, groups, kRecord});
  values.expect({a.B, a.Hkv, a.C, a.D});
  summary.expect({a.B, 3 * a.Hkv, a.D});
  padding.expect({a.B});
  length.expect({a.B});
  check_padding(padding);
  check_range(length, 0, a.C, "the capacity");
  a.query = query.data, a.keys = keys.data, a.values = values.data, a.first = padding.ints(), a.length = length.ints();
  s.codes = CodePlanes::of_records(codes.bytes(), groups), s.summary = summary.floats();
  const int64_t longest = longest_of(a);
  s.slots = std::min(s.top_k, std::max<int64_t>(1, longest));
  clamp_selection(s, longest);
  a.output = context.output(0, {a.B, a.Hq, 1, a.D});
  s.indices = static_cast<int32_t*>(context.output(1, {a.B, a.Hkv, s.slots}));
  attend_sparsely(a, s, SessionPool(context));
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
  attend_densely(a, SessionPool(context));
}

void compute_append(const Attributes&, const Context& context) {
  const Caches caches(context, 0, 2, 3, 4);
  Append append = caches.append(context);
  const int64_t B = caches.key.shape[0];
  caches.make(context, append, 0, 1);
  append_all(append, B, SessionPool(context));
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
  const SessionPool pool(context);
  Sample sample(a, sample_of(attributes));
  if (!sample.everything()) sample.select_blocks(pool);
  const int64_t width = sample.longest_list();
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  sample.write_lists(static_cast<int32_t*>(context.output(1, {a.B, a.Hq, sample.row_blocks(), width})), width);
  if (sample.everything()) return attend_densely(a, pool);
  sample.attend(pool);
}

void compute_cached(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(6, "left_padding", 'i');
  const Caches caches(context, 1, 3, 4, 5);
  Append append = caches.append(context);
  Lengths lengths(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, lengths.all);
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  caches.make(context, append, 1, 2);
  a.keys = append.present_key, a.values = append.present_value;
  attend_prompt(attributes, a, SessionPool(context));
}

// Reads the further caches of SparQ, and allocates their outputs. While the longest row has fewer than `dense_below`
// keys, no step reads these caches, so they are not updated. The call that reaches this length computes them.
void add_sparq_caches(const Attributes& attributes, const Context& context, Append& append, const Attention& a) {
  const int64_t B = a.B, below = attributes["dense_below"];
  const int64_t Hkv = append.Hkv, C = append.C, D = append.D, lanes = attributes["lanes"];
  const Tensor past_key_t = context.input(4, "past_key_t", 'T');
  const Tensor past_sums = context.input(6, "past_sums", 'f');
  past_key_t.expect({B, Hkv, C, D});
  past_sums.expect({B, Hkv, 3, D});
  if (C % lanes) fail("lanes", "a divisor of the capacity C=" + to_string(C), to_string(lanes));
  append.present_key = context.output(1, {B, Hkv, C, D});
  void* present_key_t = context.output(2, {B, Hkv, C, D});
  append.present_value = context.output(3, {B, Hkv, C, D});
  append.present_sums = static_cast<float*>(context.output(4, {B, Hkv, 3, D}));
  append.past_key_t = past_key_t.data, append.past_sums = past_sums.floats();
  append.lanes = lanes, append.first = a.first;
  if (longest_of(a) >= below) append.present_key_t = present_key_t;
  append.all = longest_of(a) - a.L < below && below > 0;
}

void compute_sparq_attention(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(8, "left_padding", 'i');
  const Caches caches(context, 1, 3, 5, 7);
  Append append = caches.append(context);
  Lengths lengths(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, lengths.all);
  SparQ s = sparq_of(attributes, a.D);
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  add_sparq_caches(attributes, context, append, a);
  a.keys = append.present_key, a.values = append.present_value;
  const SessionPool pool(context);
  if (!chooses(attributes, a)) return attend_prompt(attributes, a, pool);
  s.keys_t = append.present_key_t, s.lanes = attributes["lanes"], s.plane = a.C * a.D;
  s.sums = append.present_sums;
  clamp_selection(s, longest_of(a));
  attend_sparsely(a, s, pool);
}

void compute_sparq_coded_attention(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(8, "left_padding", 'i');
  const Tensor past_codes = context.input(4, "past_key_codes", 'u'), past_summary = context.input(6, "past_summary", 'f');
  const Caches caches(context, 1, 3, 5, 7);
  Append append = caches.append(context);
  Lengths lengths(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, lengths.all);
  SparQ s = sparq_of(attributes, a.D);
  CodedKeys coded(append, a.first, s.by_key);
  past_codes.expect({a.B, a.Hkv * a.D, coded.groups(), kRecord});
  past_summary.expect({a.B, 3 * a.Hkv, a.D});
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  caches.make(context, append, 1, 3);
  a.keys = append.present_key, a.values = append.present_value;
  coded.past = past_codes.bytes(), coded.past_summary = past_summary.floats();
  coded.present = static_cast<uint8_t*>(context.output(2, {a.B, a.Hkv * a.D, coded.groups(), kRecord}));
  coded.summary = static_cast<float*>(context.output(4, {a.B, 3 * a.Hkv, a.D}));
  append.callback = &coded;
  const SessionPool pool(context);
  if (!chooses(attributes, a)) return attend_prompt(attributes, a, pool);
  s.codes = CodePlanes::of_records(coded.present, coded.groups()), s.summary = coded.summary;
  clamp_selection(s, longest_of(a));
  attend_sparsely(a, s, pool);
}

}  // namespace

const std::string kSparQOnly = "rank top_k local_window reallocate component_score scale";
const std::string kSparQCaches = kSparQOnly + " lanes dense_below";
const std::string kCodedCaches = kSparQOnly + " dense_below";
static const Registered registered({
    {"SparQCoded", "TTuTfii", "Tn", {0, -1}, kSparQOnly, compute_sparq_coded},
    {"SparQCodedAttention", "TTTTuTfii", "TTuTf", {0, 3, 4, 5, 6}, kCodedCaches, compute_sparq_coded_attention},
    {"SampleSparQCodedAttention",
     "TTTTuTfii",
     "TTuTf",
     {0, 3, 4, 5, 6},
     kCodedCaches + kSampled,
     compute_sparq_coded_attention},
    {"SparQ", "TTTTiiff", "Tn", {0, -1}, kSparQOnly, compute_sparq},
    {"DenseAttention", "TTTii", "T", {0}, "scale window", compute_dense},
    {"Sample", "TTTi", "Tn", {0, -1}, "alpha_column alpha_slash chunks block_size scale", compute_sample},
    {"Append", "TTTTi", "TT", {2, 3}, "", compute_append},
    {"CachedAttention", "TTTTTii", "TTT", {0, 3, 4}, "scale window", compute_cached},
    {"SampleAttention", "TTTTTii", "TTT", {0, 3, 4}, std::string("scale") + kSampled, compute_cached},
    {"SparQAttention", "TTTTTTfii", "TTTTf", {0, 3, 4, 5, 6}, kSparQCaches, compute_sparq_attention},
    {"SampleSparQAttention", "TTTTTTfii", "TTTTf", {0, 3, 4, 5, 6}, kSparQCaches + kSampled, compute_sparq_attention},
});

}  // namespace sparse
