"""What launches the Triton kernels: grids, tiles and buffers, and the operators of torch around them."""
