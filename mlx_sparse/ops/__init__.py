"""The `ops` backend: all methods in MLX array operations, on any MLX device.

`mlx_sparse.api` checks the arguments. Equation numbers such as (sparq.7) refer to docs/spec. Scores, softmax and sums
are float32 for every storage type.
"""
