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

}  // namespace sparse
