"""Benchmark sparse attention on MLX, ONNX Runtime and CUDA. core.py and command.py do not import mlx, torch or onnx."""
