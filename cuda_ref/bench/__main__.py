"""Runs the benchmark, without mlx."""

import sys

from .command import program

sys.exit(program())
