// The inner loops, for the instruction set that SPARSE_SIMD names: kScalar, kAvx2, kAvx512 or kNeon.

#include "kernels.h"

#include "simd.h"
#include "tiles.h"

namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int kLine = 64;  // bytes
constexpr int kRowsAhead = 8;

// The first n numbers, 0 < n <= W, and zeros after them.
template <class T>
inline F load_part(const T* p, int n) {
  if (n >= W) return load(p);
  T part[W] = {};
  for (int i = 0; i < n; i++) part[i] = p[i];
  return load(part);
}

template <class T>
inline void store_part(T* p, F x, int n) {
  if (n >= W) return store(p, x);
  T part[W];
  store(part, x);
  for (int i = 0; i < n; i++) p[i] = part[i];
}

inline float number_at(const float* p) { return *p; }
inline float number_at(const Half* p) { return half_at(reinterpret_cast<const uint8_t*>(p)); }
inline float number_at(const BFloat16* p) {
  const uint32_t bits = uint32_t(p->bits) << 16;
  float number;
  __builtin_memcpy(&number, &bits, 4);
  return number;
}

template <class T>
void widen(float* out, const void* in, int64_t n) {
  const T* from = static_cast<const T*>(in);
  for (int64_t i = 0; i < n; i += W) {
    const int part = n - i < W ? int(n - i) : W;
    store_part(out + i, load_part(from + i, part), part);
  }
}

template <class T>
void narrow(void* out, const float* in, int64_t n) {
  T* to = static_cast<T*>(out);
  for (int64_t i = 0; i < n; i += W) {
    const int part = n - i < W ? int(n - i) : W;
    store_part(to + i, load_part(in + i, part), part);
  }
}

inline void prefetch(const void* p, int64_t bytes) {
  const char* line = static_cast<const char*>(p);
  for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(line + i);
}

// Two vectors of components of a row, from number i of its codes on; rounded to T, and not fused before: of float32 it is
// what others compute.
template <class T, int kBits>
inline void unpack_two(const uint8_t* codes, int i, F scale, F bias, F* out) {
  if (kBits == 8) {
    out[0] = bytes(codes + i), out[1] = bytes(codes + i + W);
  } else {
    nibbles(codes + i / 2, out[0], out[1]);
    interleave(out[0], out[1]);
  }
  for (int n = 0; n < 2; n++) out[n] = rounded(add(mul(out[n], scale), bias), static_cast<const T*>(nullptr));
}

template <class T, int kBits>
inline void unpack_row(float* out, const uint8_t* codes, const PackedRows& packed) {
  const T* ranges = reinterpret_cast<const T*>(codes + packed.D * kBits / 8);
  for (int d = 0; d < packed.D; d += packed.group, ranges += 2) {
    const F scale = set1(number_at(ranges)), bias = set1(number_at(ranges + 1));
    for (int i = d; i < d + packed.group; i += 2 * W) {
      F numbers[2];
      unpack_two<T, kBits>(codes, i, scale, bias, numbers);
      store(out + i, numbers[0]), store(out + i + W, numbers[1]);
    }
  }
}

inline const uint8_t* row_of(const PackedRows& packed, int i) {
  return packed.rows + (packed.index ? packed.index[i] : packed.first + i) * packed.stride;
}

template <class T>
void unpack(float* out, const PackedRows& packed) {
  for (int i = 0; i < packed.count; i++, out += packed.D) {
    if (packed.index && i + kRowsAhead < packed.count) prefetch(row_of(packed, i + kRowsAhead), packed.stride);
    if (packed.bits == 8) {
      unpack_row<T, 8>(out, row_of(packed, i), packed);
    } else {
      unpack_row<T, 4>(out, row_of(packed, i), packed);
    }
  }
}

// Dot products of R query rows with kTileKeys packed rows.
template <int R, class T, int kBits>
inline void packed_dots(const float* q, const uint8_t* const* rows, const PackedRows& packed, float* a,
                        int64_t stride) {
  const int D = packed.D;
  F total[R][kTileKeys];
  for (int r = 0; r < R; r++) {
    for (int c = 0; c < kTileKeys; c++) total[r][c] = zero();
  }
  for (int d = 0, at = D * kBits / 8; d < D; d += packed.group, at += 2 * int(sizeof(T))) {
    F scale[kTileKeys], bias[kTileKeys];
    for (int c = 0; c < kTileKeys; c++) {
      const T* range = reinterpret_cast<const T*>(rows[c] + at);
      scale[c] = set1(number_at(range)), bias[c] = set1(number_at(range + 1));
    }
    for (int i = d; i < d + packed.group; i += 2 * W) {
      for (int c = 0; c < kTileKeys; c++) {
        F key[2];
        unpack_two<T, kBits>(rows[c], i, scale[c], bias[c], key);
        for (int r = 0; r < R; r++) {
          total[r][c] = fma(load(q + int64_t(r) * D + i), key[0], total[r][c]);
          total[r][c] = fma(load(q + int64_t(r) * D + i + W), key[1], total[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < R; r++) {
    if constexpr (kTileKeys == 4) {
      sum4(total[r][0], total[r][1], total[r][2], total[r][3], a + r * stride);
    } else {
      for (int c = 0; c < kTileKeys; c++) a[r * stride + c] = sum(total[r][c]);
    }
  }
}

template <class T, int kBits>
void score_bits(const PackedRows& packed, const float* q, int G, float* a, int64_t stride) {
  constexpr int kAhead = 8 * kLine;  // bytes
  for (int j = 0; j < packed.count; j += kTileKeys) {
    const uint8_t* rows[kTileKeys];
    for (int c = 0; c < kTileKeys; c++) {  // past the end the last row again; its score is not looked at
      rows[c] = row_of(packed, j + c < packed.count ? j + c : packed.count - 1);
      prefetch(rows[c] + kAhead, packed.stride);
    }
    int g = 0;
    for (; g + 4 <= G; g += 4) {
      packed_dots<4, T, kBits>(q + int64_t(g) * packed.D, rows, packed, a + g * stride + j, stride);
    }
    const float* rest = q + int64_t(g) * packed.D;
    float* last = a + g * stride + j;
    if (G - g == 3) packed_dots<3, T, kBits>(rest, rows, packed, last, stride);
    if (G - g == 2) packed_dots<2, T, kBits>(rest, rows, packed, last, stride);
    if (G - g == 1) packed_dots<1, T, kBits>(rest, rows, packed, last, stride);
  }
}

template <class T>
void score_packed(const PackedRows& packed, const float* q, int G, float* a, int64_t stride) {
  if (packed.bits == 8) return score_bits<T, 8>(packed, q, G, a, stride);
  score_bits<T, 4>(packed, q, G, a, stride);
}

inline int64_t row_of(const Keys& block, int j) { return block.index ? block.index[j] : block.first + j; }

// Dot products of R query rows with kTileKeys key rows.
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
    for (int c = 0; c < kTileKeys; c++) {  // no machine foresees where the next chosen rows are
      const int ahead = j + c + kRowsAhead;
      if (block.index && ahead < block.count) prefetch(keys + row_of(block, ahead) * D, D * sizeof(T));
    }
    for (int c = 0; c < kTileKeys; c++) {  // past the end the last key again; its score is not looked at
      const int64_t row = row_of(block, j + c < block.count ? j + c : block.count - 1) * D;
      k[c] = keys + row;
      prefetch(values + row, D * sizeof(T));
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

// Scores become weights relative to the new largest logit; what was summed before is brought down to it.
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
      float* out = rows.output + int64_t(r) * rows.D;
      const F factor = set1(faded[0]);
      for (int d = 0; d < rows.D; d += W) {
        const int n = rows.D - d < W ? rows.D - d : W;
        store_part(out + d, mul(load_part(out + d, n), factor), n);
      }
      rows.top[r] = top;
    }
    rows.sum[r] += sum(total);
  }
}

// output (R, N vectors from d on) += weights (R, count) values.
template <int R, int N, class T>
inline void add_values(const Rows& rows, int r0, int d, const Keys& block, const float* weights, bool fetch) {
  const T *values = static_cast<const T*>(block.values), *keys = static_cast<const T*>(block.keys);
  const int D = rows.D;
  const int part = N == 1 && D - d < W ? D - d : W;
  float* out = rows.output + int64_t(r0) * D + d;
  F total[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) total[r][n] = load_part(out + int64_t(r) * D + n * W, part);
  }
  for (int j = 0; j < block.count; j++) {
    if (fetch && j < block.next) prefetch(keys + row_of(block, block.count + j) * D, D * sizeof(T));
    const T* v = values + row_of(block, j) * D + d;
    F value[N];
    for (int n = 0; n < N; n++) value[n] = load_part(v + n * W, part);
    for (int r = 0; r < R; r++) {
      const F weight = set1(weights[(r0 + r) * kBlock + j]);
      for (int n = 0; n < N; n++) total[r][n] = fma(weight, value[n], total[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) store_part(out + int64_t(r) * D + n * W, total[r][n], part);
  }
}

template <int R, class T>
void add_rows(const Rows& rows, int r0, const Keys& block, const float* weights) {
  int d = 0;
  for (; d + kTileVectors * W <= rows.D; d += kTileVectors * W) {
    add_values<R, kTileVectors, T>(rows, r0, d, block, weights, r0 + d == 0);
  }
  for (; d < rows.D; d += W) add_values<R, 1, T>(rows, r0, d, block, weights, r0 + d == 0);
}

template <class T>
void attend(const Rows& rows, const Keys& block, float* scores) {
  score_block<T>(rows, block, scores);
  weigh(rows, block, scores);
  int r = 0;
  for (; r + 4 <= rows.count; r += 4) add_rows<4, T>(rows, r, block, scores);
  if (rows.count - r == 3) add_rows<3, T>(rows, r, block, scores);
  if (rows.count - r == 2) add_rows<2, T>(rows, r, block, scores);
  if (rows.count - r == 1) add_rows<1, T>(rows, r, block, scores);
}

// Rows of component-major keys that are added at a time, and the rows after them.
template <class T>
struct Run {
  const T *row[kTileComponents], *next[kTileComponents];
};

// a (R, count) += q (N, R) . N rows of keys, or = with `start`. Rows are read in runs, a few at a time: short pieces of
// all rows in turn would reach half the bandwidth.
template <int R, int N, class T>
inline void add_components(const Columns& columns, const Run<T>& run, const float* q, float* a, int64_t stride,
                           bool start) {
  constexpr int kAhead = 16 * kLine / int(sizeof(T));  // elements
  F query[N][R];
  for (int n = 0; n < N; n++) {
    for (int r = 0; r < R; r++) query[n][r] = set1(q[n * R + r]);
  }
  for (int j = 0; j < columns.count; j += W) {
    if (j % (kLine / int(sizeof(T))) == 0) {
      const int ahead = j + kAhead - columns.count;
      for (int n = 0; n < N; n++) __builtin_prefetch(ahead < 0 ? run.row[n] + j + kAhead : run.next[n] + ahead, 0, 2);
    }
    const int part = columns.readable - j < W ? columns.readable - j : W;
    F total[R];
    for (int r = 0; r < R; r++) total[r] = start ? zero() : load(a + r * stride + j);
    for (int n = 0; n < N; n++) {
      const F key = load_part(run.row[n] + j, part);
      for (int r = 0; r < R; r++) total[r] = fma(query[n][r], key, total[r]);
    }
    for (int r = 0; r < R; r++) store(a + r * stride + j, total[r]);
  }
}

template <int R, class T>
void approximate_rows(const Columns& columns, const float* q, float* a, int64_t stride) {
  const T *here = static_cast<const T*>(columns.lanes), *after = static_cast<const T*>(columns.next);
  const auto row = [&](int i) {
    if (i < columns.rank) return here + columns.components[i] * columns.stride;
    return after + columns.components[i % columns.rank] * columns.stride;
  };
  for (int i = 0; i < columns.rank;) {
    const bool full = i + kTileComponents <= columns.rank;
    const int N = full ? kTileComponents : 1;
    Run<T> run;
    for (int n = 0; n < N; n++) run.row[n] = row(i + n), run.next[n] = row(i + N + n);
    if (full) {
      add_components<R, kTileComponents>(columns, run, q + i * R, a, stride, i == 0);
    } else {
      add_components<R, 1>(columns, run, q + i * R, a, stride, i == 0);
    }
    i += N;
  }
}

template <class T>
void approximate(const Columns& columns, const float* q, float* a, int64_t stride) {
  for (int g = 0; g < columns.G; g += 4) {
    const int R = columns.G - g < 4 ? columns.G - g : 4;
    if (R == 4) approximate_rows<4, T>(columns, q, a, stride);
    if (R == 3) approximate_rows<3, T>(columns, q, a, stride);
    if (R == 2) approximate_rows<2, T>(columns, q, a, stride);
    if (R == 1) approximate_rows<1, T>(columns, q, a, stride);
    q += int64_t(R) * columns.rank;
    a += R * stride;
  }
}

// Vectors of codes of keys in their order, or of pairs of vectors those of even keys, then those of odd keys.
template <int kBits>
inline void load_codes(const uint8_t* p, F* codes) {
  for (int v = 0; v < kCodeVectors; v++) {
    if (kBits == 8) codes[v] = bytes(p + v * W);
    if (kBits == 4 && v % 2 == 0) nibbles(p + v / 2 * W, codes[v], codes[v + 1]);
  }
}

// A group is a sum of q lo, the same for all of its keys, and of (q step) code: no key is decoded.
template <int R, int kBits>
void approximate_records(const Codes& codes, const float* q, float* work, float* a, int64_t stride) {
  constexpr int kRecord = kHeader + kGroup / 8 * kBits;
  for (int n = 0; n < codes.groups; n++, a += kGroup) {
    const uint8_t* group = codes.records + n * kRecord;
    float base[R] = {};
    for (int j = 0; j < kGroup; j += kCodeVectors * W) {
      F total[R][kCodeVectors];
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < kCodeVectors; v++) total[r][v] = zero();
      }
      for (int i = 0; i < codes.rank; i++) {
        const uint8_t* record = group + codes.components[i] * codes.stride;
        if (j == 0) {  // beside the products of the first keys, which hide it
          __builtin_prefetch(record + codes.ahead, 0, 2);
          const float lo = half_at(record), step = half_at(record + 2);
          for (int r = 0; r < R; r++) base[r] += q[i * R + r] * lo;
          for (int r = 0; r < R; r++) work[i * R + r] = q[i * R + r] * step;
        }
        F code[kCodeVectors];
        load_codes<kBits>(record + kHeader + j * kBits / 8, code);
        for (int r = 0; r < R; r++) {
          const F query = set1(work[i * R + r]);
          for (int v = 0; v < kCodeVectors; v++) total[r][v] = fma(query, code[v], total[r][v]);
        }
      }
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < kCodeVectors; v++) total[r][v] = add(total[r][v], set1(base[r]));
      }
      for (int r = 0; r < R; r++) {
        for (int v = 0; v < kCodeVectors; v += 2) {
          if (kBits == 4) interleave(total[r][v], total[r][v + 1]);
          store(a + r * stride + j + v * W, total[r][v]);
          store(a + r * stride + j + (v + 1) * W, total[r][v + 1]);
        }
      }
    }
  }
}

template <int kBits>
void approximate_bits(const Codes& codes, const float* q, float* work, float* a, int64_t stride) {
  for (int g = 0; g < codes.G; g += 4) {
    const int R = codes.G - g < 4 ? codes.G - g : 4;
    if (R == 4) approximate_records<4, kBits>(codes, q, work, a, stride);
    if (R == 3) approximate_records<3, kBits>(codes, q, work, a, stride);
    if (R == 2) approximate_records<2, kBits>(codes, q, work, a, stride);
    if (R == 1) approximate_records<1, kBits>(codes, q, work, a, stride);
    q += int64_t(R) * codes.rank;
    a += R * stride;
  }
}

void approximate_codes(const Codes& codes, const float* q, float* work, float* a, int64_t stride) {
  if (codes.bits == 8) return approximate_bits<8>(codes, q, work, a, stride);
  approximate_bits<4>(codes, q, work, a, stride);
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
  if (full < n) {  // the lanes past the end count nothing
    float kept[W];
    store(kept, exp(add(load_part(a + full, n - full), shift)));
    partial = add(partial, load_part(kept, n - full));
    if (write) store_part(a + full, load(kept), n - full);
  }
  *total = sum(partial);
}

// For kG heads, or G of them where kG is 0.
template <int kG>
int collect_heads(const float* a, int64_t stride, const float* factor, int G, int n, int32_t first, float threshold,
                  float* z, int32_t* index) {
  const int heads = kG ? kG : G;
  int found = 0, j = 0;
  for (; j + W <= n; j += W) {
    F total = zero();  // 0 + -0 is 0: equal scores have equal bits
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

// The order of the keys is that of int32. Halves the range of the k-th largest until a bound has exactly k above it.
int32_t bound_of(const int32_t* keys, int n, int k) {
  int32_t least = keys[0], most = keys[0];
  for (int i = 1; i < n; i++) {
    least = keys[i] < least ? keys[i] : least;
    most = keys[i] > most ? keys[i] : most;
  }
  int64_t low = least, high = int64_t(most) + 1;  // at least k keys reach low, fewer reach high
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
  return {widen<T>, narrow<T>, unpack<T>, score_packed<T>, attend<T>, score_block<T>, approximate<T>};
}

}  // namespace

namespace sparse {
const Kernels SPARSE_SIMD = {SPARSE_NAME,  {kernels_of<float>(), kernels_of<Half>(), kernels_of<BFloat16>()},
                             exponentials, bound_of,
                             collect,      approximate_codes,
                             &SPARSE_TILES};
}
