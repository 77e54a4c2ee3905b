// Int4 scoring keys, docs/spec/sparq.md, (sparq.17) to (sparq.20) and (sparq.22). Every operation is rounded to
// float32, so the codes equal the codes of every other implementation bit for bit.

#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "kernels.h"

namespace sparse {

namespace {

constexpr float kLargestHalf = 65504, kLargestCode = 15;

// Work memory for the quantization of a group. All arrays except `rows` have D elements.
struct Work {
  float* rows;  // (kGroup, D)
  float *low, *high, *odd, *lo, *step;
  uint16_t *lo_bits, *step_bits;

  static size_t size(int64_t D) {
    return Scratch::size<float>(kGroup * D) + 5 * Scratch::size<float>(D) + 2 * Scratch::size<uint16_t>(D);
  }
  Work(Scratch& scratch, int64_t D) {
    rows = scratch.take<float>(kGroup * D);
    for (float** each : {&low, &high, &odd, &lo, &step}) *each = scratch.take<float>(D);
    lo_bits = scratch.take<uint16_t>(D), step_bits = scratch.take<uint16_t>(D);
  }
};

// Rounds half to even, for 0 to 2^22.
float rounded(float x) {
  constexpr float kShift = 12582912;  // 1.5 * 2^23
  return (x + kShift) - kShift;
}

// Quantizes the rows of a group to D records, `stride` bytes apart. With `leads` it also computes the center.
void code_group(const Kernels& kernels, const Work& w, int64_t D, bool leads, float* center, uint8_t* to,
                int64_t stride) {
  const float largest = kLargestCode, infinity = std::numeric_limits<float>::infinity();
  std::fill(w.low, w.low + D, infinity);
  std::fill(w.high, w.high + D, -infinity);
  std::fill(w.odd, w.odd + D, 0.0f);
  for (int64_t j = 0; j < kGroup; j++) {
    const float* row = w.rows + j * D;
    for (int64_t d = 0; d < D; d++) {
      w.low[d] = row[d] < w.low[d] ? row[d] : w.low[d];
      w.high[d] = row[d] > w.high[d] ? row[d] : w.high[d];
      w.odd[d] += row[d] - row[d];  // NaN unless all numbers are finite
    }
  }
  for (int64_t d = 0; d < D; d++) {
    if (leads) {
      const float middle = w.low[d] * 0.5f + w.high[d] * 0.5f;
      center[d] = w.odd[d] == 0 && std::isfinite(middle) ? middle : 0;
    }
    const float low = w.low[d] - center[d], high = w.high[d] - center[d];
    if (w.odd[d] != 0 || !std::isfinite(low) || !std::isfinite(high)) {
      w.lo[d] = w.step[d] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    w.lo[d] = std::min(std::max(low, -kLargestHalf), kLargestHalf);
    w.step[d] = std::min((high - low) / largest, kLargestHalf);
  }
  const TypeKernels& half = kernels.type[kTypeHalf];
  half.narrow(w.lo_bits, w.lo, D), half.narrow(w.step_bits, w.step, D);
  half.widen(w.lo, w.lo_bits, D), half.widen(w.step, w.step_bits, D);
  for (int64_t j = 0; j < kGroup; j++) {
    float* row = w.rows + j * D;
    for (int64_t d = 0; d < D; d++) {
      const float code = (row[d] - center[d] - w.lo[d]) / w.step[d];
      row[d] = w.step[d] > 0 ? rounded(code > largest ? largest : code > 0 ? code : 0) : 0;
    }
  }
  for (int64_t d = 0; d < D; d++) {
    uint8_t* record = to + d * stride;
    std::memcpy(record, w.lo_bits + d, 2), std::memcpy(record + 2, w.step_bits + d, 2);
    record += kHeader;
    const float* code = w.rows + d;
    for (int64_t j = 0; j < kGroup; j += 2) {
      record[j / 2] = uint8_t(int(code[j * D]) | int(code[(j + 1) * D]) << 4);
    }
  }
}

// (sparq.22) of `count` groups, starting at the first record of a component.
float spread_of(const Kernels& kernels, const uint8_t* records, int64_t count, uint16_t* range_bits, float* range) {
  for (int64_t n = 0; n < count; n++) std::memcpy(range_bits + 2 * n, records + n * kRecord, kHeader);
  kernels.type[kTypeHalf].widen(range, range_bits, 2 * count);
  double total = 0, apart = 0, wide = 0;
  for (int64_t n = 0; n < count; n++) {
    const float width = range[2 * n + 1] * kLargestCode;
    range[2 * n] += width / 2, range[2 * n + 1] = width;
    total += range[2 * n];
  }
  const double mean = total / double(count);
  for (int64_t n = 0; n < count; n++) {
    apart += (range[2 * n] - mean) * (range[2 * n] - mean), wide += double(range[2 * n + 1]) * range[2 * n + 1];
  }
  return float(std::sqrt((apart + wide / 16) / double(count)));
}

}  // namespace

void CodedKeys::head(int64_t b, int64_t h) const {
  const Kernels& all = sparse::kernels();
  const int64_t D = append.D, head = b * append.Hkv + h;
  const int64_t begin = append.past_length[b], end = begin + append.L, low = std::min(first[b], end);
  if (past != present) std::copy_n(past + head * plane(), plane(), present + head * plane());
  const float* before = past_summary + 3 * head * D;
  float* values = summary + 3 * head * D;
  const int64_t old = std::max<int64_t>(0, begin - low) / kGroup, now = (end - low) / kGroup;
  uint8_t* codes = present + head * plane();
  float *center = values + D, *spread = center + D;
  const char *keys = append.plane(append.present_key, b, h), *rows = append.plane(append.present_value, b, h);
  Scratch scratch(Scratch::kTask, Work::size(D) + Scratch::size<double>(2 * D) + Scratch::size<float>(2 * now) +
                                      Scratch::size<uint16_t>(2 * now));
  const Work work(scratch, D);
  double *total = scratch.take<double>(2 * D), *squares = total + D;

  std::copy(before, before + D, total);
  for (int64_t j = std::max(low, begin); j < end; j++) {
    append.read(work.low, rows, j, 1);
    for (int64_t d = 0; d < D; d++) total[d] += work.low[d];
  }
  for (int64_t d = 0; d < D; d++) values[d] = float(total[d]);

  if (old > 0) {
    if (before != values) std::copy(before + D, before + 2 * D, center);
  } else {
    std::fill(center, center + D, 0.0f);
  }
  for (int64_t n = old; n < now; n++) {
    append.read(work.rows, keys, low + n * kGroup, kGroup);
    code_group(all, work, D, n == 0, center, codes + n * kRecord, groups() * kRecord);
  }

  if (!spreads) {
    std::fill(spread, spread + D, 0.0f);
    return;
  }
  if (now > 0) {
    if (now == old) {
      if (before != values) std::copy(before + 2 * D, before + 3 * D, spread);
      return;
    }
    uint16_t* range_bits = scratch.take<uint16_t>(2 * now);
    float* range = scratch.take<float>(2 * now);
    for (int64_t d = 0; d < D; d++) {
      spread[d] = spread_of(all, codes + d * groups() * kRecord, now, range_bits, range);
    }
    return;
  }
  // No key is quantized, so all keys are in the tail: the standard deviation of (sparq.1).
  const int64_t count = end - low;
  std::fill(total, total + 2 * D, 0.0);
  if (count) append.read(work.rows, keys, low, count);
  for (int64_t j = 0; j < count; j++) {
    for (int64_t d = 0; d < D; d++) total[d] += work.rows[j * D + d];
  }
  for (int64_t j = 0; j < count; j++) {
    for (int64_t d = 0; d < D; d++) {
      const double apart = work.rows[j * D + d] - total[d] / double(count);
      squares[d] += apart * apart;
    }
  }
  for (int64_t d = 0; d < D; d++) spread[d] = count ? float(std::sqrt(squares[d] / double(count))) : 0;
}

}  // namespace sparse
