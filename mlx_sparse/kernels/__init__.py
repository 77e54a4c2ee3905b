"""Launch the kernels in metal/ on Apple GPUs. The functions have the same signatures as in the `ops` backend."""
