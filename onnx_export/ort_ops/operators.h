// The operators of domain mlx_sparse, docs/spec/operators.md: attributes and inputs in, checks, and the call. Each file
// that computes some of them registers their signatures.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "context.h"

namespace sparse {

constexpr int64_t kSpec = 1;

// The attributes of a node by name; 0 for those that its signature does not name.
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
  const char* inputs;      // a letter each: T, W, f for float, i for int64, s for int16, u for uint8
  const char* outputs;     // T, f, s, u, or n for int32
  int shape_of[6];         // the input that has the shape of each output; -1 for none
  std::string attributes;  // besides `spec`, with spaces between them
  void (*compute)(const Attributes&, const Context&);
};

// All signatures; nothing is added once the library has been loaded.
std::vector<Signature>& signatures();

// A static object of this type adds signatures while the library is loaded.
struct Registered {
  explicit Registered(std::initializer_list<Signature> more) {
    signatures().insert(signatures().end(), more);
  }
};

// Attributes of SampleAttention, which every operator with caches has in a second signature.
constexpr const char* kSampled = " alpha_column alpha_slash chunks block_size dense_prompt_below";

Attributes read_attributes(const Signature&, const ort::Api*, const ort::KernelInfo*);

}  // namespace sparse
