"""Measure the quality of methods on a real model, for ``mlx-sparse eval``."""
