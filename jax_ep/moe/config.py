"""Defines `MoEConfig`, the options of an MoE layer; both Flax layers take them as arguments.

To add an option of the whole layer, declare a field of `MoEConfig`. To add an option of the router
or of the experts, declare a field of `RoutingOptions` or `ExpertOptions`, and repeat it in
`MoEConfig` with `same_option`. An option that only decides whether a layer has some parameter is no
field of `MoEConfig`: declare it in `jax_ep.moe.params.ParameterOptions`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jax_ep import checks
from jax_ep.exchange.api import Implementation
from jax_ep.exchange.routes import Overflow
from jax_ep.matmul.primitives import Implementation as MatmulImplementation
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
from jax_ep.moe.routing import RoutingOptions

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
    """Raises TypeError unless `dtype` is a floating dtype of 16 bits or more, as matmuls need.

    The message uses `name` as the argument's name, and ends with `hint`.
    """
    known = checks.floating(dtype)
    if known is None or known.itemsize < 2:
        raise TypeError(
            f"{name} must be a floating dtype of 16 bits or more, such as jnp.bfloat16, but is "
            f"{dtype!r}{hint}."
        )


def _check_fsdp_axes(name: str, value: Any) -> None:
    # `MoEConfig.__post_init__` has converted a mapping to the sorted tuple of its items, so `value`
    # should be a tuple of pairs.
    if not isinstance(value, tuple) or any(
        not isinstance(item, tuple) or len(item) != 2 for item in value
    ):
        raise TypeError(
            f"{name} must be None or map logical axes to mesh axes, such as "
            f'{{"embed": "fsdp"}}, but is {checks.described(value)}.'
        )
    for logical, named in value:
        if logical not in ("exp", "embed", "mlp"):
            raise ValueError(f'{name} must map "exp", "embed" or "mlp", but maps {logical!r}.')
        checks.as_axes(named, f"{name}[{logical!r}]")


@documented(RoutingOptions, ExpertOptions)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The options of an MoE layer, apart from its parameters; hashable, and can be pickled.

    The router is `jax_ep.top_k_routing`, unless `router` is given. Shared experts, which process
    every token, use `activation`, `gating` and `clamp` too. Among the options are the fields of
    `RoutingOptions`, from `score` on, and the fields of `ExpertOptions`, from `activation` on.

    Attributes:
        num_experts: E, the number of routed experts, a multiple of the ranks along `expert_axis`.
        num_experts_per_token: K, the number of experts that each token chooses.
        {RoutingOptions}
        router: None, or your own router: a function of one rank's tokens [T, H] and their logits
            [T, E] float32 that returns a `jax_ep.Routing` of K choices. The logits are None if the
            layer has no gate. The function is a static argument, so trained values must reach it
            through the logits. It is not called if the layer's call gets `topk_idx` and
            `topk_weights`. It gets no selection bias. It must read the routing options, such as
            `scale`, itself if it needs them.
        router_dtype: the dtype that logits are computed in and rounded to, of 16 or 32 bits. None
            means `dtype`. Scores are always float32.
        balance_convention: the definition of `MoEMetrics.load_balance_loss`: "switch",
            "transformers" or "deepseek_v3"; see `jax_ep.load_balance_loss`. "transformers" takes
            the softmax of the logits and its top-k, whatever the router chooses. "deepseek_v3"
            balances each sequence separately, and needs x of shape [..., sequence, H].
        capacity_factor: None gives each rank a receive buffer that fits any routing, so nothing is
            dropped. A number c above 0 gives a buffer of c times the rows that a rank receives on
            average, T * K, plus room for `expert_alignment`, rounded up to a multiple of 8. Rows
            that do not fit are dropped and counted.
        overflow: selects the rows that a full rank drops. "fair" drops rows of those of its experts
            that have the most rows; "tail" drops rows of its last experts first. See
            `jax_ep.dispatch`.
        host_capacity_factor: None, or a number c above 0: where the expert axis spans hosts, a rank
            sends at most c * T (rounded up) of its T tokens to each other host. Choices of further
            tokens are dropped and counted; see `host_capacity` of `jax_ep.dispatch`. It suits
            routers that limit a token to few hosts, such as 0.6 for 4 of 8 hosts.
        num_slots: None, or P, which is at least E and a multiple of N, the number of ranks. Each of
            the P slots holds the weights of one expert, so experts may have several copies, and
            each rank holds P / N slots. Each call is given a `placement`, which says which expert
            each slot holds. E need not be a multiple of N then.
        zero_experts, identity_experts, constant_experts: the numbers of free experts, which have
            almost no cost. They return 0, the token, or a mix of the token and a trained vector
            (MoE++, LongCat-Flash). The router chooses them like other experts. Their ids follow the
            E experts' ids, in this order, and the gate, its biases and `expert_counts` have entries
            for them. No token is sent to another rank for them.
        free_expert_factor: the factor, above 0, of the free experts' terms in the load-balance loss
            (MoE++'s tau). Below 1, tokens choose free experts more.
        record_choices: whether the metrics include `MoEMetrics.topk_idx`, the choices of all
            tokens, which a later call takes as `topk_idx`.
        token_chunks: the number c of chunks of consecutive tokens in which a rank dispatches,
            computes and combines, one after the other. Buffers then have 1 / c of the rows, and the
            backward pass dispatches each chunk and computes its products with wi_0 and wi_1 again.
            Outputs and gradients are the same up to rounding (with `matmul_dtype`, up to float8
            rounding, since different rows share a scale). Losses and counts do not change, since
            all tokens are routed at once. A chunk has ceil(T / c) of a rank's T tokens, and the
            last one is padded. Both capacity factors limit each chunk by itself.
        expert_alignment: a number of rows; each expert's block of received rows starts at a
            multiple of it.
        wire_dtype: None, or `jnp.float8_e4m3fn`, which needs an H that is a multiple of 128: the
            dtype in which tokens are sent to the experts; see `jax_ep.dispatch`. Outputs are sent
            in `dtype`. None means `dtype`, with one exception: with `matmul_dtype`, and unless
            weights_on is "input", it means float8, since the experts quantize the tokens to the
            same numbers anyway.
        {ExpertOptions}
        dtype: the dtype of tokens, expert matmuls and output: floating, of 16 or 32 bits. None
            means the dtype that x and wi_0 promote to. If they promote to float64, the logits and
            the sums over a token's experts are still float32.
        expert_axis: the mesh axis, or tuple of axes, that the experts are spread over. The order of
            a tuple defines the order of the ranks and of the experts. The specs of a caller's
            `jax.shard_map` must have the axes in this order: see `axis_name` of `jax_ep.dispatch`.
        batch_axes: the mesh axis, or tuple of axes, that the tokens are spread over, including the
            expert axis. None means every axis of the mesh except `tensor_axis`. In the caller's
            `jax.shard_map`, None means the axes that x varies over and the expert axis; the ranks
            along all of them must run the same layer, since its metrics are sums over these ranks.
        sequence_axes: the axis, or tuple of axes, among `batch_axes` over which the sequence
            dimension of x [batch, ..., sequence, H] is split. The remaining `batch_axes` then split
            x's leading dimension. Tokens that are already sharded in this way are not moved. None
            means the Explicit axes over which x's type shows that the sequences are split. See the
            page "Sharding".
        fsdp_axes: None, or a mapping from logical axes of the parameters, "exp", "embed" and "mlp",
            to the further mesh axis, or tuple of axes, over which their dimensions are split, such
            as {"exp": "fsdp", "embed": "fsdp"}. A mesh axis splits only the first dimension of a
            parameter that it is given for. Tokens must be spread over these axes, too. The layer
            gathers such parameters where it uses them, in the compute dtype, and reduce-scatters
            their gradients. None means the axes that the layer finds in the parameters' types or in
            the axis rules; {} means no axes. See the page "Sharding".
        tensor_axis: None, or a mesh axis, or tuple of axes, over which the hidden size F of every
            expert and of the shared experts is split. Ranks along it hold the same tokens, or
            different tokens if `batch_axes` include it; see `jax_ep.moe_layer`. On a mesh without
            this axis, F is not split.
        mesh: the mesh to run on where no ambient mesh is set.
        implementation: the implementation of dispatch and combine; see `jax_ep.dispatch`. "pallas"
            needs a mesh with `expert_axis`.
        matmul_implementation: the backend of the expert matmuls; see `jax_ep.expert_mlp`.
    """

    num_experts: int = dataclasses.field(metadata={"check": checks.check_integer})
    num_experts_per_token: int = dataclasses.field(metadata={"check": checks.check_integer})
    score: routing.Score = same_option(RoutingOptions, "score")
    choose_by: routing.ChooseBy = same_option(RoutingOptions, "choose_by")
    num_groups: int = same_option(RoutingOptions, "num_groups")
    groups_kept: int = same_option(RoutingOptions, "groups_kept")
    group_score: routing.GroupScore = same_option(RoutingOptions, "group_score")
    normalize: bool = same_option(RoutingOptions, "normalize")
    normalize_epsilon: float = same_option(RoutingOptions, "normalize_epsilon")
    scale: float = same_option(RoutingOptions, "scale")
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
    record_choices: bool = option(False, checks.check_bool)
    token_chunks: int = option(1, checks.check_integer)
    expert_alignment: int = option(1, checks.check_integer)
    wire_dtype: Any = None
    activation: Activation = same_option(ExpertOptions, "activation")
    gating: Gating | None = same_option(ExpertOptions, "gating")
    clamp: float | None = same_option(ExpertOptions, "clamp")
    matmul_dtype: Any = same_option(ExpertOptions, "matmul_dtype")
    weights_on: WeightsOn = same_option(ExpertOptions, "weights_on")
    dtype: Any = option(None, optional(_check_dtype))
    expert_axis: str | tuple[str, ...] = option("expert", axes)
    batch_axes: str | tuple[str, ...] | None = None
    sequence_axes: str | tuple[str, ...] | None = option(None, optional(axes))
    fsdp_axes: Mapping[str, str | tuple[str, ...]] | None = option(None, optional(_check_fsdp_axes))
    tensor_axis: str | tuple[str, ...] | None = option(None, optional(axes))
    mesh: Mesh | None = option(None, optional(_check_mesh))
    implementation: Implementation = None
    matmul_implementation: MatmulImplementation = None

    def __post_init__(self) -> None:
        for name in ("expert_axis", "batch_axes", "sequence_axes", "tensor_axis"):
            # Lists of mesh axes become tuples, so that the configuration is hashable.
            if isinstance(axes := getattr(self, name), list):
                object.__setattr__(self, name, tuple(axes))
        if isinstance(self.fsdp_axes, Mapping):
            items = sorted(self.fsdp_axes.items(), key=str)
            named = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in items)
            object.__setattr__(self, "fsdp_axes", named)

    @classmethod
    def of(cls, layer: Any) -> MoEConfig:
        """Makes the configuration from a layer whose attributes are named like the fields."""
        return options_of(cls, layer)

    @property
    def num_free(self) -> int:
        """The number of free experts: zero, identity and constant experts together."""
        return self.zero_experts + self.identity_experts + self.constant_experts

    @property
    def num_choosable(self) -> int:
        """The number of experts that the router chooses among: the E experts and the free ones."""
        return self.num_experts + self.num_free

    def routing_options(self) -> RoutingOptions:
        """Returns the fields that are options of `jax_ep.top_k_routing`, as one object."""
        return options_of(RoutingOptions, self)

    def expert_options(self) -> ExpertOptions:
        """Returns the fields that are options of the experts.

        The result is callable: it is the function between an expert's matmuls, which maps x @ wi_0
        and x @ wi_1 to the hidden values.
        """
        return options_of(ExpertOptions, self)

    @property
    def num_held(self) -> int:
        """The number of experts that all ranks hold together, where each copy of an expert counts.

        It is `num_slots`, or E if `num_slots` is None.
        """
        return self.num_experts if self.num_slots is None else self.num_slots

    def split_axes(self) -> dict[str, tuple[str, ...]]:
        """Maps the field names "expert_axis" and "tensor_axis" to tuples of mesh axes.

        Raises TypeError or ValueError, naming the field, if an axis is not a string, or if both
        fields have the same axis.
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

    def further_axes(self) -> dict[str, tuple[str, ...]]:
        """Returns `fsdp_axes` as a dict from logical axes to tuples of mesh axes; {} if None."""
        return {name: checks.as_axes(a) for name, a in dict(self.fsdp_axes or ()).items()}

    def further_axes_of(self, logical_axes: Sequence[str | None]) -> list[tuple[str, ...]]:
        """Returns, for each logical axis of a parameter, the axes of `fsdp_axes` that split it.

        As with Flax's rules, a logical axis is not split if any of its mesh axes splits a logical
        axis before it.
        """
        given, found, used = self.further_axes(), [], set[str]()
        for logical in logical_axes:
            axes = given.get(logical or "", ())
            found.append(() if used & set(axes) else axes)
            used |= set(found[-1])
        return found

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Maps the names of the fields that hold a function, such as "router", to the function.

        Fields that are None are left out.
        """
        fields = {name: getattr(self, name) for name in function_names(type(self))}
        return {name: function for name, function in fields.items() if function is not None}

    def __getstate__(self) -> dict[str, Any]:
        # pickle stores functions by name, and refuses a jitted one such as jax.nn.silu, because it
        # finds another object under that name. So a `_Reference` is stored instead.
        references = {name: _Reference.of(value) for name, value in self.functions().items()}
        return self.__dict__ | references

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({
            name: value.resolve() if isinstance(value, _Reference) else value
            for name, value in state.items()
        })  # fmt: skip


def check_config(config: MoEConfig) -> None:
    """Raises TypeError or ValueError, naming the field, if a field's value is wrong on any mesh."""
    check_options(config)
    split = config.split_axes()
    further = {axis for names in config.further_axes().values() for axis in names}
    for name, own in split.items():
        if both := set(own) & further:
            raise ValueError(
                f"fsdp_axes must name other mesh axes than {name} {own}, but has {sorted(both)}."
            )
    given = [set(axes) for axes in config.further_axes().values()]
    if any(a & b and a != b for a in given for b in given):
        raise ValueError(
            "fsdp_axes must give two logical axes the same mesh axes, or different ones, but is "
            f"{config.further_axes()}."
        )
    if config.router is None:
        k = config.num_experts_per_token
        options = config.routing_options()
        routing.check_choosing(config.num_choosable, k, options, k_name="num_experts_per_token")
    if config.host_capacity_factor is not None and config.implementation in ("pallas", "xla"):
        raise ValueError(
            'host_capacity_factor needs implementation="two_level" or None, since only the '
            f"exchange between hosts has it, but is {config.host_capacity_factor} with "
            f"implementation={config.implementation!r}."
        )
    if config.num_slots is not None and config.num_slots < config.num_experts:
        raise ValueError(
            f"num_slots must be at least num_experts={config.num_experts}, or None for one "
            f"slot for each expert, but is {config.num_slots}."
        )


@dataclasses.dataclass(frozen=True)
class _Reference:
    """The module and name of a function, which pickle stores instead of the function."""

    module: str
    name: str

    @classmethod
    def of(cls, function: Any) -> Any:
        """Returns a `_Reference` whose `resolve` returns `function`.

        Returns `function` itself if no module has it under its name, as for a lambda.
        """
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
