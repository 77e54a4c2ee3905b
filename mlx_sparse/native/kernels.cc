// Inner loops for the instruction set SPARSE_SIMD: kScalar, kAvx2, kAvx512 or kNeon.

#include "kernels.h"

#include "approximate.h"
#include "lanes.h"

namespace {

constexpr float kInfinity = __builtin_inff();

inline int64_t row_of(const Keys& block, int j) { return block.index ? block.index[j] : block.first + j; }

// Computes the dot products of R query rows with kTileKeys key rows.
template <int R, class T>
inline void dots(const float* q, const T* const* k, int D, float* scores) {
  F total[R][kTileKeys];
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < kTileKeys; c++) total[r][c] = zero();
  }
  int d = 0;
  for (; d + W <= D; d += W) {
    F key[kTileKeys];
    for (int c = 0; c < kTileKeys; c++) key[c] = load(k[c] + d);
    for (int r = 0; r < R; r++) {
      const F query = load(q + int64_t(r) * D + d);
      for (int c = 0; c < kTileKeys; c++) total[r][c] = fma(query, key[c], total[r][c]);
    }
  }
  if (d < D) {
    for (int c = 0; c < kTileKeys; c++) {
      const F key = load_part(k[c] + d, D - d);
      for (int r = 0; r < R; r++) total[r][c] = fma(load_part(q + int64_t(r) * D + d, D - d), key, total[r][c]);
    }
  }
  for (int r = 0; r < R; r++) {
    if constexpr (kTileKeys == 4) {
      sum4(total[r][0], total[r][1], total[r][2], total[r][3], scores + r * kBlock);
    } else {
      for (int c = 0; c < kTileKeys; c++) scores[r * kBlock + c] = sum(total[r][c]);
    }
  }
}

template <class T>
void score_block(const Rows& rows, const Keys& block, float* scores) {
  const T *keys = static_cast<const T*>(block.keys), *values = static_cast<const T*>(block.values);
  const int D = rows.D;
  for (int j = 0; j < block.count; j += kTileKeys) {
    const T* k[kTileKeys];
    for (int c = 0; c < kTileKeys; c++) {  // prefetch, because the addresses of selected rows are not predictable
      const int ahead = j + c + kRowsAhead;
      if (block.index && ahead < block.count) prefetch(keys + row_of(block, ahead) * D, D * sizeof(T));
    }
    for (int c = 0; c < kTileKeys; c++) {  // after the end, repeat the last key; its score is ignored
      const int64_t at = row_of(block, j + c < block.count ? j + c : block.count - 1);
      k[c] = keys + at * D;
      prefetch(values + at * rows.Dv, rows.Dv * sizeof(T));
    }
    int r = 0;
    for (; r + 4 <= rows.count; r += 4) dots<4>(rows.q + int64_t(r) * D, k, D, scores + r * kBlock + j);
    const float* q = rows.q + int64_t(r) * D;
    float* last = scores + r * kBlock + j;
    if (rows.count - r == 3) dots<3>(q, k, D, last);
    if (rows.count - r == 2) dots<2>(q, k, D, last);
    if (rows.count - r == 1) dots<1>(q, k, D, last);
  }
}

inline float number_at(const Bias& bias, int64_t i) {
  if (bias.type == kTypeFloat) return static_cast<const float*>(bias.data)[i];
  const uint8_t* p = static_cast<const uint8_t*>(bias.data) + 2 * i;
  if (bias.type == kTypeHalf) return half_at(p);
  const uint32_t bits = uint32_t(p[0] | p[1] << 8) << 16;
  float number;
  __builtin_memcpy(&number, &bits, 4);
  return number;
}

// Adds the bias to the scores. The scores of hidden keys become -inf.
void add_bias(const Rows& rows, const Keys& block, float* scores) {
  const Bias& bias = *block.bias;
  for (int r = 0; r < rows.count; r++) {
    for (int j = 0; j < block.count; j++) {
      const float number = number_at(bias, r * bias.stride + row_of(block, j));
      float& score = scores[r * kBlock + j];
      score = number <= bias.lowest ? -kInfinity : score + number;
    }
  }
}

// Converts scores to weights relative to the new largest logit, and rescales the earlier sums.
void weigh(const Rows& rows, const Keys& block, float* scores) {
  for (int r = 0; r < rows.count; r++) {
    float* s = scores + r * kBlock;
    const int low = block.low ? block.low[r] : 0, high = block.high ? block.high[r] : block.count;
    for (int j = 0; j < low; j++) s[j] = 0;
    for (int j = high; j < block.count; j++) s[j] = 0;
    if (low >= high) continue;
    F most = set1(rows.top[r]);
    for (int j = low; j < high; j += W) {
      const int n = high - j < W ? high - j : W;
      most = n == W ? max(most, load(s + j)) : max(most, set1(rows.top[r]));
      for (int i = 0; n < W && i < n; i++) most = max(most, set1(s[j + i]));
    }
    const float top = largest(most), shift = top == -kInfinity ? 0 : top;
    F total = zero();
    for (int j = low; j < high; j += W) {
      const int n = high - j < W ? high - j : W;
      const F weight = exp(add(load_part(s + j, n), set1(-shift)));
      store_part(s + j, weight, n);
      if (n == W) {
        total = add(total, weight);
      } else {
        total = add(total, load_part(s + j, n));
      }
    }
    if (top != rows.top[r]) {
      float faded[W];
      store(faded, exp(set1(rows.top[r] - shift)));
      rows.sum[r] *= faded[0];
      float* out = rows.output + int64_t(r) * rows.Dv;
      const F factor = set1(faded[0]);
      for (int d = 0; d < rows.Dv; d += W) {
        const int n = rows.Dv - d < W ? rows.Dv - d : W;
        store_part(out + d, mul(load_part(out + d, n), factor), n);
      }
      rows.top[r] = top;
    }
    rows.sum[r] += sum(total);
  }
}

// Computes output (R, N vectors at d) += weights (R, count) values.
template <int R, int N, class T>
inline void add_values(const Rows& rows, int r0, int d, const Keys& block, const float* weights, bool fetch) {
  const T *values = static_cast<const T*>(block.values), *keys = static_cast<const T*>(block.keys);
  const int D = rows.D, Dv = rows.Dv;
  const int part = N == 1 && Dv - d < W ? Dv - d : W;
  float* out = rows.output + int64_t(r0) * Dv + d;
  F total[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) total[r][n] = load_part(out + int64_t(r) * Dv + n * W, part);
  }
  for (int j = 0; j < block.count; j++) {
    if (fetch && j < block.next) prefetch(keys + row_of(block, block.count + j) * D, D * sizeof(T));
    const T* v = values + row_of(block, j) * Dv + d;
    F value[N];
    for (int n = 0; n < N; n++) value[n] = load_part(v + n * W, part);
    for (int r = 0; r < R; r++) {
      const F weight = set1(weights[(r0 + r) * kBlock + j]);
      for (int n = 0; n < N; n++) total[r][n] = fma(weight, value[n], total[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) store_part(out + int64_t(r) * Dv + n * W, total[r][n], part);
  }
}

template <int R, class T>
void add_rows(const Rows& rows, int r0, const Keys& block, const float* weights) {
  int d = 0;
  for (; d + kTileVectors * W <= rows.Dv; d += kTileVectors * W) {
    add_values<R, kTileVectors, T>(rows, r0, d, block, weights, r0 + d == 0);
  }
  for (; d < rows.Dv; d += W) add_values<R, 1, T>(rows, r0, d, block, weights, r0 + d == 0);
}

template <class T>
void attend(const Rows& rows, const Keys& block, float* scores) {
  score_block<T>(rows, block, scores);
  if (block.bias) add_bias(rows, block, scores);
  weigh(rows, block, scores);
  int r = 0;
  for (; r + 4 <= rows.count; r += 4) add_rows<4, T>(rows, r, block, scores);
  if (rows.count - r == 3) add_rows<3, T>(rows, r, block, scores);
  if (rows.count - r == 2) add_rows<2, T>(rows, r, block, scores);
  if (rows.count - r == 1) add_rows<1, T>(rows, r, block, scores);
}

void exponentials(float* a, int n, bool write, float* top, float* total) {
  const int full = n / W * W;
  F most = set1(-kInfinity);
  for (int j = 0; j < full; j += W) most = max(most, load(a + j));
  for (int j = full; j < n; j++) most = max(most, set1(a[j]));
  *top = largest(most);
  const F shift = set1(*top == -kInfinity ? 0 : -*top);
  F partial = zero();
  for (int j = 0; j < full; j += W) {
    const F weight = exp(add(load(a + j), shift));
    partial = add(partial, weight);
    if (write) store(a + j, weight);
  }
  if (full < n) {  // mask the lanes after the end
    float kept[W];
    store(kept, exp(add(load_part(a + full, n - full), shift)));
    partial = add(partial, load_part(kept, n - full));
    if (write) store_part(a + full, load(kept), n - full);
  }
  *total = sum(partial);
}

// Sums over kG heads, or over G heads if kG is 0.
template <int kG>
int collect_heads(const float* a, int64_t stride, const float* factor, int G, int n, int32_t first, float threshold,
                  float* z, int32_t* index) {
  const int heads = kG ? kG : G;
  int found = 0, j = 0;
  for (; j + W <= n; j += W) {
    F total = zero();  // 0 + -0 is 0, so equal scores have equal bits
    for (int g = 0; g < heads; g++) total = fma(set1(factor[g]), load(a + g * stride + j), total);
    found += compress_above(total, threshold, W, first + j, z + found, index + found);
  }
  if (j < n) {
    F total = zero();
    for (int g = 0; g < heads; g++) total = fma(set1(factor[g]), load_part(a + g * stride + j, n - j), total);
    found += compress_above(total, threshold, n - j, first + j, z + found, index + found);
  }
  return found;
}

int collect(const float* a, int64_t stride, const float* factor, int G, int n, int32_t first, float threshold, float* z,
            int32_t* index) {
  if (G == 1) return collect_heads<1>(a, stride, factor, G, n, first, threshold, z, index);
  if (G == 4) return collect_heads<4>(a, stride, factor, G, n, first, threshold, z, index);
  return collect_heads<0>(a, stride, factor, G, n, first, threshold, z, index);
}

// Keys are ordered as int32. Finds the k-th largest by bisection, until exactly k keys reach the bound.
int32_t bound_of(const int32_t* keys, int n, int k) {
  int32_t least = keys[0], most = keys[0];
  for (int i = 1; i < n; i++) {
    least = keys[i] < least ? keys[i] : least;
    most = keys[i] > most ? keys[i] : most;
  }
  int64_t low = least, high = int64_t(most) + 1;  // at least k keys reach low, and fewer than k reach high
  while (high - low > 1) {
    const int32_t middle = int32_t(low + (high - low) / 2);
    int reach = 0;
    for (int i = 0; i < n; i++) reach += keys[i] >= middle;
    if (reach == k) return middle;
    (reach > k ? low : high) = middle;
  }
  return int32_t(low);
}

template <class T>
constexpr TypeKernels kernels_of() {
  return {widen<T>, narrow<T>, attend<T>, score_block<T>, approximate<T>};
}

}  // namespace

namespace sparse {
const Kernels SPARSE_SIMD = {SPARSE_NAME,  {kernels_of<float>(), kernels_of<Half>(), kernels_of<BFloat16>()},
                             exponentials, bound_of,
                             collect,      approximate_codes,
                             &SPARSE_TILES};
}
