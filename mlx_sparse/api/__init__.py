"""Public functions, written once for every array library (`functions`) and bound to MLX (`mlx_functions`)."""
