"""Advise on the use of sparse attention for a model on this machine, behind ``mlx-sparse advise``."""
