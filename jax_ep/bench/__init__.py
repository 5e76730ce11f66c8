"""Implements the commands `bench` and `estimate` of `python -m jax_ep`.

`bench` measures times on this machine. `estimate` predicts the least time of a dispatch between
hosts.
"""
