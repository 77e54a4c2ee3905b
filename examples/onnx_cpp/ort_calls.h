// Declare the functions of ONNX Runtime's C API that decode.cpp calls, at their slots in the table of functions. Python's
// wheel of ONNX Runtime has no headers. If onnxruntime_c_api.h is available, this file is not needed.
#pragma once
#include <cstddef>
#include <cstdint>

#define ORT_API_VERSION 17  // supported by every library from 1.17 on

enum OrtLoggingLevel { ORT_LOGGING_LEVEL_ERROR = 3 };
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
};
struct OrtStatus;
struct OrtEnv;
struct OrtSession;
struct OrtSessionOptions;
struct OrtRunOptions;
struct OrtValue;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtMemoryInfo;
struct OrtModelMetadata;
struct OrtAllocator;

struct OrtApi {
  void* slots_0[2];
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(OrtLoggingLevel, const char* name, OrtEnv**);
  void* slots_4[3];
  OrtStatus* (*CreateSession)(const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession**);
  void* slots_8[1];
  OrtStatus* (*Run)(OrtSession*, const OrtRunOptions*, const char* const* input_names, const OrtValue* const* inputs,
                    size_t inputs_count, const char* const* output_names, size_t outputs_count, OrtValue** outputs);
  OrtStatus* (*CreateSessionOptions)(OrtSessionOptions**);
  void* slots_11[19];
  OrtStatus* (*SessionGetInputCount)(const OrtSession*, size_t*);
  void* slots_31[2];
  OrtStatus* (*SessionGetInputTypeInfo)(const OrtSession*, size_t index, OrtTypeInfo**);
  void* slots_34[2];
  OrtStatus* (*SessionGetInputName)(const OrtSession*, size_t index, OrtAllocator*, char**);
  void* slots_37[11];
  OrtStatus* (*CreateTensorAsOrtValue)(OrtAllocator*, const int64_t* shape, size_t rank, ONNXTensorElementDataType,
                                       OrtValue**);
  OrtStatus* (*CreateTensorWithDataAsOrtValue)(const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* shape,
                                               size_t rank, ONNXTensorElementDataType, OrtValue**);
  void* slots_50[1];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void**);
  void* slots_52[3];
  OrtStatus* (*CastTypeInfoToTensorInfo)(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**);
  void* slots_56[4];
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, ONNXTensorElementDataType*);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t rank);
  void* slots_63[1];
  OrtStatus* (*GetTensorShapeElementCount)(const OrtTensorTypeAndShapeInfo*, size_t*);
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo**);
  void* slots_66[3];
  OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo**);
  void* slots_70[8];
  OrtStatus* (*GetAllocatorWithDefaultOptions)(OrtAllocator**);
  void* slots_79[17];
  void (*ReleaseValue)(OrtValue*);
  void* slots_97[14];
  OrtStatus* (*SessionGetModelMetadata)(const OrtSession*, OrtModelMetadata**);
  void* slots_112[4];
  OrtStatus* (*ModelMetadataLookupCustomMetadataMap)(const OrtModelMetadata*, OrtAllocator*, const char* key,
                                                     char** value);
  void* slots_117[111];
  OrtStatus* (*RegisterCustomOpsLibrary_V2)(OrtSessionOptions*, const char* path);
};
static_assert(sizeof(OrtApi) == 229 * sizeof(void*), "slots of the functions");

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};
extern "C" const OrtApiBase* OrtGetApiBase();
