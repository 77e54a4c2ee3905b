"""One benchmark for all engines. The core and the command need neither mlx, torch nor onnx."""
