"""The commands `bench` and `model` of `python -m jax_ep`, which measure and predict times."""
