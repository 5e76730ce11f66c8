"""Kernels of dispatch and combine."""
