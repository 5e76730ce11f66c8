"""The configuration of an MoE layer, whose fields both Flax layers take.

A new option is a field of `MoEConfig` here, or of `ExpertOptions` and with the same name here, and
what computes with it. An option that brings a parameter is declared in `jax_ep.moe.params`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jax_ep import checks
from jax_ep.exchange.api import Implementation
from jax_ep.exchange.routes import Overflow
from jax_ep.matmul.api import Implementation as MatmulImplementation
from jax_ep.moe import losses, routing
from jax_ep.moe.expert_mlp import Activation, Gating
from jax_ep.moe.options import (
    axes,
    check_options,
    documented,
    function_names,
    function_option,
    integer_or_zero,
    number_or_none,
    one_of,
    option,
    optional,
    options_of,
    same_option,
)
from jax_ep.moe.routed_experts import ExpertOptions, WeightsOn

Router = Callable[[jax.Array, jax.Array | None], routing.Routing]


def _check_mesh(name: str, mesh: Any) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(
            f"{name} must be a jax.sharding.Mesh, or None for the ambient one, but is "
            f"{checks.described(mesh)}."
        )


def _check_dtype(name: str, dtype: Any) -> None:
    check_compute_dtype(dtype, "; for float8 rows on the wire, set wire_dtype", name=name)
    _check_no_wider(name, dtype, "sums over a token's experts")


def _check_router_dtype(name: str, dtype: Any) -> None:
    check_compute_dtype(dtype, name=name)
    _check_no_wider(name, dtype, "logits")


def _check_no_wider(name: str, dtype: Any, computed: str) -> None:
    if jnp.dtype(dtype).itemsize > 4:
        raise TypeError(
            f"{name} must be jnp.float32 or narrower, since {computed} are computed in float32, "
            f"but is {dtype!r}."
        )


def check_compute_dtype(dtype: Any, hint: str = "", *, name: str = "dtype") -> None:
    """Raises TypeError unless matmuls can compute in `dtype`; `hint` goes into the message."""
    known = checks.floating(dtype)
    if known is None or known.itemsize < 2:
        raise TypeError(
            f"{name} must be a floating dtype of 16 bits or more, such as jnp.bfloat16, but is "
            f"{dtype!r}{hint}."
        )


@documented(ExpertOptions)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Everything about a layer but its parameters. Hashable, and can be pickled.

    Shared experts compute with `activation`, `gating` and `clamp` too.

    Attributes:
        num_experts: E, a multiple of the ranks along `expert_axis`.
        num_experts_per_token: K.
        score, choose_by, num_groups, groups_kept, group_score, normalize, normalize_epsilon, scale:
            see `jax_ep.top_k_routing`.
        router: None, or a router of your own in its place: a function of the tokens [T, H] and
            their logits [T, E] float32, of one rank, that returns a `jax_ep.Routing` of K choices;
            the logits are None where the layer has no gate. It is a static argument: what it
            learns must come through the logits, or as `topk_idx` and `topk_weights` of the call,
            with which it is not called. It is given no selection bias, and reads none of the fields
            above but by itself.
        router_dtype: the dtype that logits are computed in and rounded to, of 16 or 32 bits;
            None: `dtype`. Scores are float32 always.
        balance_convention: that of `MoEMetrics.load_balance_loss`: "switch", "transformers" or
            "deepseek_v3"; see `jax_ep.load_balance_loss`. For "transformers" probabilities and
            choices are those of the softmax of the logits, whatever the router makes of them. For
            "deepseek_v3" x is [..., sequence, H], and each sequence is balanced on its own.
        capacity_factor: None: a receive buffer that any routing fits in, so nothing is dropped.
            Or a number c above 0: a buffer of c times the rows that a rank receives on average,
            T * K, plus room for `expert_alignment`, rounded up to a multiple of 8; rows that do not
            fit are dropped and counted.
        overflow: which rows are dropped. "fair" drops rows of the experts of a rank that have most;
            "tail" drops rows of its last experts first. See `jax_ep.dispatch`.
        host_capacity_factor: None; or a number c above 0, for an expert axis that spans hosts: of
            its T tokens a rank sends at most c * T, rounded up, to each other host. Choices past
            it are dropped, and counted; see `host_capacity` of `jax_ep.dispatch`. On one host it
            changes nothing. For routers that keep a token to few hosts, such as 0.6 for 4 of 8.
        num_slots: None; or P, a multiple of the ranks, at least E: the ranks hold P copies of
            experts, and each call is given a `placement` that says which. E may then be any number.
        zero_experts, identity_experts, constant_experts: numbers of experts that cost nothing. The
            router chooses them like others; they return 0, the token, and a mix of the token and
            a trained vector (MoE++, LongCat-Flash). In this order their ids follow those of
            the E experts, and the gate, its biases and `expert_counts` have entries for them too.
            Nothing is sent for such a choice.
        free_expert_factor: of these experts' terms in the load-balance loss, above 0: MoE++'s tau.
            Below 1, tokens choose them more.
        expert_alignment: each expert's block of rows starts at a multiple of this.
        wire_dtype: None, or `jnp.float8_e4m3fn`: the dtype in which tokens cross the wire to the
            experts, H a multiple of 128; see `jax_ep.dispatch`. What comes back, and every
            gradient, stays in `dtype`.
        {ExpertOptions}
        dtype: the dtype of tokens, expert matmuls and output: floating, of 16 or 32 bits. None: the
            dtype that x and wi_0 promote to; of float64, logits and the sums over a token's experts
            are float32 still.
        expert_axis: the mesh axis, or tuple of axes, that the experts are spread over. The order of
            a tuple defines the order of the ranks and of the experts; in the caller's
            `jax.shard_map` it must be that of the specs: see `axis_name` of `jax_ep.dispatch`.
        batch_axes: the mesh axis or axes that the tokens are spread over, the expert axis among
            them. None: every axis of the mesh but `tensor_axis`; in the caller's `jax.shard_map`,
            the axes that x varies over, which must run the same layer.
        tensor_axis: None, or a mesh axis, or tuple of axes, that F is split over, of every expert
            and of the shared experts. Ranks along it hold the same tokens, or each its own where
            it is among `batch_axes`; see `jax_ep.moe_layer`. A mesh without it splits nothing.
        mesh: the mesh to run on where no ambient mesh is set.
        implementation: the implementation of dispatch and combine; see `jax_ep.dispatch`. "pallas"
            needs a mesh with `expert_axis`.
        matmul_implementation: the backend of the expert matmuls; see `jax_ep.expert_mlp`.
    """

    num_experts: int = dataclasses.field(metadata={"check": checks.check_integer})
    num_experts_per_token: int = dataclasses.field(metadata={"check": checks.check_integer})
    score: routing.Score = "softmax"
    choose_by: routing.ChooseBy = "score"
    num_groups: int = 1
    groups_kept: int = 1
    group_score: routing.GroupScore = "top2"
    normalize: bool = True
    normalize_epsilon: float = 0.0
    scale: float = 1.0
    router: Router | None = function_option(
        None,
        "a function of tokens [T, H] and logits [T, E] that returns a jax_ep.Routing, or None",
    )
    router_dtype: Any = option(jnp.float32, optional(_check_router_dtype))
    balance_convention: losses.Convention = option("switch", one_of(losses.Convention))
    capacity_factor: float | None = option(None, number_or_none(", or None to drop nothing"))
    overflow: Overflow = option("fair", one_of(Overflow))
    host_capacity_factor: float | None = option(
        None, number_or_none(", or None to send a host all that is meant for it")
    )
    num_slots: int | None = option(None, optional(checks.check_integer))
    zero_experts: int = option(0, integer_or_zero)
    identity_experts: int = option(0, integer_or_zero)
    constant_experts: int = option(0, integer_or_zero)
    free_expert_factor: float = option(1.0, checks.check_number)
    expert_alignment: int = option(1, checks.check_integer)
    wire_dtype: Any = None
    activation: Activation = same_option(ExpertOptions, "activation")
    gating: Gating | None = same_option(ExpertOptions, "gating")
    clamp: float | None = same_option(ExpertOptions, "clamp")
    weights_on: WeightsOn = same_option(ExpertOptions, "weights_on")
    dtype: Any = option(None, optional(_check_dtype))
    expert_axis: str | tuple[str, ...] = option("expert", axes)
    batch_axes: str | tuple[str, ...] | None = None
    tensor_axis: str | tuple[str, ...] | None = option(None, optional(axes))
    mesh: Mesh | None = option(None, optional(_check_mesh))
    implementation: Implementation = None
    matmul_implementation: MatmulImplementation = None

    def __post_init__(self) -> None:
        for name in ("expert_axis", "batch_axes", "tensor_axis"):
            if isinstance(axes := getattr(self, name), list):
                object.__setattr__(self, name, tuple(axes))  # a configuration is hashable

    @classmethod
    def of(cls, layer: Any) -> MoEConfig:
        """Makes the configuration from the attributes of these names of a layer."""
        return options_of(cls, layer)

    @property
    def num_free(self) -> int:
        """The number of experts that cost nothing: zero, identity and constant ones."""
        return self.zero_experts + self.identity_experts + self.constant_experts

    @property
    def num_choosable(self) -> int:
        """The number of experts that the router chooses among: E, and those that cost nothing."""
        return self.num_experts + self.num_free

    def expert_options(self) -> ExpertOptions:
        """Returns the options of the experts; called, they are the function between the matmuls."""
        return options_of(ExpertOptions, self)

    @property
    def num_held(self) -> int:
        """The number of experts that all ranks hold, copies counted: P, or E without slots."""
        return self.num_experts if self.num_slots is None else self.num_slots

    def split_axes(self) -> dict[str, tuple[str, ...]]:
        """Returns the axes that experts, and their columns, are split over, by the field's name.

        Raises TypeError or ValueError, naming the field, if they are no names, or are the same.
        """
        expert_axes = checks.as_axes(self.expert_axis, "expert_axis")
        tensor_axis = self.tensor_axis
        tensor_axes = () if tensor_axis is None else checks.as_axes(tensor_axis, "tensor_axis")
        if set(expert_axes) & set(tensor_axes):
            raise ValueError(
                f"tensor_axis must be another mesh axis than expert_axis {expert_axes}, but is "
                f"{tensor_axes}."
            )
        return {"expert_axis": expert_axes, "tensor_axis": tensor_axes}

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns the fields that hold a function."""
        fields = {name: getattr(self, name) for name in function_names(type(self))}
        return {name: function for name, function in fields.items() if function is not None}

    def __getstate__(self) -> dict[str, Any]:
        # pickle looks a function up by its name, and finds another object there for a jitted one.
        references = {name: _Reference.of(value) for name, value in self.functions().items()}
        return self.__dict__ | references

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({
            name: value.resolve() if isinstance(value, _Reference) else value
            for name, value in state.items()
        })  # fmt: skip


def check_config(config: MoEConfig) -> None:
    """Raises TypeError or ValueError, naming the field, for a value that no layer can have."""
    check_options(config)
    config.split_axes()
    routing.check_weighing(config.score, config.normalize, config.normalize_epsilon, config.scale)
    if config.router is None:
        routing.check_choosing(
            config.num_choosable,
            config.num_experts_per_token,
            config.choose_by,
            config.num_groups,
            config.groups_kept,
            config.group_score,
            k_name="num_experts_per_token",
        )
    if config.host_capacity_factor is not None and config.implementation in ("pallas", "xla"):
        raise ValueError(
            'host_capacity_factor is of the exchange between hosts, "two_level" or None, but '
            f"is {config.host_capacity_factor} and the implementation {config.implementation!r}."
        )
    if config.num_slots is not None and config.num_slots < config.num_experts:
        raise ValueError(
            f"num_slots must be at least num_experts={config.num_experts}, or None for one "
            f"slot for each expert, but is {config.num_slots}."
        )


@dataclasses.dataclass(frozen=True)
class _Reference:
    """The module and name of a function, which pickle stores in its place."""

    module: str
    name: str

    @classmethod
    def of(cls, function: Any) -> Any:
        """Returns a reference that resolves to `function`, or `function` where there is none."""
        name = getattr(function, "__qualname__", "")
        for module in ("jax.nn", "jax.numpy", getattr(function, "__module__", None)):
            reference = cls(module or "", name)
            if reference.resolve() is function:
                return reference
        return function

    def resolve(self) -> Any:
        try:
            return getattr(importlib.import_module(self.module), self.name, None)
        except (ImportError, ValueError):
            return None
