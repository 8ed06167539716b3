"""Kernels in Triton, one subject per module, and the functions that launch them."""
