"""``python -m mlx_sparse.cuda_ref.bench``: time of a decode step on an NVIDIA GPU, dense and sparse, in one run."""
