"""Grouped matmul, one matrix for each expert: `api`, and one module a backend."""
