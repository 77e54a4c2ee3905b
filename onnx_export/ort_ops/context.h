// Attributes, inputs, outputs and errors of operators in ONNX Runtime.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "ort_abi.h"
#include "kernels.h"
#include "runtime.h"

namespace sparse {

// Error about an argument, with the message `<argument>: expected X, got Y.`
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const char* argument, const std::string& expected, const std::string& got);

struct Tensor {
  static constexpr int kMostAxes = 8;
  const char* name = nullptr;
  const void* data = nullptr;
  int64_t shape[kMostAxes] = {};
  int axes = 0;

  const int64_t* ints() const { return static_cast<const int64_t*>(data); }
  const float* floats() const { return static_cast<const float*>(data); }
  const uint8_t* bytes() const { return static_cast<const uint8_t*>(data); }
  const int16_t* shorts() const { return static_cast<const int16_t*>(data); }
  // Checks the axis lengths. A negative expected length allows any length above 0.
  void expect(std::initializer_list<int64_t> lengths) const;
};

// One call of a kernel.
class Context {
 public:
  Context(const ort::Api* api, ort::KernelContext* context, Type type, Type weights)
      : api_(api), context_(context), type_(type), weights_(weights) {}

  // Input `index`: T for 'T', W for 'W', float for 'f', int64 for 'i', int16 for 's', uint8 for 'u'.
  Tensor input(int index, const char* name, char kind) const;
  void* output(int index, std::initializer_list<int64_t> shape) const;
  Type type() const { return type_; }
  Type weights() const { return weights_; }
  const ort::Api* api() const { return api_; }
  const ort::KernelContext* context() const { return context_; }

 private:
  const ort::Api* api_;
  ort::KernelContext* context_;
  Type type_, weights_;
};

// The thread pool of the session.
class SessionPool final : public Pool {
 public:
  explicit SessionPool(const Context& context) : context_(context) {}

 private:
  void parallel(size_t n, Call call, void* job) const override;
  const Context& context_;
};

// Returns the element type for a letter of a signature.
ort::ElementType element_type(char letter, Type type, Type weights);

// Throws an exception with the message of a status, and releases the status.
void check(const ort::Api*, ort::Status*, const char* what);

}  // namespace sparse
