"""The `metal` backend: the kernels of metal/ on Apple GPUs, with the signatures of the `ops` backend."""
