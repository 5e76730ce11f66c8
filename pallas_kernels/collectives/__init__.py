"""Kernels of the collectives."""
