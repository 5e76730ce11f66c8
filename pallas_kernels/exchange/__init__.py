"""GPU kernels of dispatch and combine, and of their gradients."""
