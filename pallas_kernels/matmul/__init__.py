"""GPU kernels of the grouped matmul."""
