// sample_sums: attention mass of the sampled rows of a region on key blocks (sample.4) and offset bins (sample.5). A
// threadgroup sums 32 key blocks of one sample.
//
// inputs       partials (B, heads, G, C, Nk, ROWS, 2) float; totals (B, heads, G, C, splits, ROWS) float;
//              samples (max(C, 4), 2) int; regions, offset () int, the position of query 0
// outputs      column, slash (B, heads, G, C, Nk) float
// template     ROWS, BLOCK
// grid         ceil(Nk / 32) * 256, B * heads * G * C, 1
// threadgroup  256, 1, 1
// reads        B * heads * G * C * (Nk * ROWS * 8 + splits * ROWS * 4)
// writes       B * heads * G * C * Nk * 8
constexpr uint SUMMED_BLOCKS = 32;  // key blocks per threadgroup
threadgroup float sums[ROWS];
const Place place = {thread_index_in_simdgroup, simdgroup_index_in_threadgroup, simdgroups_per_threadgroup};
const size_t sample = threadgroup_position_in_grid.y;
const uint blocks = uint(partials_shape[4]), splits = uint(totals_shape[4]);
const uint first = threadgroup_position_in_grid.x * SUMMED_BLOCKS;
const uint position = uint(offset) + uint(samples[sample % uint(regions) * 2]);

merge_totals(totals + sample * splits * ROWS, splits, ROWS, sums, place);
threadgroup_barrier(mem_flags::mem_threadgroup);
auto pairs = reinterpret_cast<const device float2*>(partials) + sample * blocks * ROWS;
const uint stop = min(first + SUMMED_BLOCKS, blocks);
for (uint block = first + place.simdgroup; block < stop; block += place.simdgroups) {  // uniform in a SIMD group
  float of_block = 0.0f, of_bin = 0.0f;
  for (uint row = place.lane; row < ROWS; row += LANES) {
    const float2 pair = pairs[size_t(block) * ROWS + row];
    of_block += exp2(pair.x - sums[row]) + exp2(pair.y - sums[row]);
    // Keys of the bin: the near keys of the block at this distance, and the far keys of the block before it.
    const int near = int((position + row) / BLOCK) - int(block), far = near - 1;
    if (near >= 0 && uint(near) < blocks) {
      of_bin += exp2(pairs[size_t(near) * ROWS + row].x - sums[row]);
    }
    if (far >= 0 && uint(far) < blocks) {
      of_bin += exp2(pairs[size_t(far) * ROWS + row].y - sums[row]);
    }
  }
  of_block = simd_sum(of_block);
  of_bin = simd_sum(of_bin);
  if (place.lane == 0) {
    column[sample * blocks + block] = of_block;
    slash[sample * blocks + block] = of_bin;
  }
}
