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

// Returns the attention of the input 0, query, to buffers of the caller: the inputs 1, keys, and `values_at`, values. The
// inputs left_padding and length are at `padding_at` and after it.
Attention attention_over_buffers(const Attributes& attributes, const Context& context, int values_at, int padding_at) {
  const Tensor query = context.input(0, "query", 'T'), keys = context.input(1, "keys", 'T');
  const Tensor values = context.input(values_at, "values", 'T');
  const Tensor padding = context.input(padding_at, "left_padding", 'i');
  const Tensor length = context.input(padding_at + 1, "length", 'i');
  Attention a = attention_of(attributes, context);
  set_sizes(a, query, keys);
  values.expect({a.B, a.Hkv, a.C, a.D});
  padding.expect({a.B});
  length.expect({a.B});
  check_padding(padding);
  check_range(length, 0, a.C, "the capacity");
  a.query = query.data, a.keys = keys.data, a.values = values.data, a.first = padding.ints(), a.length = length.ints();
  return a;
}

// Runs a decode step of SparQ, whose scoring keys have space for `scored` keys per row, and returns the selected keys.
void attend_step(const Context& context, Attention& a, SparQ& s, int64_t scored) {
  context.input(0, "query", 'T').expect({a.B, a.Hq, 1, a.D});
  s.slots = std::min(s.top_k, scored);
  clamp_selection(s, longest_of(a));
  a.output = context.output(0, {a.B, a.Hq, 1, a.D});
  s.indices = static_cast<int32_t*>(context.output(1, {a.B, a.Hkv, s.slots}));
  attend_sparsely(a, s, SessionPool(context));
}

void compute_sparq(const Attributes& attributes, const Context& context) {
  const Tensor keys_t = context.input(2, "keys_t", 'T'), length = context.input(5, "length", 'i');
  const Tensor mean = context.input(6, "value_mean", 'f'), deviation = context.input(7, "deviation", 'f');
  Attention a = attention_over_buffers(attributes, context, 3, 4);
  keys_t.expect({a.B, a.Hkv, -1, a.D, -1});
  mean.expect({a.B, a.Hkv, a.D});
  deviation.expect({a.B, a.Hkv, a.D});
  const int64_t lanes = keys_t.shape[4], chunks = keys_t.shape[2];
  if (lanes > kMost || chunks > kMost) fail("keys_t", "axes below 2**31", to_string(std::max(lanes, chunks)));
  check_range(length, 0, std::min(a.C, chunks * lanes), "the keys that fit in keys and keys_t");
  SparQ s = sparq_of(attributes, a.D);
  s.keys_t = keys_t.data, s.lanes = lanes, s.plane = chunks * a.D * lanes;
  s.value_mean = mean.floats(), s.deviation = deviation.floats();
  attend_step(context, a, s, std::max<int64_t>(1, (longest_of(a) + lanes - 1) / lanes) * lanes);
}

void compute_sparq_coded(const Attributes& attributes, const Context& context) {
  const Tensor codes = context.input(2, "key_codes", 'u'), summary = context.input(4, "summary", 'f');
  Attention a = attention_over_buffers(attributes, context, 3, 5);
  SparQ s = sparq_of(attributes, a.D);
  const int64_t groups = CodedKeys::groups_of(a.C);
  codes.expect({a.B, a.Hkv * a.D, groups, kRecord});
  summary.expect({a.B, 3 * a.Hkv, a.D});
  s.codes = CodePlanes::of_records(codes.bytes(), groups), s.summary = summary.floats();
  attend_step(context, a, s, std::max<int64_t>(1, longest_of(a)));
}

void compute_dense(const Attributes& attributes, const Context& context) {
  Attention a = attention_over_buffers(attributes, context, 2, 3);
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
  CachedCall call(attributes, context, 3, 4, 5);
  call.make(context, 1, 2);
  attend_prompt(attributes, call.a, SessionPool(context));
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
  void* present_key_t = context.output(2, {B, Hkv, C, D});
  append.present_sums = static_cast<float*>(context.output(4, {B, Hkv, 3, D}));
  append.past_key_t = past_key_t.data, append.past_sums = past_sums.floats();
  append.lanes = lanes, append.first = a.first;
  if (longest_of(a) >= below) append.present_key_t = present_key_t;
  append.all = longest_of(a) - a.L < below && below > 0;
}

// Attends with the new tokens, sparsely in a decode step over enough keys.
void attend_cached(const Attributes& attributes, const Context& context, Attention& a, SparQ& s) {
  const SessionPool pool(context);
  if (!chooses(attributes, a)) return attend_prompt(attributes, a, pool);
  clamp_selection(s, longest_of(a));
  attend_sparsely(a, s, pool);
}

void compute_sparq_attention(const Attributes& attributes, const Context& context) {
  CachedCall call(attributes, context, 3, 5, 7);
  Append& append = call.append;
  SparQ s = sparq_of(attributes, call.a.D);
  call.make(context, 1, 3);
  add_sparq_caches(attributes, context, append, call.a);
  s.keys_t = append.present_key_t, s.lanes = attributes["lanes"], s.plane = append.C * append.D;
  s.sums = append.present_sums;
  attend_cached(attributes, context, call.a, s);
}

void compute_sparq_coded_attention(const Attributes& attributes, const Context& context) {
  const Tensor past_codes = context.input(4, "past_key_codes", 'u'), past_summary = context.input(6, "past_summary", 'f');
  CachedCall call(attributes, context, 3, 5, 7);
  Attention& a = call.a;
  SparQ s = sparq_of(attributes, a.D);
  CodedKeys coded(call.append, a.first, s.by_key);
  past_codes.expect({a.B, a.Hkv * a.D, coded.groups(), kRecord});
  past_summary.expect({a.B, 3 * a.Hkv, a.D});
  call.make(context, 1, 3);
  coded.past = past_codes.bytes(), coded.past_summary = past_summary.floats();
  coded.present = static_cast<uint8_t*>(context.output(2, {a.B, a.Hkv * a.D, coded.groups(), kRecord}));
  coded.summary = static_cast<float*>(context.output(4, {a.B, 3 * a.Hkv, a.D}));
  call.append.callback = &coded;
  s.codes = CodePlanes::of_records(coded.present, coded.groups()), s.summary = coded.summary;
  attend_cached(attributes, context, a, s);
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
