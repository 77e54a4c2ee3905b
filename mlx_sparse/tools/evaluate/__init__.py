"""What a method costs in quality on a real model: tasks, runner and report, behind ``mlx-sparse eval``."""
