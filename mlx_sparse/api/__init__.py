"""Define the public attention functions for any array library (`functions`) and for MLX arrays (`mlx_functions`)."""
