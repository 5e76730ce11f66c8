"""The Mixture-of-Experts layer as functions."""
