// The part of ONNX Runtime's C ABI that this library uses, declared here so that the build needs no ONNX Runtime
// headers. The function table grows only at its end, so slot numbers are stable. The library requests version 17, which
// ONNX Runtime 1.17 and newer provide.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kApiVersion = 17;

struct Status;
struct Value;
struct Info;  // element type and shape of a tensor
struct KernelInfo;
struct KernelContext;
struct ShapeContext;
struct SessionOptions;
struct Domain;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int { kFloat = 1, kUInt8 = 2, kInt16 = 5, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBFloat16 = 16 };

// OrtApi is a struct of function pointers.
struct Api {
  void* slots[275];
};

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// OrtCustomOp of version 17. The runtime does not read callbacks of later versions.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  ElementType (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  ElementType (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*KernelComputeV2)(void*, KernelContext*);
  Status* (*InferOutputShape)(const CustomOp*, ShapeContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  void* later[4];
};
static_assert(sizeof(CustomOp) == 26 * sizeof(void*), "the layout of OrtCustomOp");

// Calls slot `index` of the table.
template <int index, class Result, class... Parameters>
struct Slot {
  static Result call(const Api* api, Parameters... arguments) {
    return reinterpret_cast<Result (*)(Parameters...)>(api->slots[index])(arguments...);
  }
};

using CreateStatus = Slot<0, Status*, ErrorCode, const char*>;
using CreateCustomOpDomain = Slot<26, Status*, const char*, Domain**>;
using DomainAdd = Slot<27, Status*, Domain*, const CustomOp*>;
using AddCustomOpDomain = Slot<28, Status*, SessionOptions*, Domain*>;
using GetTensorMutableData = Slot<51, Status*, Value*, void**>;
using GetTensorElementType = Slot<60, Status*, const Info*, ElementType*>;
using GetDimensionsCount = Slot<61, Status*, const Info*, size_t*>;
using GetDimensions = Slot<62, Status*, const Info*, int64_t*, size_t>;
using GetSymbolicDimensions = Slot<63, Status*, const Info*, const char**, size_t>;
using GetTensorTypeAndShape = Slot<65, Status*, const Value*, Info**>;
using GetAttributeFloat = Slot<85, Status*, const KernelInfo*, const char*, float*>;
using GetAttributeInt = Slot<86, Status*, const KernelInfo*, const char*, int64_t*>;
using GetInput = Slot<90, Status*, const KernelContext*, size_t, const Value**>;
using GetOutput = Slot<91, Status*, KernelContext*, size_t, const int64_t*, size_t, Value**>;
using ReleaseStatus = Slot<93, void, Status*>;
using ReleaseInfo = Slot<99, void, Info*>;
using GetInputTypeShape = Slot<268, Status*, const ShapeContext*, size_t, Info**>;
using SetOutputTypeShape = Slot<270, Status*, const ShapeContext*, size_t, const Info*>;
using ParallelFor = Slot<274, Status*, const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*>;

}  // namespace ort
