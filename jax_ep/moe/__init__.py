"""Implements the Mixture-of-Experts layer as pure functions, which both Flax layers call."""
