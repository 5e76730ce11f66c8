"""The version of jax_ep, in a module without imports, so that any module can import it."""

__version__ = "0.1.0"
