"""Benchmark MLX, ONNX Runtime and CUDA. The core and the command import neither mlx, torch nor onnx."""
