"""What runs exported files: onnxruntime, onnxruntime-genai, and our native kernels."""
