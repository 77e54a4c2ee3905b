"""Public functions: generic over the array library (`functions`), and bound to MLX (`mlx_functions`)."""
