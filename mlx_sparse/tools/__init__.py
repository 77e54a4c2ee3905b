"""Implement the ``mlx-sparse`` commands, such as evaluate, bench and try. The library itself imports none of them."""
