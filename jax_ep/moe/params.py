"""Defines the parameters of an MoE layer: names, shapes, logical axes, initializers and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.moe.config import MoEConfig
from jax_ep.placement.weights import ADAPTERS, ROUTED_WEIGHTS
from jax_ep.runtime.jax_compat import register_for_export

Initializer = jax.nn.initializers.Initializer
# Maps a random key, a global shape and a dtype to a parameter.
WeightInitializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

default_kernel_init = jax.nn.initializers.lecun_normal()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterOptions:
    """Options that decide which parameters a Flax layer has, and how they are initialized.

    Attributes:
        num_shared_experts: the number of shared experts, MLPs of hidden size F that process every
            token.
        shared_dim: S, the hidden size of all shared experts together; None: num_shared_experts * F.
        use_shared_gate: whether there is a gate of the shared experts' output (Qwen2-MoE).
        gated: whether experts multiply the activation by x @ wi_1. If False, as in Nemotron-H, the
            layer has no wi_1 and no shared_wi_1.
        use_mlp_bias: whether the routed experts' matmuls have biases (GPT-OSS).
        selection_bias: whether there is a DeepSeek-V3 selection bias.
        use_gate_bias: whether to add a trained bias to the router's logits (GPT-OSS).
        use_expert_scale: whether to multiply the weight of each choice by a trained factor of the
            expert (Gemma 4).
        lora_rank: r, the inner size of low-rank adapters of the experts' matrices, which then get
            no gradient; 0: no adapters. See the page "Training".
        param_dtype: the dtype of the parameters.
        kernel_init: the initializer of one expert's matrix, of the shape [H, F] or [F, H].
        gate_init: the initializer of the router's kernel, gate.kernel. None means no gate: each
            call must be given `topk_idx` and `topk_weights`, or `router` must need no logits.
    """

    num_shared_experts: int = 0
    shared_dim: int | None = None
    use_shared_gate: bool = False
    gated: bool = True
    use_mlp_bias: bool = False
    selection_bias: bool = False
    use_gate_bias: bool = False
    use_expert_scale: bool = False
    lora_rank: int = 0
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = default_kernel_init
    gate_init: Initializer | None = default_kernel_init

    @classmethod
    def of_layer(cls, layer: Any) -> ParameterOptions:
        return cls(**{f.name: getattr(layer, f.name) for f in dataclasses.fields(cls)})

    @classmethod
    def of_params(cls, params: MoEParams) -> ParameterOptions:
        """Returns the options with which a Flax layer has `params`, among which must be a gate."""
        # An option is True if there is any parameter that a layer has only with this option.
        switches: dict[str, Any] = {}
        for name, parameter in PARAMETERS.items():
            is_given = getattr(params, name) is not None
            for option in parameter.needs:
                switches[option] = switches.get(option, False) or is_given
        shared_dim = None if params.shared_wo is None else params.shared_wo.shape[0]
        adapter = params.wi_0_lora_a
        lora_rank = 0 if adapter is None else adapter.shape[2]
        return cls(shared_dim=shared_dim, lora_rank=lora_rank, **switches)


def check_parameter_options(options: ParameterOptions, router_dim: int | None = None) -> None:
    """Raises for options that do not fit; `router_dim` is the width of `router_x`, or None."""
    shared_dim, number = options.shared_dim, options.num_shared_experts
    checks.check_integer("num_shared_experts", number, least=0)
    checks.check_integer("lora_rank", options.lora_rank, least=0)
    if shared_dim is not None:
        checks.check_integer("shared_dim", shared_dim, least=0)
    for field in dataclasses.fields(options):
        if isinstance(field.default, bool):
            checks.check_bool(field.name, getattr(options, field.name))
    checks.as_dtype_of_arrays("param_dtype", options.param_dtype)
    wanted = "an initializer, a function of key, shape and dtype"
    checks.check_function("kernel_init", options.kernel_init, wanted)
    if options.gate_init is not None:
        checks.check_function("gate_init", options.gate_init, f"{wanted}, or None")
    if shared_dim is not None and number:
        raise ValueError(
            "shared_dim, the width of all shared experts, must be None where num_shared_experts is "
            f"{number}, but is {shared_dim}."
        )
    if options.use_shared_gate and not (shared_dim or number):
        raise ValueError(
            "use_shared_gate must be False without shared experts: set num_shared_experts or "
            "shared_dim."
        )
    if options.gate_init is not None:
        return
    for name, value, nothing in (
        ("selection_bias", options.selection_bias, False),
        ("router_dim", router_dim, None),
    ):
        if value != nothing:
            raise ValueError(
                f"{name} must be {nothing} where gate_init is None, since the layer then has no "
                f"gate for it, but is {value}."
            )


# The logical axis of each dimension in `Parameter.dims`; the other dimensions have none.
_LOGICAL_AXIS = {"E": "exp", "H": "embed", "F": "mlp", "S": "mlp"}


class Parameter(NamedTuple):
    """The shape, initializer and options of one parameter of the layer."""

    dims: str  # one character per dimension, as in `MoEParams`, but L for r; a digit is a size
    init: Literal["gate", "kernel", "zeros", "ones"] = "kernel"
    # The options that must be True for a Flax layer to have it. It has no parameter of size 0.
    needs: tuple[str, ...] = ()

    @property
    def logical_axes(self) -> tuple[str | None, ...]:
        return tuple(_LOGICAL_AXIS.get(dim) for dim in self.dims)


# Maps the name of each field of `MoEParams` to its shape and initializer. The Flax layers keep
# "gate" and "bias" in a submodule called `gate`.
PARAMETERS = {
    "gate": Parameter("HR", "gate"),
    "bias": Parameter("R", "zeros", ("selection_bias",)),
    "gate_bias": Parameter("R", "zeros", ("use_gate_bias",)),
    "expert_scale": Parameter("R", "ones", ("use_expert_scale",)),
    "wi_0": Parameter("EHF"),
    "wi_1": Parameter("EHF", needs=("gated",)),
    "wo": Parameter("EFH"),
    "wi_0_bias": Parameter("EF", "zeros", ("use_mlp_bias",)),
    "wi_1_bias": Parameter("EF", "zeros", ("use_mlp_bias", "gated")),
    "wo_bias": Parameter("EH", "zeros", ("use_mlp_bias",)),
    "wi_0_lora_a": Parameter("EHL"),
    "wi_0_lora_b": Parameter("ELF", "zeros"),
    "wi_1_lora_a": Parameter("EHL", needs=("gated",)),
    "wi_1_lora_b": Parameter("ELF", "zeros", ("gated",)),
    "wo_lora_a": Parameter("EFL"),
    "wo_lora_b": Parameter("ELH", "zeros"),
    "shared_wi_0": Parameter("HS"),
    "shared_wi_1": Parameter("HS", needs=("gated",)),
    "shared_wo": Parameter("SH"),
    "shared_gate": Parameter("H1", needs=("use_shared_gate",)),
    "constant_value": Parameter("CH", "zeros"),
    "constant_gate": Parameter("CH2", "zeros"),
}
LOGICAL_AXES = {name: parameter.logical_axes for name, parameter in PARAMETERS.items()}
WEIGHTS = tuple(name for name in PARAMETERS if name not in ("gate", "bias"))
SHARED_WEIGHTS = ("shared_wi_0", "shared_wi_1", "shared_wo")
# Matrices of routed and shared experts. Only these parameters may be stored as `QuantizedArray`s.
MATRICES = ("wi_0", "wi_1", "wo", *SHARED_WEIGHTS)

# Pairs of a parameter and one that it needs: if the second is None, the first must be None.
_NEEDS = (
    ("wi_1_bias", "wi_1"),
    ("wi_1_lora_a", "wi_1"),
    ("shared_gate", "shared_wo"),
    *zip(ADAPTERS[::2], ADAPTERS[1::2], strict=True),
    *zip(ADAPTERS[1::2], ADAPTERS[::2], strict=True),
)


class MoEParams(NamedTuple):
    """The parameters of a layer; a pytree.

    E is the number of routed experts. R is the number of experts that the router chooses among: the
    E experts, and the free experts (zero, identity and constant experts). C is the number of
    constant experts. H is the hidden size of a token, F the hidden size of an expert, and S the
    hidden size of all shared experts together. The three matrices of the routed experts may each be
    a `jax_ep.QuantizedArray` of the given shape, which has no gradient, if all three are. The same
    holds for the matrices of the shared experts.

    In the Flax layers, E has the logical axis "exp", H "embed", F and S "mlp", and other dimensions
    none. In parentheses is the option with which a Flax layer has the parameter.

    Attributes:
        gate: [H, R] router kernel; None if the caller gives the routing of every call.
        wi_0: [E, H, F]; the activation is applied to the product x @ wi_0.
        wi_1: [E, H, F]; the result of the activation is multiplied by x @ wi_1. None for experts
            without `gated`.
        wo: [E, F, H], the projection from the hidden size F back to H.
        bias: [R] selection bias, or None (`selection_bias`): DeepSeek-V3's
            `e_score_correction_bias`, which changes only the choice of experts.
        shared_wi_0: [H, S], or None without shared experts. S need not be a multiple of F.
        shared_wi_1: [H, S]; None without shared experts, and if wi_1 is None.
        shared_wo: [S, H], or None without shared experts.
        gate_bias: [R] bias of the logits (GPT-OSS), or None (`use_gate_bias`).
        expert_scale: [R] factor on the weight of each choice of an expert (Gemma 4), or None
            (`use_expert_scale`).
        wi_0_bias: [E, F] bias of x @ wi_0, or None (`use_mlp_bias`).
        wi_1_bias: [E, F] bias of x @ wi_1, or None.
        wo_bias: [E, H] bias of an expert's output, or None.
        shared_gate: [H, 1], or None (`use_shared_gate`): the shared experts' output is multiplied
            by sigmoid(x @ shared_gate) (Qwen2-MoE, Qwen3-Next).
        constant_value: [C, H], the vector of each constant expert, or None.
        constant_gate: [C, H, 2], or None: gives a constant expert's factors of token and vector.
        wi_0_lora_a, ..., wo_lora_b: the low-rank adapters, or None (`lora_rank`); of a matrix
            [E, M, N] they are [E, M, r] and [E, r, N].
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
    wi_0_lora_a: jax.Array | None = None
    wi_0_lora_b: jax.Array | None = None
    wi_1_lora_a: jax.Array | None = None
    wi_1_lora_b: jax.Array | None = None
    wo_lora_a: jax.Array | None = None
    wo_lora_b: jax.Array | None = None

    @classmethod
    def of(cls, **given: Any) -> MoEParams:
        absent: dict[str, Any] = dict.fromkeys(cls._fields)
        return cls(**(absent | given))


register_for_export(MoEParams)


def weight_shapes(
    config: MoEConfig, options: ParameterOptions, hidden: int, mlp_dim: int
) -> dict[str, tuple[int, ...]]:
    """Maps a layer's parameters, except `gate` and `bias`, to their global shapes."""
    checks.check_integer("hidden", hidden)
    checks.check_integer("mlp_dim", mlp_dim)
    sizes = {
        "E": config.num_held,
        "R": config.num_choosable,
        "H": hidden,
        "F": mlp_dim,
        "S": options.num_shared_experts * mlp_dim,
        "C": config.constant_experts,
        "L": options.lora_rank,
    }
    if options.shared_dim is not None:
        sizes["S"] = options.shared_dim
    shapes = {name: _shape(PARAMETERS[name], sizes) for name in WEIGHTS}
    return {
        name: shape
        for name, shape in shapes.items()
        if 0 not in shape and all(getattr(options, needed) for needed in PARAMETERS[name].needs)
    }


def _shape(parameter: Parameter, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(dim) if dim.isdigit() else sizes[dim] for dim in parameter.dims)


def initializer(name: str, config: MoEConfig, options: ParameterOptions) -> WeightInitializer:
    """Returns the initializer of any parameter but `gate`; in slots, it repeats the experts."""
    init = per_expert(options.kernel_init)
    if (kind := PARAMETERS[name].init) != "kernel":
        init = getattr(jax.nn.initializers, kind)
    if config.num_slots is None or name not in ROUTED_WEIGHTS:
        return init

    def init_slots(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        # Of P slots [P, ...], slot s gets expert s modulo E.
        experts = init(key, (config.num_experts, *shape[1:]), dtype)
        return jnp.take(experts, jnp.arange(shape[0]) % config.num_experts, axis=0)

    return init_slots


def per_expert(init: Initializer) -> WeightInitializer:
    """Returns an initializer of [E, H, F] that calls `init` for each expert, or once for [H, F]."""

    def init_experts(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        if len(shape) == 2:
            return init(key, shape, dtype)
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype))(keys)

    return init_experts


def check_params(params: MoEParams, num_experts: int, num_constant: int = 0) -> None:
    """Raises ValueError or TypeError unless the parameters fit each other and the experts.

    `num_experts` includes free experts, `num_constant` of them constant.
    """
    for name, array in params._asdict().items():
        if array is not None or name in ("wi_0", "wo"):
            dims = PARAMETERS[name].dims
            checks.check_array(
                name,
                array,
                len(dims),
                jnp.floating,
                f"[{', '.join(dims)}]",
                may_be_empty=name not in ROUTED_WEIGHTS,
                may_be_quantized=name in MATRICES,
            )
    if params.gate is not None and params.gate.shape[1] != num_experts:
        raise ValueError(
            f"gate must have shape [H, {num_experts}], one column for each expert that the "
            f"router chooses among, free experts included, but has shape {params.gate.shape}."
        )
    for name in ("constant_value", "constant_gate"):
        if (getattr(params, name) is None) != (num_constant == 0):
            hidden = params.wi_0.shape[1]
            shape = _shape(PARAMETERS[name], {"C": num_constant, "H": hidden})
            given = "None" if num_constant else "given"
            raise ValueError(
                f"{name} must have shape {shape} for constant_experts={num_constant}, and be None "
                f"for 0, but is {given}."
            )
    for name, other in _NEEDS:
        if getattr(params, name) is not None and getattr(params, other) is None:
            raise ValueError(f"{name} must be None where {other} is None.")
    _check_shared(params)
    _check_shapes(params, num_experts, num_constant)


def _check_shared(params: MoEParams) -> None:
    given = [name for name in SHARED_WEIGHTS if getattr(params, name) is not None]
    if not given:
        return
    needed = list(SHARED_WEIGHTS)
    without = ""
    if params.wi_1 is None:
        needed.remove("shared_wi_1")
        without = ", without shared_wi_1 where wi_1 is None"
    if given != needed:
        raise ValueError(
            f"{', '.join(needed)} must be given together or be None{without}, but only "
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} given."
        )


def _check_shapes(params: MoEParams, num_experts: int, num_constant: int) -> None:
    # The gate's rows depend on the call's `router_x`.
    arrays = {
        name: array
        for name in PARAMETERS
        if name != "gate" and (array := getattr(params, name)) is not None
    }
    _, hidden, mlp_dim = params.wi_0.shape
    sizes = {"R": num_experts, "H": hidden, "F": mlp_dim, "C": num_constant}
    if params.shared_wi_0 is not None:
        sizes["S"] = params.shared_wi_0.shape[1]
    for name, array in arrays.items():
        parameter = PARAMETERS[name]
        if name.endswith("_lora_a"):
            sizes["L"] = array.shape[2]  # also of the B of this matrix, which comes next
        # The number of experts that wi_0, wi_1 and wo must hold depends on the mesh.
        wanted = _shape(parameter, sizes | {"E": array.shape[0]})
        named = ", ".join(f"{dim}={sizes[dim]}" for dim in parameter.dims if dim in sizes)
        checks.check_shape(name, array, wanted, f"shape {wanted} for {named}")
