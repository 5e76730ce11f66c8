"""jax_ep: expert parallelism for JAX. Dispatch, combine, and what a Mixture-of-Experts needs."""

from jax_ep.expert_parallel import Dispatched, Handle, combine, dispatch, dispatch_like

__version__ = "0.1.0"

__all__ = ["Dispatched", "Handle", "combine", "dispatch", "dispatch_like"]
