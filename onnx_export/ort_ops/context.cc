#include "context.h"

namespace sparse {

namespace {

std::string text(const int64_t* lengths, int count) {
  std::string all = "(";
  for (int i = 0; i < count; i++) {
    all += (i ? ", " : "") + (lengths[i] < 0 ? std::string("any") : std::to_string(lengths[i]));
  }
  return all + ")";
}

size_t element_size(ort::ElementType type) {
  switch (type) {
    case ort::kUInt8:
      return 1;
    case ort::kFloat:
    case ort::kInt32:
      return 4;
    case ort::kInt64:
      return 8;
    default:
      return 2;
  }
}

}  // namespace

ort::ElementType element_type(char letter, Type type, Type weights) {
  switch (letter) {
    case 'f':
      return ort::kFloat;
    case 'i':
      return ort::kInt64;
    case 'n':
      return ort::kInt32;
    case 's':
      return ort::kInt16;
    case 'u':
      return ort::kUInt8;
    default:
      const Type named = letter == 'W' ? weights : type;
      return named == kTypeFloat ? ort::kFloat : named == kTypeHalf ? ort::kFloat16 : ort::kBFloat16;
  }
}

void fail(const char* argument, const std::string& expected, const std::string& got) {
  throw Error(std::string(argument) + ": expected " + expected + ", got " + got + ".");
}

void check(const ort::Api* api, ort::Status* status, const char* what) {
  if (!status) return;
  ort::ReleaseStatus::call(api, status);
  throw Error(std::string(what) + ": ONNX Runtime returned an error.");
}

void SessionPool::parallel(size_t n, Call call, void* job) const {
  ort::Status* status = ort::ParallelFor::call(context_.api(), context_.context(), call, n, 0, job);
  if (!status) return;
  ort::ReleaseStatus::call(context_.api(), status);
  throw std::bad_alloc();
}

void Tensor::expect(std::initializer_list<int64_t> lengths) const {
  bool same = axes == int(lengths.size());
  for (int i = 0; same && i < axes; i++) {
    const int64_t wanted = lengths.begin()[i];
    same = wanted < 0 ? shape[i] > 0 : shape[i] == wanted;
  }
  if (!same) fail(name, "shape " + text(lengths.begin(), int(lengths.size())), text(shape, axes));
}

Tensor Context::input(int index, const char* name, char kind) const {
  Tensor tensor;
  tensor.name = name;
  const ort::Value* value = nullptr;
  check(api_, ort::GetInput::call(api_, context_, size_t(index), &value), name);
  if (!value) fail(name, "a tensor", "none");
  ort::Info* info = nullptr;
  check(api_, ort::GetTensorTypeAndShape::call(api_, value, &info), name);
  ort::ElementType found{};
  size_t axes = 0;
  ort::Status* status = ort::GetTensorElementType::call(api_, info, &found);
  if (!status) status = ort::GetDimensionsCount::call(api_, info, &axes);
  if (!status && axes <= Tensor::kMostAxes) status = ort::GetDimensions::call(api_, info, tensor.shape, axes);
  ort::ReleaseInfo::call(api_, info);
  check(api_, status, name);
  if (axes > Tensor::kMostAxes) fail(name, "at most 8 axes", std::to_string(axes));
  const ort::ElementType wanted = element_type(kind, type_, weights_);
  if (found != wanted) fail(name, "element type " + std::to_string(wanted), std::to_string(found));
  tensor.axes = int(axes);
  void* data = nullptr;
  check(api_, ort::GetTensorMutableData::call(api_, const_cast<ort::Value*>(value), &data), name);
  const size_t size = element_size(found);
  if (reinterpret_cast<uintptr_t>(data) % size) {
    fail(name, "data at a multiple of " + std::to_string(size) + " bytes", "other data");
  }
  tensor.data = data;
  return tensor;
}

void* Context::output(int index, std::initializer_list<int64_t> shape) const {
  ort::Value* value = nullptr;
  check(api_, ort::GetOutput::call(api_, context_, size_t(index), shape.begin(), shape.size(), &value), "output");
  if (!value) fail("output", "every output to be named", "one that is not");
  void* data = nullptr;
  check(api_, ort::GetTensorMutableData::call(api_, value, &data), "output");
  return data;
}

}  // namespace sparse
