"""KV caches for mlx-lm with the auxiliary cache state of the sparse attention methods."""
