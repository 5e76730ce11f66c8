"""Accesses the machine and JAX: GPUs, the CUDA driver, symmetric memory, and JAX's internals."""
