"""The `metal` backend: launches the kernels in metal/ on Apple GPUs, with the same signatures as the `ops` backend."""
