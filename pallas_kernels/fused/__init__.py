"""Kernels that communicate and multiply at the same time, in blocks of two kinds."""
