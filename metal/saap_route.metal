// saap_route: select the buckets that the query heads of a KV head visit (saap.5), (saap.8). Computes both layers of
// the network, sums the softmax over the group and lists the best buckets in ascending order. Ties go to the lower
// bucket.
//
// A threadgroup processes one KV head of one sequence and reads each weight once. `units` holds intermediate results
// for each query: first the hidden units, then the logits of the buckets.
//
// inputs       queries (B, Hq, 1, D) T; hidden_weight (Hkv, D, H) W; hidden_bias (Hkv, H) W;
//              out_weight (Hkv, I, C) W, I = H or D; out_bias (Hkv, C) W; probes () int
// outputs      units (B, Hkv, HIDDEN * H + C, G) float; bits (B, Hkv, probes) uint; visited (B, Hkv, probes) int
// template     D, G, WIDTH, HIDDEN
// grid         threads, Hkv, B
// threadgroup  threads, 1, 1
// reads        B * Hkv * (G * D * T + HIDDEN * (D + 1) * H * W + ((H if HIDDEN else D) + 1) * C * W
//              + (HIDDEN * H + C) * G * 4)
// writes       B * Hkv * ((HIDDEN * H + C) * G * 4 + probes * 8)
threadgroup float staged[INPUT_TILE * G];
threadgroup float2 softmax[G];
threadgroup uint3 partial[TOP_K_PARTIAL];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint C = uint(out_weight_shape[2]), below = uint(out_weight_shape[1]);

const auto queries_at = queries + row * G * D;
const QueryUnits<G, decltype(queries_at)> components = {queries_at, D};
const auto out_weight_at = out_weight + at.y * size_t(below) * C;
const auto out_bias_at = out_bias + size_t(at.y) * C;
device float* hidden = units + row * ((HIDDEN ? below : 0) + C) * G;
device float* logits = hidden + (HIDDEN ? below : 0) * G;
if (HIDDEN) {
  layer<G, WIDTH>(
      components, hidden_weight + at.y * size_t(D) * below, hidden_bias + size_t(at.y) * below, below, Relu{}, hidden, staged,
      place);
  layer<G, WIDTH>(HiddenUnits<G>{hidden, below}, out_weight_at, out_bias_at, C, Linear{}, logits, staged, place);
} else {
  layer<G, WIDTH>(components, out_weight_at, out_bias_at, C, Linear{}, logits, staged, place);
}
threadgroup_barrier(mem_flags::mem_device);
softmax_statistics<G>(logits, C, softmax, place);

const Window all = {0, C, C};
const Tile tile = make_tile(at, threadgroups_per_grid, C, uint(probes), place);
const GroupBias<false, G, const device float*> no_bias = {logits, 0, 0};
const GroupScores<G, G, const device float*, GroupBias<false, G, const device float*>> scores = {
    logits, C, softmax, no_bias, all, 0};
select_best(scores, tile, bits, visited, partial, place);
