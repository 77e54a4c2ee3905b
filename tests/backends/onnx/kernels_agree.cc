// Compares the NEON kernels with the scalar kernels: conversions bit by bit, all other results to float32 accuracy.
// tests/backends/onnx/test_onnx_native.py runs this program in an emulator of another processor.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace sparse;

namespace {

const Kernels* const kBoth[] = {&kScalar, &kNeon};
using Floats = std::vector<float>;

Floats random_floats(size_t n) {
  Floats made(n);
  for (float& x : made) x = float(rand() % 2001 - 1000) / 500;
  return made;
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("differs: %s\n", what);
  std::exit(1);
}

void expect_close(const Floats& a, const Floats& b, const char* what) {
  for (size_t i = 0; i < a.size(); i++) expect(std::fabs(a[i] - b[i]) <= 1e-4f * (1 + std::fabs(a[i])), what);
}

void every_half_converts_the_same(int type) {
  std::vector<uint16_t> bits(65536), rounded[2];
  for (int i = 0; i < 65536; i++) bits[i] = uint16_t(i);
  Floats wide[2];
  for (int w = 0; w < 2; w++) {
    wide[w].resize(65536), rounded[w].resize(65536);
    kBoth[w]->type[type].widen(wide[w].data(), bits.data(), 65536);
    Floats between = wide[w];  // numbers that must be rounded
    for (float& x : between) x *= 1.0009f;
    kBoth[w]->type[type].narrow(rounded[w].data(), between.data(), 65536);
  }
  for (int i = 0; i < 65536; i++) {
    if (wide[0][i] != wide[0][i]) continue;
    expect(!std::memcmp(&wide[0][i], &wide[1][i], 4), "widen");
    expect(rounded[0][i] == rounded[1][i], "narrow");
  }
}

void attention_is_the_same(int type, int D, int rows, int keys) {
  const Floats q = random_floats(rows * D), plain = random_floats(300 * D);
  std::vector<char> stored(300 * D * 4);
  kScalar.type[type].narrow(stored.data(), plain.data(), 300 * D);
  std::vector<int> low(rows), high(rows);
  for (int r = 0; r < rows; r++) low[r] = rand() % (keys + 1), high[r] = low[r] + rand() % (keys + 1 - low[r]);
  Floats output[2], sum[2];
  for (int w = 0; w < 2; w++) {
    output[w].resize(rows * D), sum[w].resize(rows);
    Floats top(rows, -INFINITY), scores(rows * kBlock);
    const Rows running{rows, D, D, q.data(), output[w].data(), top.data(), sum[w].data()};
    Keys block{stored.data(), stored.data(), nullptr, 5, keys, 0, nullptr, nullptr};
    kBoth[w]->type[type].attend(running, block, scores.data());
    block.first = 140, block.low = low.data(), block.high = high.data();
    kBoth[w]->type[type].attend(running, block, scores.data());
  }
  expect_close(output[0], output[1], "attend");
  expect_close(sum[0], sum[1], "sums");
}

void scores_are_the_same(int type, int D, int G, int keys) {
  const int rank = D < 11 ? D : 11, stride = 304;
  std::vector<int32_t> components(rank);
  for (int i = 0; i < rank; i++) components[i] = i;
  const Floats q = random_floats(rank * G), plain = random_floats(300 * D), factor(G, 0.5f);
  std::vector<char> stored(300 * D * 4);
  kScalar.type[type].narrow(stored.data(), plain.data(), 300 * D);
  Floats a[2], z[2];
  for (int w = 0; w < 2; w++) {
    a[w].resize(G * stride), z[w].resize(keys + 16);
    const Columns columns{stored.data(), stored.data(), 300, components.data(), rank, G, keys, 300};
    kBoth[w]->type[type].approximate(columns, q.data(), a[w].data(), stride);
    for (int g = 0; g < G; g++) {
      float top, sum;
      kBoth[w]->exponentials(a[w].data() + g * stride, keys, true, &top, &sum);
    }
    std::vector<int32_t> index(keys + 16);
    z[w].resize(kBoth[w]->collect(a[w].data(), stride, factor.data(), G, keys, 10, 0.03f, z[w].data(), index.data()));
  }
  for (int g = 0; g < G; g++) {
    const Floats ours(a[0].begin() + g * stride, a[0].begin() + g * stride + keys);
    expect_close(ours, Floats(a[1].begin() + g * stride, a[1].begin() + g * stride + keys), "scores");
  }
  expect(std::abs(int(z[0].size()) - int(z[1].size())) <= 1, "collected");
}

void codes_give_the_same_scores(int rank, int G) {
  const int groups = 3, stride = groups * kGroup, half = kGroup / 2;
  std::vector<uint8_t> stored(rank * groups * kRecord);
  for (uint8_t& byte : stored) byte = uint8_t(rand() % 0x3c);  // half-precision numbers below 1
  std::vector<int32_t> components(rank);
  for (int i = 0; i < rank; i++) components[i] = rank - 1 - i;
  const Floats q = random_floats(rank * G);
  std::vector<uint8_t> planes[3];  // the same numbers as arrays of MLX: codes, lo, step
  for (int i = 0; i < rank * groups; i++) {
    const uint8_t* record = stored.data() + i * kRecord;
    planes[0].insert(planes[0].end(), record + kHeader, record + kRecord);
    planes[1].insert(planes[1].end(), record, record + 2), planes[2].insert(planes[2].end(), record + 2, record + 4);
  }
  const Codes records{stored.data() + kHeader, stored.data(), stored.data() + 2, groups * kRecord, groups * kRecord,
                      kRecord, kRecord, components.data(), rank, G, groups, 0};
  const Codes arrays{planes[0].data(), planes[1].data(), planes[2].data(), groups * half, groups * 2,
                     half, 2, components.data(), rank, G, groups, 0};
  Floats a[4], work(4 * rank);
  for (int w = 0; w < 4; w++) {
    a[w].resize(G * stride);
    kBoth[w / 2]->approximate_codes(w % 2 ? arrays : records, q.data(), work.data(), a[w].data(), stride);
    expect_close(a[0], a[w], "scores from codes");
  }
}

// Updates the running softmax with two blocks of keys, and computes the softmax sums of the second block.
void tiles_are_the_same(int D, int width, int keys) {
  const Floats q = random_floats(D * width), k = random_floats(2 * keys * D), near = [&] {
    Floats made(keys * width);
    for (float& x : made) x = float(rand() % 2);
    return made;
  }();
  Floats output[2], sum[2], mass[2];
  for (int w = 0; w < 2; w++) {
    const Tiles& tiles = *kBoth[w]->tiles;
    Floats logits(keys * width), top(width, -INFINITY), faded(width), most(width), inside(width), outside(width);
    output[w].resize(D * width), sum[w].resize(width);
    for (int block = 0; block < 2; block++) {
      const float* at = k.data() + block * keys * D;
      tiles.multiply(at, D, 1, q.data(), logits.data(), keys, D, width, false);
      logits[width / 2] = -INFINITY;
      tiles.masses(logits.data(), near.data(), keys, width, most.data(), inside.data(), outside.data());
      tiles.weigh(logits.data(), keys, width, top.data(), sum[w].data(), faded.data());
      tiles.scale(output[w].data(), D, width, faded.data());
      tiles.multiply(at, 1, D, logits.data(), output[w].data(), D, keys, width, true);
    }
    tiles.share(most.data(), top.data(), sum[w].data(), width, inside.data(), outside.data());
    mass[w] = inside;
    mass[w].insert(mass[w].end(), outside.begin(), outside.end());
  }
  expect_close(output[0], output[1], "tiles");
  expect_close(sum[0], sum[1], "sums of tiles");
  expect_close(mass[0], mass[1], "masses");
}

}  // namespace

int main() {
  for (int type = 0; type < 3; type++) {
    if (type) every_half_converts_the_same(type);
    for (const int D : {1, 7, 30, 64, 80, 128}) {
      for (const int rows : {1, 2, 3, 5, 8}) {
        for (const int keys : {1, 3, 64, 127, 128}) {
          attention_is_the_same(type, D, rows, keys);
          scores_are_the_same(type, D, rows, keys);
        }
      }
    }
  }
  for (const int rank : {1, 11}) {
    for (const int G : {1, 2, 3, 4, 5, 8}) codes_give_the_same_scores(rank, G);
  }
  for (const int D : {1, 7, 64}) {
    for (const int width : {16, 48, 128}) {
      for (const int keys : {1, 33, 128}) tiles_are_the_same(D, width, keys);
    }
  }
  std::vector<int32_t> keys(1000);
  for (int i = 0; i < 1000; i++) keys[i] = i * 7919 % 300 - 150;
  expect(kScalar.bound_of(keys.data(), 1000, 128) == kNeon.bound_of(keys.data(), 1000, 128), "bound_of");
}
