// Inner loops of prefill for the instruction set SPARSE_TILES.

#include "kernels.h"

#include "lanes.h"

namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLowest = -3.4028234e38f;  // replaces -inf in subtractions

// Computes R lines and N vectors of a product in registers.
template <int R, int N>
inline void product(const float* a, int64_t row, int64_t column, const float* b, float* c, int k, int width, bool add) {
  F total[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) total[r][n] = add ? load(c + int64_t(r) * width + n * W) : zero();
  }
  for (int t = 0; t < k; t++) {
    F right[N];
    for (int n = 0; n < N; n++) right[n] = load(b + int64_t(t) * width + n * W);
    for (int r = 0; r < R; r++) {
      const F left = set1(a[r * row + t * column]);
      for (int n = 0; n < N; n++) total[r][n] = fma(left, right[n], total[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) store(c + int64_t(r) * width + n * W, total[r][n]);
  }
}

// Computes N vectors of all lines.
template <int N>
void strip(const float* a, int64_t row, int64_t column, const float* b, float* c, int m, int k, int width, bool add) {
  int i = 0;
  const auto at = [&](int line) { return c + int64_t(line) * width; };
  for (; i + kStripRows <= m; i += kStripRows)
    product<kStripRows, N>(a + i * row, row, column, b, at(i), k, width, add);
  for (; i + 2 <= m; i += 2) product<2, N>(a + i * row, row, column, b, at(i), k, width, add);
  if (i < m) product<1, N>(a + i * row, row, column, b, at(i), k, width, add);
}

void multiply(const float* a, int64_t row, int64_t column, const float* b, float* c, int m, int k, int width,
              bool add) {
  int w = 0;
  for (; w + kStripVectors * W <= width; w += kStripVectors * W) {
    strip<kStripVectors>(a, row, column, b + w, c + w, m, k, width, add);
  }
  for (; w < width; w += W) strip<1>(a, row, column, b + w, c + w, m, k, width, add);
}

inline F largest_of(const float* logits, int n, int width, F most) {
  for (int j = 0; j < n; j++) most = max(most, load(logits + int64_t(j) * width));
  return most;
}

void weigh(float* logits, int n, int width, float* top, float* sum, float* faded) {
  for (int w = 0; w < width; w += W) {
    const F before = load(top + w), most = largest_of(logits + w, n, width, before);
    const F shift = mul(max(most, set1(kLowest)), set1(-1));
    F total = zero();
    for (int j = 0; j < n; j++) {
      float* at = logits + int64_t(j) * width + w;
      const F weight = exp(add(load(at), shift));
      total = add(total, weight);
      store(at, weight);
    }
    const F fade = exp(add(before, shift));
    store(faded + w, fade);
    store(sum + w, fma(load(sum + w), fade, total));
    store(top + w, most);
  }
}

void scale(float* c, int m, int width, const float* factor) {
  for (int w = 0; w < width; w += W) {
    const F by = load(factor + w);
    for (int i = 0; i < m; i++) {
      float* at = c + int64_t(i) * width + w;
      store(at, mul(load(at), by));
    }
  }
}

void masses(const float* logits, const float* near, int n, int width, float* top, float* inside, float* outside) {
  for (int w = 0; w < width; w += W) {
    const F most = largest_of(logits + w, n, width, set1(-kInfinity));
    const F shift = mul(max(most, set1(kLowest)), set1(-1));
    F in = zero(), out = zero();
    for (int j = 0; j < n; j++) {
      const int64_t at = int64_t(j) * width + w;
      const F weight = exp(add(load(logits + at), shift)), is_near = load(near + at);
      in = fma(weight, is_near, in);
      out = fma(weight, add(set1(1), mul(is_near, set1(-1))), out);
    }
    store(top + w, most);
    store(inside + w, in);
    store(outside + w, out);
  }
}

void share(const float* top, const float* most, const float* inverse, int width, float* a, float* b) {
  for (int w = 0; w < width; w += W) {
    const F shift = mul(max(load(most + w), set1(kLowest)), set1(-1));
    const F factor = mul(exp(add(load(top + w), shift)), load(inverse + w));
    store(a + w, mul(load(a + w), factor));
    store(b + w, mul(load(b + w), factor));
  }
}

}  // namespace

namespace sparse {
const Tiles SPARSE_TILES = {multiply, weigh, scale, masses, share};
}
