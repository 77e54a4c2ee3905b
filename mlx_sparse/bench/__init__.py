"""`mlx-sparse bench`: what a decode step takes, what it moves, and a model of what it would take on Apple's chips."""
