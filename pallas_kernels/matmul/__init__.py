"""Kernels of the grouped matmul."""
