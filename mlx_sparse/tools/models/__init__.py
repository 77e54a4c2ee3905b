"""Which of mlx-lm's families are served, and how much of each: found by running tiny models of them."""
