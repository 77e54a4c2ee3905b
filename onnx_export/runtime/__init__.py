"""Run exported models on onnxruntime or onnxruntime-genai, with or without the native kernels."""
