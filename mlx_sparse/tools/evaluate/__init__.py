"""Implement ``mlx-sparse eval``, which evaluates the quality of methods on a real model, and its report."""
