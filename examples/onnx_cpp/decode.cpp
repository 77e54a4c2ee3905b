// decode MODEL.onnx LIBRARY COUNT < TOKENS
//
// Prints up to COUNT greedy tokens after a prompt of token ids. LIBRARY has the native kernels. With "-", ONNX Runtime
// runs the function bodies of the operators, which are in the file.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if __has_include("onnxruntime_c_api.h")
#include "onnxruntime_c_api.h"
#else
#include "ort_calls.h"
#endif

static const OrtApi* ort;

static void check(OrtStatus* status) {
  if (!status) return;
  std::fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
  std::exit(1);
}

static size_t width(ONNXTensorElementDataType type) {  // bytes of one element; float16 caches and int16 buckets have two
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return 4;
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 ? 1 : 2;
}

// Returns the name of the output that is the input `past` of the next call.
static std::string successor(std::string past) {
  if (past.rfind("past_key_values.", 0) == 0) return past.replace(0, 15, "present");
  return past.replace(0, 4, "present");
}

struct Model {
  OrtSession* session;
  OrtMemoryInfo* memory;
  std::vector<std::string> inputs{"input_ids", "attention_mask"}, outputs{"logits"};
  std::vector<OrtValue*> caches;
  std::vector<int64_t> mask;  // one 1 for each token so far
  std::vector<int64_t> ends;  // tokens that end a text

  Model(const char* path, const char* library) {
    OrtEnv* env;
    OrtSessionOptions* options;
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "decode", &env));
    check(ort->CreateSessionOptions(&options));
    if (std::strcmp(library, "-")) check(ort->RegisterCustomOpsLibrary_V2(options, library));
    check(ort->CreateSession(env, path, options, &session));
    check(ort->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &memory));

    OrtAllocator* allocator;
    size_t count;
    check(ort->GetAllocatorWithDefaultOptions(&allocator));
    check(ort->SessionGetInputCount(session, &count));
    for (size_t i = 0; i < count; i++) {
      char* name;
      check(ort->SessionGetInputName(session, i, allocator, &name));
      if (std::strncmp(name, "past_", 5) == 0) add_cache(name, i, allocator);
    }

    OrtModelMetadata* about;
    char* list;  // "[2]"
    check(ort->SessionGetModelMetadata(session, &about));
    check(ort->ModelMetadataLookupCustomMetadataMap(about, allocator, "mlx_sparse.eos_token_ids", &list));
    while ((list += std::strcspn(list, "0123456789")) && *list) ends.push_back(std::strtoll(list, &list, 10));
  }

  // Adds a cache of zeros with its full length.
  void add_cache(const char* name, size_t index, OrtAllocator* allocator) {
    OrtTypeInfo* type;
    const OrtTensorTypeAndShapeInfo* info;
    ONNXTensorElementDataType element;
    size_t rank, size = 1;
    check(ort->SessionGetInputTypeInfo(session, index, &type));
    check(ort->CastTypeInfoToTensorInfo(type, &info));
    check(ort->GetTensorElementType(info, &element));
    check(ort->GetDimensionsCount(info, &rank));
    std::vector<int64_t> shape(rank);
    check(ort->GetDimensions(info, shape.data(), rank));
    shape[0] = 1;  // the batch size is not fixed in the file
    for (int64_t length : shape) size *= length;
    OrtValue* cache;
    void* data;
    check(ort->CreateTensorAsOrtValue(allocator, shape.data(), rank, element, &cache));
    check(ort->GetTensorMutableData(cache, &data));
    std::memset(data, 0, size * width(element));
    inputs.push_back(name);
    outputs.push_back(successor(name));
    caches.push_back(cache);
  }

  OrtValue* numbers(std::vector<int64_t>& row) {
    const int64_t shape[] = {1, int64_t(row.size())};
    OrtValue* value;
    check(ort->CreateTensorWithDataAsOrtValue(memory, row.data(), row.size() * sizeof(int64_t), shape, 2,
                                              ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &value));
    return value;
  }

  // Appends tokens and returns the most likely next token.
  int64_t step(std::vector<int64_t> tokens) {
    mask.resize(mask.size() + tokens.size(), 1);
    std::vector<OrtValue*> in{numbers(tokens), numbers(mask)}, out{nullptr};  // ONNX Runtime allocates the logits
    in.insert(in.end(), caches.begin(), caches.end());
    out.insert(out.end(), caches.begin(), caches.end());  // the same buffers, so the caches grow in place
    std::vector<const char*> names, results;
    for (auto& name : inputs) names.push_back(name.c_str());
    for (auto& name : outputs) results.push_back(name.c_str());
    check(ort->Run(session, nullptr, names.data(), in.data(), in.size(), results.data(), out.size(), out.data()));

    OrtTensorTypeAndShapeInfo* info;
    size_t vocabulary;
    void* data;
    check(ort->GetTensorTypeAndShape(out[0], &info));
    check(ort->GetTensorShapeElementCount(info, &vocabulary));
    check(ort->GetTensorMutableData(out[0], &data));
    const float* logits = static_cast<const float*>(data);
    size_t best = 0;
    for (size_t i = 1; i < vocabulary; i++)
      if (logits[i] > logits[best]) best = i;
    for (OrtValue* value : {in[0], in[1], out[0]}) ort->ReleaseValue(value);
    return int64_t(best);
  }
};

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: decode MODEL.onnx LIBRARY|- COUNT < TOKENS\n");
    return 2;
  }
  ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (!ort) {
    std::fprintf(stderr, "onnxruntime %s is older than its header\n", OrtGetApiBase()->GetVersionString());
    return 1;
  }
  std::vector<int64_t> prompt;
  for (long long token; std::scanf("%lld", &token) == 1;) prompt.push_back(token);
  if (prompt.empty()) return 2;

  Model model(argv[1], argv[2]);
  const int64_t last = prompt.back();
  prompt.pop_back();
  const size_t chunk = 512;  // prefill tokens per call, to limit memory; a chunk of one token would be a sparse step
  for (size_t at = 0; at < prompt.size();) {
    size_t end = at + chunk + 1 >= prompt.size() ? prompt.size() : at + chunk;
    model.step({prompt.begin() + at, prompt.begin() + end});
    at = end;
  }
  int64_t token = last;
  for (int i = 0; i < std::atoi(argv[3]); i++) {
    token = model.step({token});
    if (std::find(model.ends.begin(), model.ends.end(), token) != model.ends.end()) break;
    std::printf(i ? " %lld" : "%lld", static_cast<long long>(token));
    std::fflush(stdout);
  }
  std::printf("\n");
}
