"""Implements the commands `bench` and `estimate` of `python -m jax_ep`."""
