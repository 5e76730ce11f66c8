"""The version of jax_ep, alone: what the library imports may ask for it."""

__version__ = "0.1.0"
