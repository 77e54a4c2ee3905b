// saap_many_layer: a layer of SAAP's router (saap.5) for more query rows than a thread has sums of, and for the softmax that
// comes last the statistics of each tile of units. Weights are to units what component-major keys are to logits.
//
// inputs       below (B, Hkv, I, ROWS) float; weight (Hkv, I, C) W; bias (Hkv, C) W
// outputs      units (B, Hkv, C, G) float; statistics (B, Hkv, tiles, G, 2) float
// template     G, ROWS, RELU
// grid         tiles * ROWS * 4, Hkv, B
// threadgroup  ROWS * 4, 1, 1
// reads        B * Hkv * ((I + 1) * C * W + I * ROWS * 4)
// writes       B * Hkv * (C * G * 4 + tiles * G * 8)
threadgroup float4 staged_weights[MANY_PART * LANES];
threadgroup float4 staged_rows[MANY_PART * ROWS / 4];
const ManyShared shared = {staged_weights, staged_rows, nullptr};
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const uint3 at = threadgroup_position_in_grid;
const size_t row = at.z * threadgroups_per_grid.y + at.y;
const uint C = uint(weight_shape[2]), I = uint(weight_shape[1]);
const uint first = at.x * MANY_TILE, stop = min(first + MANY_TILE, C);

const auto columns = unit_weights(weight + at.y * size_t(I) * C, C, stop);
const auto biased = with_bias<RELU>(bias + size_t(at.y) * C, stop);
device float* statistics_at = statistics + (row * threadgroups_per_grid.x + at.x) * G * 2;
many_pass<G, LOGITS | STATISTICS>(
    columns, {first, stop, first, 0}, I, below + row * I * ROWS, biased, nullptr, units + row * C * G, statistics_at, shared,
    place);
