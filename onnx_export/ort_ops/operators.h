// Operators of the domain mlx_sparse (docs/spec/operators.md): attributes, validation and calls. Each file that
// implements operators registers their signatures.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "context.h"

namespace sparse {

constexpr int64_t kSpec = 1;

// Attributes of a node by name; 0 for attributes that its signature lacks.
class Attributes {
 public:
  int64_t operator[](const char* name) const { return of(integers, name); }
  float number(const char* name) const { return of(numbers, name); }

  std::map<std::string, int64_t, std::less<>> integers;
  std::map<std::string, float, std::less<>> numbers;

 private:
  template <class Map>
  static typename Map::mapped_type of(const Map& map, const char* name) {
    const auto found = map.find(name);
    return found == map.end() ? 0 : found->second;
  }
};

struct Signature {
  std::string name;
  const char* inputs;      // one letter per input: T, W, f for float, i for int64, s for int16, u for uint8
  const char* outputs;     // T, f, s, u, or n for int32
  int shape_of[6];         // for each output the input with the same shape, or -1
  std::string attributes;  // names other than `spec`, separated by spaces
  void (*compute)(const Attributes&, const Context&);
};

// Returns all signatures, which do not change after the library was loaded.
std::vector<Signature>& signatures();

// A static object of this type adds signatures when the library is loaded.
struct Registered {
  explicit Registered(std::initializer_list<Signature> more) {
    signatures().insert(signatures().end(), more);
  }
};

// Attributes of SampleAttention. Every operator with caches has a second signature with these attributes.
constexpr const char* kSampled = " alpha_column alpha_slash chunks block_size dense_prompt_below";

}  // namespace sparse
