"""The parameters of an MoE layer: names, shapes, logical axes, initializers and checks."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.placement.weights import ROUTED_WEIGHTS
from jax_ep.runtime.jax_compat import register_for_export

Initializer = jax.nn.initializers.Initializer

default_kernel_init = jax.nn.initializers.lecun_normal()


class Parameter(NamedTuple):
    """A parameter of the layer: its shape, one letter per dimension, and its initializer.

    E experts, H hidden, F hidden of one expert, S hidden of the shared experts together.
    """

    dims: str
    logical_axes: tuple[str | None, ...]  # "exp" is the one to map to the mesh's expert axis
    init: Literal["gate", "kernel", "zeros", "ones"] = "kernel"


# The parameters, by their names in `MoEParams`; all but the gate have them in the Flax layers too.
PARAMETERS = {
    "gate": Parameter("HE", ("embed", None), "gate"),
    "gate_bias": Parameter("E", (None,), "zeros"),
    "expert_scale": Parameter("E", (None,), "ones"),
    "wi_0": Parameter("EHF", ("exp", "embed", "mlp")),
    "wi_1": Parameter("EHF", ("exp", "embed", "mlp")),
    "wo": Parameter("EFH", ("exp", "mlp", "embed")),
    "wi_0_bias": Parameter("EF", ("exp", "mlp"), "zeros"),
    "wi_1_bias": Parameter("EF", ("exp", "mlp"), "zeros"),
    "wo_bias": Parameter("EH", ("exp", "embed"), "zeros"),
    "shared_wi_0": Parameter("HS", ("embed", "mlp")),
    "shared_wi_1": Parameter("HS", ("embed", "mlp")),
    "shared_wo": Parameter("SH", ("mlp", "embed")),
    "shared_gate": Parameter("H1", ("embed", None)),
    "constant_value": Parameter("CH", (None, "embed"), "zeros"),
    "constant_gate": Parameter("CH2", (None, "embed", None), "zeros"),
}
LOGICAL_AXES = {name: parameter.logical_axes for name, parameter in PARAMETERS.items()}
WEIGHTS = tuple(name for name in PARAMETERS if name != "gate")
SHARED_WEIGHTS = ("shared_wi_0", "shared_wi_1", "shared_wo")

# The attributes of the Flax layers that say which parameters there are; see `weight_shapes`.
PARTS = (
    "num_shared_experts",
    "shared_dim",
    "gated",
    "use_gate_bias",
    "use_expert_scale",
    "use_mlp_bias",
    "use_shared_gate",
)
# Parameters that must be None where another one is None.
_NEEDS = {"wi_1_bias": "wi_1", "shared_gate": "shared_wo"}


class MoEParams(NamedTuple):
    """The parameters of a layer: E experts, H hidden, F expert hidden, S shared hidden. A pytree.

    Attributes:
        gate: [H, E] router kernel; None where the caller gives the routing of every call.
        wi_0: [E, H, F], the projection that the activation is applied to.
        wi_1: [E, H, F], the projection that is multiplied with it; None: experts without a gate.
        wo: [E, F, H], the projection back.
        bias: [E] selection bias, or None: DeepSeek-V3's `e_score_correction_bias`, which steers the
            choice of experts and nothing else. The bias of a router that is a linear layer with
            one, as GPT-OSS's, is `gate_bias`.
        shared_wi_0: [H, S], or None without shared experts. S is the width of all of these
            together, and need not be a multiple of F.
        shared_wi_1: [H, S]; None without shared experts, and where wi_1 is.
        shared_wo: [S, H], or None without shared experts.
        gate_bias: [E] bias of the logits, or None.
        expert_scale: [E] factor on the weight of each choice of an expert (Gemma 4), or None.
        wi_0_bias: [E, F] bias of x wi_0, or None.
        wi_1_bias: [E, F] bias of x wi_1, or None.
        wo_bias: [E, H] bias of the output of an expert, or None.
        shared_gate: [H, 1], or None: the shared experts' output is multiplied by
            sigmoid(x shared_gate) (Qwen2-MoE, Qwen3-Next).
        constant_value: [C, H] the vector of each constant expert, or None; see
            `MoEConfig.constant_experts`.
        constant_gate: [C, H, 2] for each constant expert: the mix of token and vector is the
            softmax of x constant_gate. Or None.
    """

    gate: jax.Array | None
    wi_0: jax.Array
    wi_1: jax.Array | None
    wo: jax.Array
    bias: jax.Array | None = None
    shared_wi_0: jax.Array | None = None
    shared_wi_1: jax.Array | None = None
    shared_wo: jax.Array | None = None
    gate_bias: jax.Array | None = None
    expert_scale: jax.Array | None = None
    wi_0_bias: jax.Array | None = None
    wi_1_bias: jax.Array | None = None
    wo_bias: jax.Array | None = None
    shared_gate: jax.Array | None = None
    constant_value: jax.Array | None = None
    constant_gate: jax.Array | None = None

    @classmethod
    def of(cls, **given: Any) -> MoEParams:
        """Makes the parameters from the given arrays; the others are None."""
        absent: dict[str, Any] = dict.fromkeys(cls._fields)
        return cls(**(absent | given))


register_for_export(MoEParams)


def weight_shapes(
    num_experts: int,
    hidden: int,
    mlp_dim: int,
    num_shared_experts: int = 0,
    *,
    shared_dim: int | None = None,
    gated: bool = True,
    use_gate_bias: bool = False,
    use_expert_scale: bool = False,
    use_mlp_bias: bool = False,
    use_shared_gate: bool = False,
    num_slots: int | None = None,
    num_free: int = 0,
    num_constant: int = 0,
) -> dict[str, tuple[int, ...]]:
    """Returns the global shape of each parameter but the gate, by its name in `MoEParams`.

    Args:
        num_experts, hidden, mlp_dim: E, H and F.
        num_shared_experts: shared experts of F each.
        shared_dim: the width of all shared experts together, in place of num_shared_experts * F.
        gated: experts have a wi_1.
        use_gate_bias, use_expert_scale, use_mlp_bias, use_shared_gate: there is a `gate_bias`, an
            `expert_scale`, biases of the routed experts, a `shared_gate`.
        num_slots: the experts that routed weights hold, copies counted, where they are not E.
        num_free: experts that cost nothing, of which the router's parameters have entries too.
        num_constant: C, those of them that give a constant.

    Raises:
        ValueError: a size is out of range, the shared experts' width is given twice, or their gate
            without them.
        TypeError: a size is no integer, or a flag no bool.
    """
    checks.check_sizes(num_experts=num_experts, hidden=hidden, mlp_dim=mlp_dim)
    checks.check_integer("num_shared_experts", num_shared_experts, least=0)
    flags = dict(
        gated=gated,
        use_gate_bias=use_gate_bias,
        use_expert_scale=use_expert_scale,
        use_mlp_bias=use_mlp_bias,
        use_shared_gate=use_shared_gate,
    )
    for name, flag in flags.items():
        checks.check_bool(name, flag)
    if shared_dim is None:
        shared_dim = num_shared_experts * mlp_dim
    elif num_shared_experts:
        raise ValueError(
            "shared_dim, the width of all shared experts, must be None where num_shared_experts is "
            f"{num_shared_experts}, but is {shared_dim}."
        )
    checks.check_integer("shared_dim", shared_dim, least=0)
    if use_shared_gate and not shared_dim:
        raise ValueError(
            "use_shared_gate must be False without shared experts: set num_shared_experts or "
            "shared_dim."
        )
    sizes = {"E": num_experts + num_free, "H": hidden, "F": mlp_dim, "S": shared_dim}
    sizes |= {"C": num_constant, "1": 1, "2": 2}
    held = sizes | {"E": num_slots or num_experts}
    present = {
        "gate_bias": use_gate_bias,
        "expert_scale": use_expert_scale,
        "wi_1": gated,
        "wi_0_bias": use_mlp_bias,
        "wi_1_bias": use_mlp_bias and gated,
        "wo_bias": use_mlp_bias,
        "shared_wi_0": shared_dim > 0,
        "shared_wi_1": shared_dim > 0 and gated,
        "shared_wo": shared_dim > 0,
        "shared_gate": use_shared_gate,
        "constant_value": num_constant > 0,
        "constant_gate": num_constant > 0,
    }
    return {
        name: tuple((held if name in ROUTED_WEIGHTS else sizes)[d] for d in PARAMETERS[name].dims)
        for name in WEIGHTS
        if present.get(name, True)
    }


def check_without_gate(*, selection_bias: bool, router_dim: int | None = None) -> None:
    """Raises ValueError for an argument of a layer's gate; a layer calls it where it has none."""
    for name, value, nothing in (
        ("selection_bias", selection_bias, False),
        ("router_dim", router_dim, None),
    ):
        if value != nothing:
            raise ValueError(
                f"{name} must be {nothing} where gate_init is None, since it is of the gate that "
                f"the layer then lacks, but is {value}."
            )


def initializer(
    name: str, kernel_init: Initializer, num_experts: int, num_slots: int | None
) -> Initializer:
    """Returns the initializer of a parameter but the gate; matrices are drawn by `kernel_init`."""
    if not callable(kernel_init):
        raise TypeError(
            "kernel_init must be an initializer, a function of key, shape and dtype, but is "
            f"{checks.described(kernel_init)}."
        )
    kind = PARAMETERS[name].init
    init = per_expert(kernel_init) if kind == "kernel" else getattr(jax.nn.initializers, kind)
    return init if num_slots is None or name not in ROUTED_WEIGHTS else in_order(init, num_experts)


def in_order(init: Initializer, num_experts: int) -> Initializer:
    """Returns an initializer of [P, ...] that draws E experts, placed as `Placement.in_order`."""

    def init_slots(
        key: jax.Array, shape: Any, dtype: Any = None, out_sharding: Any = None
    ) -> jax.Array:
        experts = init(key, (num_experts, *shape[1:]), dtype)
        return jnp.take(experts, jnp.arange(shape[0]) % num_experts, axis=0)

    return init_slots


def per_expert(init: Initializer) -> Initializer:
    """Returns an initializer of [E, ...] that draws each expert's matrix with its own fans."""

    def init_experts(
        key: jax.Array, shape: Any, dtype: Any = None, out_sharding: Any = None
    ) -> jax.Array:
        options = () if out_sharding is None else (out_sharding,)  # a function of three will do
        if len(shape) == 2:
            return init(key, shape, dtype, *options)
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype, *options))(keys)

    return init_experts


def check_params(params: MoEParams, num_experts: int, num_constant: int = 0) -> None:
    """Raises ValueError or TypeError unless the parameters fit each other and `num_experts`.

    `num_experts` counts those that cost nothing, of which `num_constant` give a constant.
    How many experts wi_0, wi_1 and wo hold is not checked here: it depends on the mesh.
    """
    if params.gate is not None:
        checks.check_array("gate", params.gate, 2, jnp.floating, "[H, E]")
        if params.gate.shape[1] != num_experts:
            raise ValueError(
                f"gate must be [H, num_experts={num_experts}], but has shape {params.gate.shape}."
            )
    for name in ("bias", "gate_bias", "expert_scale"):
        if (array := getattr(params, name)) is not None:
            checks.check_array(name, array, None, jnp.floating, "[E]")
            if array.shape != (num_experts,):
                raise ValueError(
                    f"{name} must have one value per expert, shape ({num_experts},), but has shape "
                    f"{array.shape}."
                )
    for name in ROUTED_WEIGHTS:
        if (array := getattr(params, name)) is not None or name in ("wi_0", "wo"):
            dims = PARAMETERS[name].dims
            checks.check_array(name, array, len(dims), jnp.floating, f"[{', '.join(dims)}]")
    hidden = params.wi_0.shape[1]
    wanted = {"constant_value": (num_constant, hidden), "constant_gate": (num_constant, hidden, 2)}
    for name, shape in wanted.items():
        if ((array := getattr(params, name)) is None) != (num_constant == 0) or (
            array is not None and array.shape != shape
        ):
            raise ValueError(
                f"{name} must have shape {shape} for constant_experts={num_constant}, and be None "
                f"for 0, but is {'None' if array is None else f'of shape {array.shape}'}."
            )
    for name, other in _NEEDS.items():
        if getattr(params, name) is not None and getattr(params, other) is None:
            raise ValueError(f"{name} must be None where {other} is None.")
    _check_shared(params, hidden=hidden)


def check_num_held(params: MoEParams, num_experts: int, allowed: set[int]) -> None:
    """Raises ValueError unless experts' weights hold one of the `allowed` numbers of experts."""
    for name in ROUTED_WEIGHTS:
        if (array := getattr(params, name)) is None:
            continue
        shape = array.shape
        if shape[0] not in allowed:
            raise ValueError(
                f"{name} must hold {' or '.join(map(str, sorted(allowed)))} experts "
                f"(num_experts={num_experts}), but has shape {shape}."
            )


def _check_shared(params: MoEParams, hidden: int) -> None:
    """Raises unless the shared weights fit each other, or are all None."""
    given = {name: w for name in SHARED_WEIGHTS if (w := getattr(params, name)) is not None}
    if not given:
        return
    names = [name for name in SHARED_WEIGHTS if params.wi_1 is not None or name != "shared_wi_1"]
    if set(given) != set(names):
        without = "" if params.wi_1 is not None else ", without shared_wi_1 where wi_1 is None"
        raise ValueError(
            f"{', '.join(names)} must be given together or be None{without}, but only "
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} given."
        )
    if params.shared_gate is not None:
        given["shared_gate"] = params.shared_gate
    for name, array in given.items():
        dims = PARAMETERS[name].dims
        checks.check_array(name, array, 2, jnp.floating, f"[{', '.join(dims)}]")
    sizes = {"H": hidden, "S": given["shared_wi_0"].shape[1], "1": 1}
    for name, array in given.items():
        wanted = tuple(sizes[dim] for dim in PARAMETERS[name].dims)
        if array.shape != wanted:
            raise ValueError(
                f"{name} must have shape {wanted} for H={hidden} and shared_wi_0 of shape "
                f"{given['shared_wi_0'].shape}, but has shape {array.shape}."
            )
