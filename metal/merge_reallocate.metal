// merge_reallocate: merge_parts, then mix in the mean value, weighted by the mass of the skipped keys (sparq.10).
//
// inputs       part_out (B, Hkv, splits, G, D) float; part_lse, part_alpha (B, Hkv, splits, G) float;
//              value_mean (B, Hkv, D) float
// outputs      out (B, Hq, 1, D) O; lse, alpha (B, Hq, 1) float
// template     O, D, G
// grid         D, Hq, B
// threadgroup  D, 1, 1
// reads        B * Hkv * (splits * G * (D * 4 + 8) + D * 4)
// writes       B * Hkv * G * (D * O + 8)
const uint d = thread_position_in_threadgroup.x;
const uint g = threadgroup_position_in_grid.y % G;
const size_t row = threadgroup_position_in_grid.z * size_t(part_out_shape[1]) + threadgroup_position_in_grid.y / G;
const uint splits = uint(part_out_shape[2]);
const size_t head = row * splits * G + g;
const float total = merged_lse(part_lse + head, splits, G);
const float y = merged_component(part_out + head * D + d, part_lse + head, total, splits, G * D, G);
float mass = 0.0f;
for (uint s = 0; s < splits; ++s) {
  mass += part_alpha[head + s * G];
}
const float mixed = mass * y + (1.0f - mass) * value_mean[row * D + d];
out[(row * G + g) * D + d] = static_cast<O>(total == -INFINITY ? 0.0f : mixed);
if (d == 0) {
  lse[row * G + g] = total;
  alpha[row * G + g] = mass;
}
