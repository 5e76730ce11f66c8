"""The machine and JAX: GPUs, their driver, symmetric memory, and JAX's internals."""
