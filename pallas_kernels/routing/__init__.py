"""GPU kernels of the router."""
