// Rows of caches, packed or not: docs/spec/quantised.md. Every operation is rounded to float32: what is packed is what
// any other implementation packs, to the last bit.

#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "dispatch.h"

namespace sparse {

namespace {

constexpr float kLeastScale = 1e-7f;
constexpr int64_t kLanes = 16;  // divides a group

// (quantised.3) to (quantised.5) of one group, whose codes go to x.
void code_group(float* x, int64_t group, int64_t bits, float* scale, float* bias) {
  const float infinity = std::numeric_limits<float>::infinity(), largest = float((1 << bits) - 1);
  float lows[kLanes], highs[kLanes], odds[kLanes] = {};
  std::fill(lows, lows + kLanes, infinity), std::fill(highs, highs + kLanes, -infinity);
  for (int64_t i = 0; i < group; i += kLanes) {
    for (int64_t l = 0; l < kLanes; l++) {
      const float number = x[i + l];
      lows[l] = number < lows[l] ? number : lows[l];
      highs[l] = number > highs[l] ? number : highs[l];
      odds[l] += number - number;  // NaN unless all are finite
    }
  }
  float low = infinity, high = -infinity, odd = 0;
  for (int64_t l = 0; l < kLanes; l++) low = std::min(low, lows[l]), high = std::max(high, highs[l]), odd += odds[l];
  if (odd != 0) {
    *scale = *bias = std::numeric_limits<float>::quiet_NaN();
    std::fill(x, x + group, 0.0f);
    return;
  }
  const bool from_low = std::fabs(low) > std::fabs(high);
  const float width = std::max((high - low) / largest, kLeastScale), edge = from_low ? low : high;
  float s = from_low ? width : -width, b = 0;
  const float steps = std::nearbyint(edge / s);
  if (steps != 0) s = edge / steps, b = edge;
  for (int64_t i = 0; i < group; i++) {
    constexpr float kShift = 12582912;  // 1.5 * 2^23: adding it rounds half to even
    const float code = (x[i] - b) / s;
    x[i] = ((code > largest ? largest : code > 0 ? code : 0) + kShift) - kShift;
  }
  *scale = s, *bias = b;
}

// Numbers (D), which are lost, into a row; `ranges` is room for two of each group.
void pack_row(const TypeKernels& kernels, const RowFormat& rows, float* x, float* ranges, uint8_t* row) {
  const int64_t groups = rows.D / rows.group;
  for (int64_t g = 0; g < groups; g++) {
    code_group(x + g * rows.group, rows.group, rows.bits, ranges + 2 * g, ranges + 2 * g + 1);
  }
  if (rows.bits == 8) {
    for (int64_t i = 0; i < rows.D; i++) row[i] = uint8_t(int(x[i]));
  } else {
    for (int64_t i = 0; i < rows.D; i += 2) row[i / 2] = uint8_t(int(x[i]) | int(x[i + 1]) << 4);
  }
  kernels.narrow(row + rows.D * rows.bits / 8, ranges, 2 * groups);
}

}  // namespace

PackedRows packed_rows(const RowFormat& rows, const void* plane, const int32_t* index, int64_t first, int64_t count) {
  return {static_cast<const uint8_t*>(plane), index, first, rows.bytes(), int(count), int(rows.D), int(rows.bits),
          int(rows.group)};
}

void read_rows(float* out, const RowFormat& rows, const void* plane, int64_t first, int64_t count) {
  const TypeKernels& kernels = sparse::kernels().type[rows.type];
  if (rows.bits) return kernels.unpack(out, packed_rows(rows, plane, nullptr, first, count));
  kernels.widen(out, static_cast<const char*>(plane) + first * rows.bytes(), count * rows.D);
}

void write_rows(void* plane, const RowFormat& rows, int64_t first, const void* in, Type type, int64_t count) {
  char* to = static_cast<char*>(plane) + first * rows.bytes();
  if (!rows.bits) return void(std::memcpy(to, in, count * rows.bytes()));
  const int64_t D = rows.D, item = size_of(type);
  Scratch scratch(Scratch::kTask, Scratch::size<float>(D) + Scratch::size<float>(2 * D / rows.group));
  float *x = scratch.take<float>(D), *ranges = scratch.take<float>(2 * D / rows.group);
  const Kernels& all = kernels();
  for (int64_t i = 0; i < count; i++, to += rows.bytes()) {
    all.type[type].widen(x, static_cast<const char*>(in) + i * D * item, D);
    pack_row(all.type[rows.type], rows, x, ranges, reinterpret_cast<uint8_t*>(to));
  }
}

void Attention::attend(const Rows& queries, const Keys& block, float* scores) const {
  if (!rows.bits) return typed().attend(queries, block, scores);
  Scratch scratch(Scratch::kPart, 2 * Scratch::size<float>(block.count * D));
  float *k = scratch.take<float>(block.count * D), *v = scratch.take<float>(block.count * D);
  const TypeKernels& packed = kernels->type[rows.type];
  packed.unpack(k, packed_rows(rows, block.keys, block.index, block.first, block.count));
  packed.unpack(v, packed_rows(rows, block.values, block.index, block.first, block.count));
  const Keys unpacked{k, v, nullptr, 0, block.count, 0, block.low, block.high};
  kernels->type[kTypeFloat].attend(queries, unpacked, scores);
}

void ValueSums::head(int64_t b, int64_t h) const {
  const int64_t D = append.D, at = (b * append.Hkv + h) * D, begin = append.past_length[b];
  const char* values = append.plane(append.present_value, b, h);
  Scratch scratch(Scratch::kTask, Scratch::size<float>(D) + Scratch::size<double>(D));
  float* row = scratch.take<float>(D);
  double* total = scratch.take<double>(D);
  std::copy(past + at, past + at + D, total);
  if (prefix) std::copy(total, total + D, prefix + at);
  for (int64_t j = std::max(begin, first[b]); j < begin + append.L; j++) {
    read_rows(row, append.rows, values, j, 1);
    for (int64_t d = 0; d < D; d++) total[d] += row[d];
    if (prefix && j == begin) std::copy(total, total + D, prefix + at);
  }
  for (int64_t d = 0; d < D; d++) present[at + d] = float(total[d]);
}

}  // namespace sparse
