// merge_parts: exact merge of the attention results of the parts of a list or context. A threadgroup processes one
// query head, a thread one component.
//
// inputs       part_out (B, Hkv, splits, G, D) float; part_lse (B, Hkv, splits, G) float
// outputs      out (B, Hq, 1, D) O; lse (B, Hq, 1) float
// template     O, D, G
// grid         D, Hq, B
// threadgroup  D, 1, 1
// reads        B * Hkv * splits * G * (D * 4 + 4)
// writes       B * Hkv * G * (D * O + 4)
const uint d = thread_position_in_threadgroup.x;
const uint g = threadgroup_position_in_grid.y % G;
const size_t row = threadgroup_position_in_grid.z * size_t(part_out_shape[1]) + threadgroup_position_in_grid.y / G;
const uint splits = uint(part_out_shape[2]);
const size_t head = row * splits * G + g;
const float total = merged_lse(part_lse + head, splits, G);
const float y = merged_component(part_out + head * D + d, part_lse + head, total, splits, G * D, G);
out[(row * G + g) * D + d] = static_cast<O>(y);
if (d == 0) {
  lse[row * G + g] = total;
}
