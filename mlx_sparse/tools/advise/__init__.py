"""Is sparse attention worth it for a model on this machine, and is it safe: behind ``mlx-sparse advise``."""
