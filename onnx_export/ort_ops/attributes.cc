#include <cmath>
#include <limits>
#include <sstream>
#include <utility>

#include "kernels.h"
#include "operators.h"

namespace sparse {

namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
using std::to_string;

// Ranges of integer attributes. An attribute that is not listed is at least 1.
struct Range {
  const char* name;
  int64_t low, high;
};

constexpr Range kRanges[] = {
    {"local_window", 0, kMost},   {"reallocate", 0, 1},      {"component_score", 0, 1},
    {"sink_tokens", 0, kAny},     {"recent_tokens", 1, kAny}, {"window", 0, kAny},       {"dense_below", 0, kAny},
    {"block_size", 32, kBlock},   {"dense_prompt_below", 0, kAny},
};

bool is_number(const std::string& name) {
  return name == "scale" || name == "alpha_column" || name == "alpha_slash";
}

}  // namespace

Attributes read_attributes(const Signature& signature, const ort::Api* api, const ort::KernelInfo* info) {
  Attributes read;
  const auto integer = [&](const char* name) {
    int64_t value = 0;
    if (ort::Status* status = ort::GetAttributeInt::call(api, info, name, &value)) {
      ort::ReleaseStatus::call(api, status);
      fail(name, "an integer attribute", "none");
    }
    return value;
  };
  if (const int64_t spec = integer("spec"); spec != kSpec) {
    fail("spec", to_string(kSpec) + ", the version of this library", to_string(spec));
  }
  const auto number = [&](const char* name) {
    float value = 0;
    if (ort::Status* status = ort::GetAttributeFloat::call(api, info, name, &value)) {
      ort::ReleaseStatus::call(api, status);
      fail(name, "a float attribute", "none");
    }
    return value;
  };
  std::istringstream names(signature.attributes);
  for (std::string name; names >> name;) {
    if (is_number(name)) {
      const float value = read.numbers[name] = number(name.c_str());
      const bool share = name != "scale";
      if (!share && !std::isfinite(value)) fail(name.c_str(), "a finite number", to_string(value));
      if (share && !(value > 0 && value <= 1)) fail(name.c_str(), "a number above 0 and at most 1", to_string(value));
      continue;
    }
    Range range{name.c_str(), 1, kMost};
    for (const Range& known : kRanges) {
      if (name == known.name) range = known;
    }
    const int64_t value = read.integers[name] = integer(range.name);
    if (value < range.low || value > range.high) {
      fail(range.name, to_string(range.low) + " to " + to_string(range.high), to_string(value));
    }
  }
  if (read["local_window"] > read["top_k"]) {
    fail("local_window", "at most top_k=" + to_string(read["top_k"]) + ", which includes it",
         to_string(read["local_window"]));
  }
  if (const int64_t size = read["block_size"]; size & (size - 1)) fail("block_size", "32, 64 or 128", to_string(size));
  return read;
}

std::vector<Signature>& signatures() {
  static std::vector<Signature> all;
  return all;
}

}  // namespace sparse
