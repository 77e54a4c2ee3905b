#include <cmath>
#include <limits>
#include <utility>

#include "kernels.h"
#include "operators.h"

namespace sparse {

namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
using std::to_string;

struct IntAttribute {
  const char* name;
  int64_t Attributes::*to;
  int64_t low, high;
  Has of;
};

constexpr IntAttribute kInts[] = {
    {"rank", &Attributes::rank, 1, kMost, kSparQ},
    {"top_k", &Attributes::top_k, 1, kMost, kSparQ},
    {"local_window", &Attributes::local_window, 0, kMost, kSparQ},
    {"reallocate", &Attributes::reallocate, 0, 1, kSparQ},
    {"group_reduce", &Attributes::group_reduce, 0, 1, kSparQ},
    {"component_score", &Attributes::component_score, 0, 1, kSparQ},
    {"probes", &Attributes::probes, 1, kMost, kSaap},
    {"sink_tokens", &Attributes::sink_tokens, 0, kAny, kSaap},
    {"recent_tokens", &Attributes::recent_tokens, 1, kAny, kSaap},
    {"window", &Attributes::window, 0, kAny, kWindow},
    {"lanes", &Attributes::lanes, 1, kMost, kLanes},
    {"dense_below", &Attributes::dense_below, 0, kAny, kDenseBelow},
    {"chunks", &Attributes::chunks, 1, kMost, kSample},
    {"block_size", &Attributes::block_size, 32, kBlock, kSample},
    {"dense_prompt_below", &Attributes::dense_prompt_below, 0, kAny, kDensePrompt},
};

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
    fail("spec", to_string(kSpec) + ", which this library knows", to_string(spec));
  }
  const auto number = [&](const char* name) {
    float value = 0;
    if (ort::Status* status = ort::GetAttributeFloat::call(api, info, name, &value)) {
      ort::ReleaseStatus::call(api, status);
      fail(name, "a float attribute", "none");
    }
    return value;
  };
  for (const IntAttribute& each : kInts) {
    if (!(signature.has & each.of)) continue;
    const int64_t value = integer(each.name);
    if (value < each.low || value > each.high) {
      fail(each.name, to_string(each.low) + " to " + to_string(each.high), to_string(value));
    }
    read.*each.to = value;
  }
  if (read.local_window > read.top_k) {
    fail("local_window", "at most top_k=" + to_string(read.top_k) + ", which includes it",
         to_string(read.local_window));
  }
  if (signature.has & kScale) {
    read.scale = number("scale");
    if (!std::isfinite(read.scale)) fail("scale", "a finite number", to_string(read.scale));
  }
  if (signature.has & kSample) {
    if (read.block_size & (read.block_size - 1)) fail("block_size", "32, 64 or 128", to_string(read.block_size));
    for (const auto& [name, to] : {std::pair("alpha_column", &read.alpha_column), {"alpha_slash", &read.alpha_slash}}) {
      *to = number(name);
      if (!(*to > 0 && *to <= 1)) fail(name, "a number above 0 and at most 1", to_string(*to));
    }
  }
  return read;
}

}  // namespace sparse
