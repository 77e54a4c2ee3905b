"""Define the Triton kernels, which all methods share."""
