"""The parameters of an MoE layer: names, shapes, logical axes, initializers and checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.runtime.jax_compat import register_for_export

Initializer = jax.nn.initializers.Initializer

# The logical axes of each parameter; "exp" is the one to map to the mesh's expert axis.
LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "gate": ("embed", None),
    "wi_0": ("exp", "embed", "mlp"),
    "wi_1": ("exp", "embed", "mlp"),
    "wo": ("exp", "mlp", "embed"),
    "shared_wi_0": ("embed", "mlp"),
    "shared_wi_1": ("embed", "mlp"),
    "shared_wo": ("mlp", "embed"),
}

WEIGHTS = tuple(name for name in LOGICAL_AXES if name != "gate")
ROUTED_WEIGHTS = ("wi_0", "wi_1", "wo")
SHARED_WEIGHTS = ("shared_wi_0", "shared_wi_1", "shared_wo")

default_kernel_init = jax.nn.initializers.lecun_normal()


class MoEParams(NamedTuple):
    """The parameters of a layer: E experts, H hidden, F expert hidden, S shared experts. A pytree.

    Attributes:
        gate: [H, E] router kernel.
        wi_0: [E, H, F], the projection that the activation is applied to.
        wi_1: [E, H, F], the projection that is multiplied with it.
        wo: [E, F, H], the projection back.
        bias: [E] selection bias, or None.
        shared_wi_0: [H, S * F], or None without shared experts, like the next two.
        shared_wi_1: [H, S * F].
        shared_wo: [S * F, H].
    """

    gate: jax.Array
    wi_0: jax.Array
    wi_1: jax.Array
    wo: jax.Array
    bias: jax.Array | None = None
    shared_wi_0: jax.Array | None = None
    shared_wi_1: jax.Array | None = None
    shared_wo: jax.Array | None = None


register_for_export(MoEParams)


def weight_shapes(
    num_experts: int, hidden: int, mlp_dim: int, num_shared_experts: int
) -> dict[str, tuple[int, ...]]:
    """Returns the global shape of each expert weight, by its name in `MoEParams`."""
    shapes: dict[str, tuple[int, ...]] = {
        "wi_0": (num_experts, hidden, mlp_dim),
        "wi_1": (num_experts, hidden, mlp_dim),
        "wo": (num_experts, mlp_dim, hidden),
    }
    shared_dim = num_shared_experts * mlp_dim
    if shared_dim:
        shapes |= {
            "shared_wi_0": (hidden, shared_dim),
            "shared_wi_1": (hidden, shared_dim),
            "shared_wo": (shared_dim, hidden),
        }
    return shapes


def per_expert(init: Initializer) -> Initializer:
    """Returns an initializer of [E, ...] that draws each expert's matrix with its own fans."""

    def init_experts(
        key: jax.Array, shape: Any, dtype: Any = None, out_sharding: Any = None
    ) -> jax.Array:
        if len(shape) == 2:
            return init(key, shape, dtype, out_sharding)
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype, out_sharding))(keys)

    return init_experts


def check_params(params: MoEParams, num_experts: int) -> None:
    """Raises ValueError or TypeError unless the parameters fit each other and `num_experts`.

    How many experts wi_0, wi_1 and wo hold is not checked here: it depends on the mesh.
    """
    checks.check_array("gate", params.gate, 2, jnp.floating, "[H, E]")
    hidden = params.gate.shape[0]
    if params.gate.shape[1] != num_experts:
        raise ValueError(
            f"gate must be [H, num_experts={num_experts}], but has shape {params.gate.shape}."
        )
    for name, shape in (("wi_0", "[E, H, F]"), ("wi_1", "[E, H, F]"), ("wo", "[E, F, H]")):
        checks.check_array(name, getattr(params, name), None, jnp.floating, shape)
    _check_shared(params, hidden)


def check_num_held(params: MoEParams, num_experts: int, allowed: set[int]) -> None:
    """Raises ValueError unless wi_0, wi_1 and wo hold one of the `allowed` numbers of experts."""
    for name in ROUTED_WEIGHTS:
        shape = getattr(params, name).shape
        if len(shape) != 3 or shape[0] not in allowed:
            raise ValueError(
                f"{name} must hold {' or '.join(map(str, sorted(allowed)))} experts "
                f"(num_experts={num_experts}), but has shape {shape}."
            )


def _check_shared(params: MoEParams, hidden: int) -> None:
    """Raises unless the three shared weights fit each other, or are all None."""
    given = {name: w for name in SHARED_WEIGHTS if (w := getattr(params, name)) is not None}
    if not given:
        return
    if len(given) < len(SHARED_WEIGHTS):
        raise ValueError(
            f"{', '.join(SHARED_WEIGHTS)} must be given together or be None, but only "
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} given."
        )
    for name, array in given.items():
        shape = "[S * F, H]" if name == "shared_wo" else "[H, S * F]"
        checks.check_array(name, array, 2, jnp.floating, shape)
    shared = given["shared_wi_0"].shape[1]
    for name, array in given.items():
        wanted = (shared, hidden) if name == "shared_wo" else (hidden, shared)
        if array.shape != wanted:
            raise ValueError(
                f"{name} must have shape {wanted} for H={hidden} and shared_wi_0 of shape "
                f"{given['shared_wi_0'].shape}, but has shape {array.shape}."
            )
