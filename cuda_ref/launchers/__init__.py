"""Launch the Triton kernels: compute grids, tiles and buffers, and define torch operators."""
