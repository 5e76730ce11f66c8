"""Kernels in which some thread blocks exchange rows while others multiply them."""
