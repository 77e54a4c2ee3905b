"""Launch the kernels in metal/ on Apple GPUs. Functions have the same signatures as in the `ops` backend."""
