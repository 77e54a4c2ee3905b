"""Implement the `ops` backend: all methods as MLX array operations, for any MLX device.

`mlx_sparse.api` checks the arguments. Equation numbers such as (sparq.7) refer to docs/spec.
Scores, softmax and sums are float32 for every input dtype.
"""
