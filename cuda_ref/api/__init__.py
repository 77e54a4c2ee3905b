"""The public functions on torch tensors, with the arguments of mlx_sparse's."""
