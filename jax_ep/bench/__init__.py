"""Implements the commands `bench` (measures times) and `estimate` of `python -m jax_ep`.

`estimate` predicts the time of an exchange between hosts.
"""
