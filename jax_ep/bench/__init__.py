"""The commands `bench` and `estimate` of `python -m jax_ep`, which measure and predict times."""
