"""Grouped matmul, one matrix for each expert: start at `api`; each backend has its own module."""
