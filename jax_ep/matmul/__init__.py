"""Grouped matmul: one matrix for each expert."""
