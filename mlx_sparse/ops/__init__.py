"""The `ops` backend: every method in MLX array operations, on any device of MLX.

Arguments are checked in `mlx_sparse.api`; equation numbers refer to docs/spec. Scores, softmax, sums and accumulators
are float32 for every storage type.
"""
