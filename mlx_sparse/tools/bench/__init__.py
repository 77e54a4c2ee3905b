"""One core for the benchmarks of all engines, and MLX's contenders. The core needs neither mlx, torch nor onnx."""
