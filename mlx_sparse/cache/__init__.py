"""KV caches for mlx-lm, and what methods keep beside them."""
