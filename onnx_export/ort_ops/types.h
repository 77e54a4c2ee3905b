// Storage types.
#pragma once

#include <cstdint>

namespace sparse {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

enum Type { kTypeFloat, kTypeHalf, kTypeBFloat16 };

inline int64_t size_of(Type type) { return type == kTypeFloat ? 4 : 2; }

// How the rows of a cache lie in memory: D numbers of `type`, or packed, docs/spec/quantised.md: codes of `bits`, then
// scale and bias of each group, which are of `type`.
struct RowFormat {
  Type type;
  int64_t D;
  int64_t bits = 0, group = 0;  // 0: not packed

  bool floats() const { return !bits && type == kTypeFloat; }
  int64_t bytes() const { return bits ? D * bits / 8 + D / group * 2 * size_of(type) : D * size_of(type); }
  int64_t width() const { return bits ? bytes() : D; }  // elements of the tensor
};

}  // namespace sparse
