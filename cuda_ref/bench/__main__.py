"""``python -m mlx_sparse.cuda_ref.bench step | prompt``: `mlx-sparse bench --engine cuda`, without mlx."""

import sys

from mlx_sparse.tools.bench.command import program

sys.exit(program("cuda", "python -m mlx_sparse.cuda_ref.bench"))
