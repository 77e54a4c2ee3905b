"""Run exported files: onnxruntime, onnxruntime-genai and the native kernels."""
