#include <cstring>

#include "attention.h"

namespace sparse {

namespace {

// Writes `count` keys into the component-major cache of one head from `position` on, a few tokens at a time, so that
// source and destination stay in the processor's cache.
template <class Bits>
void append_columns(const Append& a, const void* key, int64_t count, void* plane, int64_t position) {
  const Bits* from = static_cast<const Bits*>(key);
  Bits* to = static_cast<Bits*>(plane);
  for (int64_t i = 0; i < count;) {
    const int64_t j = position + i, lane = j % a.lanes;
    const int64_t n = std::min({count - i, a.lanes - lane, int64_t(32)});
    Bits* column = to + j / a.lanes * a.D * a.lanes + lane;
    for (int64_t d = 0; d < a.D; d++) {
      for (int64_t t = 0; t < n; t++) column[d * a.lanes + t] = from[(i + t) * a.D + d];
    }
    i += n;
  }
}

// Adds `end` tokens without the first `skip` to the running statistics of `valid` tokens: sums of v, of k, and of the
// squared differences between k and its mean. A sum over a few tokens is float32; over all tokens, double.
// Differences are relative to a shift, the old mean or the first key, because sums of k^2 would cancel for components
// far from 0.
void append_sums(const Append& a, const char* key, const char* value, int64_t end, const float* past, float* present,
                 int64_t valid, int64_t skip) {
  const int64_t D = a.D, item = size_of(a.type), added = std::max<int64_t>(0, end - skip);
  constexpr int64_t kTokens = 16;
  Scratch scratch(Scratch::kTask, Scratch::size<double>(3 * D) + Scratch::size<float>((2 * kTokens + 1) * D));
  double* total = scratch.take<double>(3 * D);
  float* k = scratch.take<float>((2 * kTokens + 1) * D);
  float *v = k + kTokens * D, *shift = v + kTokens * D;
  std::fill(total, total + 3 * D, 0.0);
  if (valid) {
    for (int64_t d = 0; d < D; d++) shift[d] = past[D + d] / float(valid);
  } else if (added) {
    a.kernels->widen(shift, key + skip * D * item, D);
  }
  for (int64_t i = skip; i < end; i += kTokens) {
    const int64_t n = std::min(kTokens, end - i);
    a.kernels->widen(k, key + i * D * item, n * D);
    a.kernels->widen(v, value + i * D * item, n * D);
    for (int64_t d = 0; d < D; d++) {
      float sums[3] = {0, 0, 0};
      for (int64_t t = 0; t < n; t++) {
        const float x = k[t * D + d] - shift[d];
        sums[0] += v[t * D + d], sums[1] += x, sums[2] += x * x;
      }
      for (int s = 0; s < 3; s++) total[s * D + d] += sums[s];
    }
  }
  for (int64_t d = 0; d < D; d++) {
    const double apart = total[D + d];
    const float old[3] = {valid ? past[d] : 0, valid ? past[D + d] : 0, valid ? past[2 * D + d] : 0};
    const double squares = old[2] + total[2 * D + d] - (added ? apart * apart / double(valid + added) : 0);
    present[d] = float(old[0] + total[d]);
    present[D + d] = float(old[1] + apart + (added ? double(added) * shift[d] : 0));
    present[2 * D + d] = squares < 0 ? 0 : float(squares);  // negative only by rounding
  }
}

}  // namespace

void Append::head(int64_t b, int64_t h) const {
  const int64_t item = size_of(type), token = (b * Hkv + h) * L * D * item;
  const char *k = static_cast<const char*>(key) + token, *v = static_cast<const char*>(value) + token;
  const auto copied = [&](const void* past, void* present) {
    const char* from = plane(past, b, h);
    char* to = const_cast<char*>(plane(present, b, h));
    if (from != to) std::memcpy(to, from, C * D * item);
    return to;
  };
  const int64_t place = past_length[b] * D * item;
  std::memcpy(copied(past_key, present_key) + place, k, L * D * item);
  std::memcpy(copied(past_value, present_value) + place, v, L * D * item);
  if (callback) callback->head(b, h);
  if (!present_key_t) return;
  void* columns = copied(past_key_t, present_key_t);
  const int64_t start = all ? 0 : past_length[b], count = past_length[b] + L - start;
  if (all) k = plane(present_key, b, h), v = plane(present_value, b, h);
  if (item == 2) {
    append_columns<uint16_t>(*this, k, count, columns, start);
  } else {
    append_columns<uint32_t>(*this, k, count, columns, start);
  }
  const int64_t sums = (b * Hkv + h) * 3 * D, valid = std::max<int64_t>(0, start - first[b]);
  const int64_t skip = std::max<int64_t>(0, first[b] - start);
  append_sums(*this, k, v, count, past_sums + sums, present_sums + sums, valid, skip);
}

void append_all(const Append& append, int64_t B, const Pool& pool) {
  pool.run(B * append.Hkv, [&](int64_t i) { append.head(i / append.Hkv, i % append.Hkv); });
}

}  // namespace sparse
