"""Implements grouped matmul: start at `api`; each backend has its own module."""
