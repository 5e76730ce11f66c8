"""Pallas Mosaic GPU kernels for grouped matmuls, their gradients, and float8 quantization."""
