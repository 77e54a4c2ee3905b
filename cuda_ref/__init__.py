"""Triton kernels for NVIDIA GPUs. None yet: this folder only reserves the place and the import name."""

if __name__ != "mlx_sparse.cuda_ref":  # an editable install puts the project root on sys.path
    raise ImportError("cuda_ref/ is installed as mlx_sparse.cuda_ref: run `pip install -e .`, then import that")
