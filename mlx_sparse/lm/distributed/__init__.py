"""Run a model that mlx-lm shards over several ranks of MLX's distributed runtime."""
