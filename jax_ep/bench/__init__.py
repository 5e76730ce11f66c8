"""The `bench` commands of `python -m jax_ep`."""
