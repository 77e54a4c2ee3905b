"""Implement ``mlx-sparse eval`` and ``mlx-sparse report``: measure the quality of methods on a real model."""
