"""Triton kernels, and nothing else: functions of tiles, written once for every method that needs them."""
