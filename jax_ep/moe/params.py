"""Defines the parameters of an MoE layer: names, shapes, logical axes, initializers and checks.

To add a parameter, add a field of `MoEParams`, a row of `PARAMETERS`, and the option in
`ParameterOptions` that enables it. The Flax layers then create, load and save it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.options import check_options, integer_or_zero, option, optional
from jax_ep.placement.weights import ROUTED_WEIGHTS
from jax_ep.runtime.jax_compat import register_for_export

Initializer = jax.nn.initializers.Initializer

default_kernel_init = jax.nn.initializers.lecun_normal()


def _check_initializer(name: str, init: Any) -> None:
    if not callable(init):
        raise TypeError(
            f"{name} must be an initializer, a function of key, shape and dtype, but is "
            f"{checks.described(init)}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterOptions:
    """Options that decide which parameters a Flax layer has, and how they are initialized.

    Attributes:
        num_shared_experts: the number of shared experts, MLPs of hidden size F that process every
            token.
        shared_dim: S, the hidden size of all shared experts together. None means
            num_shared_experts * F.
        use_shared_gate: whether to multiply the shared experts' output by sigmoid(x @ shared_gate)
            (Qwen2-MoE).
        gated: whether routed and shared experts multiply the activation by x @ wi_1. If False, as
            in Nemotron-H, the layer has no wi_1 and no shared_wi_1.
        use_mlp_bias: whether the routed experts' matmuls have biases (GPT-OSS).
        selection_bias: whether there is a DeepSeek-V3 selection bias, which changes only the choice
            of experts.
        use_gate_bias: whether to add a trained bias to the router's logits, which changes both the
            choice of experts and their weights (GPT-OSS).
        use_expert_scale: whether to multiply the weight of each choice by a trained factor of the
            chosen expert (Gemma 4).
        param_dtype: the dtype of the parameters.
        kernel_init: the initializer of one expert's matrix, called for each expert with the shape
            [H, F] or [F, H].
        gate_init: the initializer of the router's kernel, gate.kernel. None means that there is no
            gate. Each call must then be given `topk_idx` and `topk_weights`, unless the option
            `router` is a function that needs no logits.
    """

    num_shared_experts: int = option(0, integer_or_zero)
    shared_dim: int | None = option(None, optional(integer_or_zero))
    use_shared_gate: bool = option(False, checks.check_bool)
    gated: bool = option(True, checks.check_bool)
    use_mlp_bias: bool = option(False, checks.check_bool)
    selection_bias: bool = option(False, checks.check_bool)
    use_gate_bias: bool = option(False, checks.check_bool)
    use_expert_scale: bool = option(False, checks.check_bool)
    param_dtype: Any = option(jnp.float32, checks.as_dtype_of_arrays)
    kernel_init: Initializer = option(default_kernel_init, _check_initializer)
    gate_init: Initializer | None = option(default_kernel_init, optional(_check_initializer))

    @classmethod
    def of_params(cls, params: MoEParams) -> ParameterOptions:
        """Returns the options with which a Flax layer has exactly the parameters in `params`.

        Initializers and `param_dtype` keep their defaults.
        """
        # Maps each option to the names of the parameters that a layer has only with this option.
        names: dict[str, list[str]] = {}
        for name, parameter in PARAMETERS.items():
            for needed in parameter.needs:
                names.setdefault(needed, []).append(name)
        switches: dict[str, Any] = {
            needed: any(getattr(params, name) is not None for name in brought)
            for needed, brought in names.items()
        }
        shared_dim = None if params.shared_wo is None else params.shared_wo.shape[0]
        return cls(shared_dim=shared_dim, **switches)


def check_parameter_options(options: ParameterOptions, router_dim: int | None = None) -> None:
    """Raises TypeError or ValueError, naming the option, for values that no layer supports.

    `router_dim` is the layer's argument of this name: the size of the router's input, or None.
    """
    check_options(options)
    shared_dim, number = options.shared_dim, options.num_shared_experts
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


class Parameter(NamedTuple):
    """The shape, sharding and initializer of one parameter of the layer.

    Attributes:
        dims: the shape, with one character per dimension. E is the number of experts that all ranks
            hold, R the number of experts that the router chooses among, and C the number of
            constant experts. H is the hidden size of a token, F the hidden size of an expert, and S
            the hidden size of all shared experts together. A digit stands for itself.
        logical_axes: the logical axis of each dimension. Map "exp" to the mesh's expert axis.
        init: the initializer: "kernel" and "gate" are the options `kernel_init` and `gate_init` of
            the layer; "zeros" and "ones" fill the parameter.
        needs: the names of the options that must be True for a Flax layer to have the parameter. A
            parameter with a dimension of size 0 is absent, too.
    """

    dims: str
    logical_axes: tuple[str | None, ...]
    init: Literal["gate", "kernel", "zeros", "ones"] = "kernel"
    needs: tuple[str, ...] = ()


# Maps the name of each field of `MoEParams` to its shape, sharding and initializer. The Flax layers
# keep "gate" and "bias" in a submodule called `gate`.
PARAMETERS = {
    "gate": Parameter("HR", ("embed", None), "gate"),
    "bias": Parameter("R", (None,), "zeros", ("selection_bias",)),
    "gate_bias": Parameter("R", (None,), "zeros", ("use_gate_bias",)),
    "expert_scale": Parameter("R", (None,), "ones", ("use_expert_scale",)),
    "wi_0": Parameter("EHF", ("exp", "embed", "mlp")),
    "wi_1": Parameter("EHF", ("exp", "embed", "mlp"), needs=("gated",)),
    "wo": Parameter("EFH", ("exp", "mlp", "embed")),
    "wi_0_bias": Parameter("EF", ("exp", "mlp"), "zeros", ("use_mlp_bias",)),
    "wi_1_bias": Parameter("EF", ("exp", "mlp"), "zeros", ("use_mlp_bias", "gated")),
    "wo_bias": Parameter("EH", ("exp", "embed"), "zeros", ("use_mlp_bias",)),
    "shared_wi_0": Parameter("HS", ("embed", "mlp")),
    "shared_wi_1": Parameter("HS", ("embed", "mlp"), needs=("gated",)),
    "shared_wo": Parameter("SH", ("mlp", "embed")),
    "shared_gate": Parameter("H1", ("embed", None), needs=("use_shared_gate",)),
    "constant_value": Parameter("CH", (None, "embed"), "zeros"),
    "constant_gate": Parameter("CH2", (None, "embed", None), "zeros"),
}
LOGICAL_AXES = {name: parameter.logical_axes for name, parameter in PARAMETERS.items()}
WEIGHTS = tuple(name for name in PARAMETERS if name not in ("gate", "bias"))
SHARED_WEIGHTS = ("shared_wi_0", "shared_wi_1", "shared_wo")
# Matrices of routed and shared experts. Only these parameters may be stored as `QuantizedArray`s.
MATRICES = ("wi_0", "wi_1", "wo", *SHARED_WEIGHTS)

# Maps a parameter to the parameter that it needs: if the latter is None, the former must be None.
_NEEDS = {"wi_1_bias": "wi_1", "shared_gate": "shared_wo"}


class MoEParams(NamedTuple):
    """The parameters of a layer; a pytree.

    E is the number of routed experts. R is the number of experts that the router chooses among: the
    E experts, and the free experts (zero, identity and constant experts). C is the number of
    constant experts. H is the hidden size of a token, F the hidden size of an expert, and S the
    hidden size of all shared experts together. The three matrices of the routed experts may each
    be a `jax_ep.QuantizedArray` of the given shape, which has no gradient, if all three are. The
    same holds for those of the shared experts.

    Attributes:
        gate: [H, R] router kernel; None if the caller gives the routing of every call.
        wi_0: [E, H, F]; the activation is applied to the product x @ wi_0.
        wi_1: [E, H, F]; the result of the activation is multiplied by x @ wi_1. None for experts
            that leave this out.
        wo: [E, F, H], the projection from the hidden size F back to H.
        bias: [R] selection bias, or None: DeepSeek-V3's `e_score_correction_bias`, which changes
            only the choice of experts. (The bias of a router that is a linear layer, such as
            GPT-OSS's, is `gate_bias`.)
        shared_wi_0: [H, S], or None without shared experts. S need not be a multiple of F.
        shared_wi_1: [H, S]; None without shared experts, and if wi_1 is None.
        shared_wo: [S, H], or None without shared experts.
        gate_bias: [R] bias of the logits, or None.
        expert_scale: [R] factor on the weight of each choice of an expert (Gemma 4), or None.
        wi_0_bias: [E, F] bias of x @ wi_0, or None.
        wi_1_bias: [E, F] bias of x @ wi_1, or None.
        wo_bias: [E, H] bias of an expert's output, or None.
        shared_gate: [H, 1], or None: the shared experts' output is multiplied by
            sigmoid(x @ shared_gate) (Qwen2-MoE, Qwen3-Next).
        constant_value: [C, H], the vector of each constant expert, or None; see
            `MoEConfig.constant_experts`.
        constant_gate: [C, H, 2], or None: softmax(x @ constant_gate) gives the two factors with
            which a constant expert mixes the token x and its vector.
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
        """Makes the parameters from the given arrays; parameters that are not given are None."""
        absent: dict[str, Any] = dict.fromkeys(cls._fields)
        return cls(**(absent | given))


register_for_export(MoEParams)


def weight_shapes(
    config: MoEConfig, options: ParameterOptions, hidden: int, mlp_dim: int
) -> dict[str, tuple[int, ...]]:
    """Maps the names of a layer's parameters, except `gate` and `bias`, to their global shapes.

    Parameters that the layer does not have are left out. `hidden` is H, and `mlp_dim` is F.

    Raises:
        ValueError, TypeError: `hidden` or `mlp_dim` is not an integer of at least 1.
    """
    checks.check_sizes(hidden=hidden, mlp_dim=mlp_dim)
    sizes = {
        "E": config.num_held,
        "R": config.num_choosable,
        "H": hidden,
        "F": mlp_dim,
        "S": options.num_shared_experts * mlp_dim,
        "C": config.constant_experts,
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


def table() -> str:
    """Renders the table of parameters, shapes and logical axes for the Flax layers' docstrings."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    for name, parameter in PARAMETERS.items():
        # The table leaves out the selection bias, which is state in the Flax layers.
        if name == "bias":
            continue
        shown = "gate.kernel" if name == "gate" else name
        dims = f"[{', '.join(parameter.dims)}]"
        axes = ", ".join("None" if axis is None else f'"{axis}"' for axis in parameter.logical_axes)
        axes = f"({axes})" if len(parameter.dims) > 1 else f"({axes},)"
        needs = [f"`{needed}`" for needed in parameter.needs]
        needs += ["shared experts"] if "S" in parameter.dims else []
        needs += ["`constant_experts`"] if "C" in parameter.dims else []
        yield f"{shown:15}{dims:11}{axes}{', with ' if needs else ''}{' and '.join(needs)}"


def initializer(name: str, config: MoEConfig, options: ParameterOptions) -> Initializer:
    """Returns the initializer of the parameter `name`, for any parameter except the gate.

    `options.kernel_init` draws the matrices of experts, expert by expert. If the layer has P slots
    for copies of its E experts, the initializer draws E experts and copies them to the slots.
    """
    kind = PARAMETERS[name].init
    if kind == "kernel":
        init = per_expert(options.kernel_init)
    else:
        init = getattr(jax.nn.initializers, kind)
    if config.num_slots is None or name not in ROUTED_WEIGHTS:
        return init
    return in_order(init, config.num_experts)


def in_order(init: Initializer, num_experts: int) -> Initializer:
    """Returns an initializer of a parameter [P, ...] of P slots, which hold copies of experts.

    It draws `num_experts` experts by `init`. Slot s gets the weights of expert s modulo
    `num_experts`.
    """

    def init_slots(
        key: jax.Array, shape: Any, dtype: Any = None, out_sharding: Any = None
    ) -> jax.Array:
        experts = init(key, (num_experts, *shape[1:]), dtype)
        return jnp.take(experts, jnp.arange(shape[0]) % num_experts, axis=0)

    return init_slots


def per_expert(init: Initializer) -> Initializer:
    """Returns an initializer of a parameter [E, ...] that calls `init` once for each expert.

    A parameter with two dimensions, such as a matrix of the shared experts, is a single matrix,
    which `init` draws in one call.
    """

    def init_experts(
        key: jax.Array, shape: Any, dtype: Any = None, out_sharding: Any = None
    ) -> jax.Array:
        # `out_sharding` is passed on only if given: `init` may not have this argument.
        options = () if out_sharding is None else (out_sharding,)
        if len(shape) == 2:
            return init(key, shape, dtype, *options)
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype, *options))(keys)

    return init_experts


def check_params(params: MoEParams, num_experts: int, num_constant: int = 0) -> None:
    """Raises ValueError or TypeError unless the parameters fit each other and `num_experts`.

    `num_experts` is the number of experts that the router chooses among, including the free experts
    (zero, identity and constant experts). `num_constant` is the number of constant experts. The
    number of experts in wi_0, wi_1 and wo is not checked here, since it depends on the mesh.
    """
    if params.gate is not None:
        checks.check_array("gate", params.gate, 2, jnp.floating, "[H, R]")
        if params.gate.shape[1] != num_experts:
            raise ValueError(
                f"gate must have shape [H, {num_experts}], one column for each expert that the "
                f"router chooses among, free experts included, but has shape {params.gate.shape}."
            )
    for name in (name for name, parameter in PARAMETERS.items() if parameter.dims == "R"):
        if (array := getattr(params, name)) is not None:
            checks.check_array(name, array, None, jnp.floating, "[R]")
            if array.shape != (num_experts,):
                raise ValueError(
                    f"{name} must have one value for each expert that the router chooses among, "
                    f"free experts included, shape ({num_experts},), but has shape {array.shape}."
                )
    for name in ROUTED_WEIGHTS:
        if (array := getattr(params, name)) is not None or name in ("wi_0", "wo"):
            _check_array(name, array)
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
    _check_shared(params)
    _check_shapes(params, num_experts, num_constant)


def check_num_held(params: MoEParams, num_experts: int, allowed: set[int]) -> None:
    """Raises ValueError unless the routed experts' weights hold an allowed number of experts.

    `allowed` is the set of allowed sizes of the leading dimension of these weights. The error
    message quotes `num_experts`.
    """
    for name in ROUTED_WEIGHTS:
        if (array := getattr(params, name)) is None:
            continue
        shape = array.shape
        if shape[0] not in allowed:
            raise ValueError(
                f"{name} must hold {' or '.join(map(str, sorted(allowed)))} experts along its "
                f"first axis (num_experts={num_experts}, or num_slots if set), but has shape "
                f"{shape}."
            )


def _check_shared(params: MoEParams) -> None:
    """Raises ValueError if some matrices of the shared experts are given and others are None."""
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


def _check_shapes(params: MoEParams, num_experts: int, num_constant: int) -> None:
    """Raises ValueError for a parameter whose shape differs from its entry in `PARAMETERS`.

    `num_experts` is the number of experts that the router chooses among, free experts included.
    `num_constant` is the number of constant experts. Skips the gate, whose number of rows depends
    on the call's `router_x`, and the routed experts' weights, whose number of experts depends on
    the mesh.
    """
    arrays = {
        name: array
        for name in PARAMETERS
        if name != "gate" and name not in ROUTED_WEIGHTS
        if (array := getattr(params, name)) is not None
    }
    for name, array in arrays.items():
        _check_array(name, array)
    _, hidden, mlp_dim = params.wi_0.shape
    sizes = {"R": num_experts, "H": hidden, "F": mlp_dim, "C": num_constant}
    if params.shared_wi_0 is not None:
        sizes["S"] = params.shared_wi_0.shape[1]
    for name, array in arrays.items():
        parameter = PARAMETERS[name]
        wanted = _shape(parameter, sizes)
        if array.shape != wanted:
            shared = f" and S={sizes['S']}" if "S" in parameter.dims else ""
            raise ValueError(
                f"{name} must have shape {wanted} for H={hidden}{shared}, but has shape "
                f"{array.shape}."
            )


def _check_array(name: str, array: Any) -> None:
    """Raises TypeError or ValueError unless a parameter has its number of dimensions."""
    dims = PARAMETERS[name].dims
    checks.check_array(
        name,
        array,
        len(dims),
        jnp.floating,
        f"[{', '.join(dims)}]",
        may_be_quantized=name in MATRICES,
    )
