// Entry points of the library for ONNX Runtime and Python.

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "kernels.h"
#include "operators.h"
#include "runtime.h"

#ifndef SPARSE_VERSION
#error "the build gives the version of the package"
#endif
#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace sparse {

std::vector<Signature>& signatures() {
  static std::vector<Signature> all;
  return all;
}

}  // namespace sparse

namespace {

using namespace sparse;

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

// One operator for one element type and one type of weights. ONNX Runtime merges operators of the same name.
struct Operator : ort::CustomOp {
  const Signature* signature;
  Type type, weights;

  static const Operator& of(const ort::CustomOp* op) { return *static_cast<const Operator*>(op); }
};

struct Kernel {
  const Operator* op;
  const ort::Api* api;
  Attributes attributes;
};

// Runs a function and converts an exception to a status.
template <class Function>
ort::Status* guarded(const ort::Api* api, const char* name, const Function& function) {
  std::string message;
  try {
    function();
    return nullptr;
  } catch (const Error& error) {
    message = std::string(name) + ": " + error.what();
  } catch (const std::bad_alloc&) {
    message = std::string(name) + ": out of memory.";
  } catch (const std::exception& error) {
    message = std::string(name) + ": " + error.what();
  }
  return ort::CreateStatus::call(api, ort::kInvalidArgument, message.c_str());
}

ort::Status* create(const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info, void** kernel) {
  const Operator& self = Operator::of(op);
  return guarded(api, self.signature->name.c_str(), [&] {
    *kernel = new Kernel{&self, api, read_attributes(*self.signature, api, info)};
  });
}

ort::Status* compute(void* kernel, ort::KernelContext* context) {
  const Kernel& self = *static_cast<const Kernel*>(kernel);
  return guarded(self.api, self.op->signature->name.c_str(), [&] {
    const Operator& op = *self.op;
    const Context called(self.api, context, op.type, op.weights);
    self.op->signature->compute(self.attributes, called);
  });
}

const ort::Api* known_api = nullptr;  // the shape callback gets no API pointer

// Sets the shape of outputs that have the shape of an input, if all of its dimensions are numbers or symbols.
ort::Status* infer(const ort::CustomOp* op, ort::ShapeContext* context) {
  const Signature& signature = *Operator::of(op).signature;
  for (size_t i = 0; signature.outputs[i]; i++) {
    if (signature.shape_of[i] < 0) continue;
    ort::Info* info = nullptr;
    ort::Status* status = ort::GetInputTypeShape::call(known_api, context, size_t(signature.shape_of[i]), &info);
    size_t axes = 0;
    int64_t lengths[Tensor::kMostAxes];
    const char* symbols[Tensor::kMostAxes] = {};
    if (!status && info) status = ort::GetDimensionsCount::call(known_api, info, &axes);
    bool known = !status && info && axes <= Tensor::kMostAxes;
    if (known) status = ort::GetDimensions::call(known_api, info, lengths, axes);
    if (known && !status) status = ort::GetSymbolicDimensions::call(known_api, info, symbols, axes);
    for (size_t d = 0; known && !status && d < axes; d++) known = lengths[d] >= 0 || (symbols[d] && *symbols[d]);
    if (known && !status) status = ort::SetOutputTypeShape::call(known_api, context, i, info);
    if (status) ort::ReleaseStatus::call(known_api, status);  // an unknown shape is not an error
  }
  return nullptr;
}

Operator make(const Signature& signature, Type type, Type weights) {
  Operator op{};
  op.signature = &signature;
  op.type = type, op.weights = weights;
  op.version = ort::kApiVersion;
  op.GetName = [](const ort::CustomOp* self) { return Operator::of(self).signature->name.c_str(); };
  op.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputType = [](const ort::CustomOp* self, size_t i) {
    const Operator& of = Operator::of(self);
    return element_type(of.signature->inputs[i], of.type, of.weights);
  };
  op.GetInputTypeCount = [](const ort::CustomOp* self) {
    return std::string(Operator::of(self).signature->inputs).size();
  };
  op.GetOutputType = [](const ort::CustomOp* self, size_t i) {
    const Operator& of = Operator::of(self);
    return element_type(of.signature->outputs[i], of.type, of.weights);
  };
  op.GetOutputTypeCount = [](const ort::CustomOp* self) {
    return std::string(Operator::of(self).signature->outputs).size();
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  const auto required = [](const ort::CustomOp*, size_t) { return 0; };
  op.GetInputCharacteristic = required;
  op.GetOutputCharacteristic = required;
  op.GetInputMemoryType = required;
  const auto none = [](const ort::CustomOp*) { return 0; };
  op.GetVariadicInputMinArity = op.GetVariadicInputHomogeneity = none;
  op.GetVariadicOutputMinArity = op.GetVariadicOutputHomogeneity = none;
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.InferOutputShape = infer;
  op.GetStartVersion = op.GetEndVersion = [](const ort::CustomOp*) { return 1; };
  return op;
}

ort::Status* add_operators(const ort::Api* api, ort::Domain* domain) {
  static std::vector<Operator> operators;
  if (operators.empty()) {
    for (const Signature& signature : signatures()) {
      const bool weighted = std::strchr(signature.inputs, 'W');
      for (const Type type : {kTypeFloat, kTypeHalf, kTypeBFloat16}) {
        operators.push_back(make(signature, type, kTypeFloat));
        if (weighted) operators.push_back(make(signature, type, kTypeHalf));
      }
    }
  }
  for (const Operator& op : operators) {
    if (ort::Status* status = ort::DomainAdd::call(api, domain, &op)) return status;
  }
  return nullptr;
}

}  // namespace

// SessionOptions.register_custom_ops_library calls this function. All sessions of a runtime share one domain.
EXPORTED ort::Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  static std::mutex mutex;
  static std::vector<std::pair<const ort::Api*, ort::Domain*>> domains;
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  if (!api) {
    return ort::CreateStatus::call(base->GetApi(1), ort::kFail, "mlx_sparse: expected ONNX Runtime 1.17 or newer.");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  ort::Domain* domain = nullptr;
  for (const auto& [of, made] : domains) {
    if (of == api) domain = made;
  }
  if (!domain) {
    known_api = api;
    if (ort::Status* status = ort::CreateCustomOpDomain::call(api, "mlx_sparse", &domain)) return status;
    if (ort::Status* status = add_operators(api, domain)) return status;
    domains.emplace_back(api, domain);
  }
  return ort::AddCustomOpDomain::call(api, options, domain);
}

// Returns the versions of the package and of the operator specification that the library was built for.
EXPORTED const char* mlx_sparse_version() { return SPARSE_VERSION " spec 1"; }

// For tests and reports: selects the kernels by name (null: the fastest) and the number of workers (0: default of this
// machine). Returns the name of the kernels, or null if this machine does not support them.
EXPORTED const char* mlx_sparse_limit(const char* name, int worker_count) {
  if (!limit_kernels(name)) return nullptr;
  set_workers(worker_count);
  return kernels().name;
}
