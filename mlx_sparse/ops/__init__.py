"""The `ops` backend: every method in MLX array operations, on any device MLX runs on.

Arguments are checked in `mlx_sparse.api`; equation numbers refer to docs/spec. Scores, softmax, sums and accumulators
are float32 whatever the storage type.
"""
