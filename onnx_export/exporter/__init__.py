"""Export an mlx-lm model to a folder for ONNX Runtime."""
