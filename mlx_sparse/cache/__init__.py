"""Extend mlx-lm's KV caches with the auxiliary cache state of the sparse attention methods."""
