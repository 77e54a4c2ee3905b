"""The demo: a real model, a real text, dense and sparse through mlx-lm's own command."""
