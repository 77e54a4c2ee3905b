// The operators of SAAP.

#include "caches.h"
#include "saap.h"

namespace sparse {

namespace {

constexpr int64_t kMostBuckets = std::numeric_limits<int16_t>::max();

// Checks the shapes of one layer of the query networks, which maps (.., n) to (.., width).
void check_layer(const Tensor& weight, const Tensor& bias, int64_t Hkv, int64_t n, int64_t width) {
  weight.expect({Hkv, n, width});
  bias.expect({Hkv, width});
}

void compute_saap_attention(const Attributes& attributes, const Context& context) {
  const Tensor query_before = context.input(3, "query_before", 'T'), key_before = context.input(4, "key_before", 'T');
  const Tensor past_ids = context.input(7, "past_bucket_ids", 's'), centroids = context.input(10, "centroids", 'W');
  const Tensor hidden_weight = context.input(11, "hidden_weight", 'W'),
               hidden_bias = context.input(12, "hidden_bias", 'W');
  const Tensor out_weight = context.input(13, "out_weight", 'W'), out_bias = context.input(14, "out_bias", 'W');
  CachedCall call(attributes, context, 5, 6, 8);
  Attention& a = call.a;
  query_before.expect({a.B, a.Hq, a.L, a.D});
  key_before.expect({a.B, a.Hkv, a.L, a.D});
  past_ids.expect({a.B, a.Hkv, a.C});
  centroids.expect({a.Hkv, -1, a.D});
  const int64_t N = centroids.shape[1], H = hidden_weight.axes == 3 ? hidden_weight.shape[2] : 1;
  if (N > kMostBuckets) fail("centroids", "at most " + to_string(kMostBuckets) + " buckets", to_string(N));
  Saap s{};
  s.probes = attributes["probes"], s.sink_tokens = attributes["sink_tokens"];
  s.recent_tokens = attributes["recent_tokens"];
  if (s.probes > N) fail("probes", "at most the " + to_string(N) + " buckets", to_string(s.probes));
  check_layer(hidden_weight, hidden_bias, a.Hkv, a.D, H);
  check_layer(out_weight, out_bias, a.Hkv, H ? H : a.D, N);

  call.make(context, 1, 2);
  int16_t* ids = static_cast<int16_t*>(context.output(3, {a.B, a.Hkv, a.C}));
  Assign assign{};
  assign.kernels = a.kernels, assign.type = a.type, assign.weights = context.weights();
  assign.Hkv = a.Hkv, assign.L = a.L, assign.C = a.C, assign.D = a.D, assign.buckets = N;
  assign.key = key_before.data, assign.centroids = centroids.data, assign.past_length = call.append.past_length;
  assign.past_ids = past_ids.shorts(), assign.present_ids = ids;
  call.append.callback = &assign;
  const SessionPool pool(context);
  if (!chooses(attributes, a)) return attend_prompt(attributes, a, pool);
  s.buckets = N, s.hidden = H, s.weights = context.weights();
  s.query_before = query_before.data, s.ids = ids;
  s.hidden_weight = hidden_weight.data, s.hidden_bias = hidden_bias.data;
  s.out_weight = out_weight.data, s.out_bias = out_bias.data;
  attend_buckets(a, s, pool);
}

}  // namespace

const std::string kSaap = "probes sink_tokens recent_tokens scale dense_below";
static const Registered registered({
    {"SaapAttention", "TTTTTTTsiiWWWWW", "TTTs", {0, 5, 6, 7}, kSaap, compute_saap_attention},
    {"SampleSaapAttention", "TTTTTTTsiiWWWWW", "TTTs", {0, 5, 6, 7}, kSaap + kSampled, compute_saap_attention},
});

}  // namespace sparse
