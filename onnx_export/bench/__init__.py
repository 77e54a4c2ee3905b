"""``mlx-sparse bench --onnx``: a decode step of the operators beside those of onnxruntime and torch."""
