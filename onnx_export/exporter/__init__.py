"""Export a model that mlx-lm loads to a folder that ONNX Runtime runs."""
