"""Define the Triton kernels of all methods."""
