// Calls of several queries that choose once, docs/spec/several.md.

#include "attention.h"

namespace sparse {

Attention as_heads(const Attention& a, int64_t* prefix) {
  for (int64_t b = 0; b < a.B; b++) prefix[b] = a.length[b] - (a.L - 1);
  Attention heads = a;  // queries and outputs lie as they are: (B, Hq, L, D) is (B, Hq L, 1, D)
  heads.Hq = a.Hq * a.L, heads.L = 1, heads.own = a.L - 1, heads.length = prefix;
  return heads;
}

void attend_own(const Attention& a, const Rows& rows, int64_t b, int64_t h, float* scores) {
  constexpr int kTile = 64;  // rows
  const int64_t first = std::max(a.first[b], a.length[b]), end = a.length[b] + a.own, D = a.D;
  if (first >= end) return;
  int high[kTile];
  Keys block{a.plane(a.keys, b, h), a.plane(a.values, b, h), nullptr, first, int(end - first), 0, nullptr, high};
  for (int r0 = 0; r0 < rows.count; r0 += kTile) {
    const Rows tile{std::min(kTile, rows.count - r0), rows.D,        rows.q + r0 * D, rows.output + r0 * D,
                    rows.top + r0,                    rows.sum + r0};
    for (int r = 0; r < tile.count; r++) {
      const int64_t last = a.length[b] + (r0 + r) % (a.own + 1);
      high[r] = int(std::max<int64_t>(0, last - first));
    }
    a.attend(tile, block, scores);
  }
}

}  // namespace sparse
