"""Evaluate the quality of methods on a real model: tasks, runner and report, behind ``mlx-sparse eval``."""
