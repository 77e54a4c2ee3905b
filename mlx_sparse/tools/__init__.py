"""What people use around the library; `mlx_sparse.cli` and the engines' benchmarks import from here, nothing else."""
