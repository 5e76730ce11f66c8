"""Defines `MoEConfig`, the options of an MoE layer, and checks their values."""

from __future__ import annotations

import contextlib
import dataclasses
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange.interface import Implementation, check_is_between_hosts
from jax_ep.matmul.primitives import Implementation as MatmulImplementation
from jax_ep.moe import losses, routing
from jax_ep.moe.expert_matmuls import check_matmul_dtype
from jax_ep.moe.expert_mlp import Activation, HiddenUnit, check_activation
from jax_ep.moe.routing import RoutingOptions

WeightsOn = Literal["output", "input"]
Router = Callable[[jax.Array, jax.Array | None], routing.Routing]
_FUNCTIONS = ("router", "activation", "shared_activation")  # the fields that hold functions


def check_compute_dtype(
    dtype: Any, hint: str = "", *, name: str = "dtype", may_be_wide: bool = True
) -> None:
    """Raises TypeError unless `dtype` is floating, of 16 or 32 bits, or wider if `may_be_wide`."""
    # `hint` ends the message, in which `name` stands for the argument.
    known = checks.floating(dtype)
    if known is None or known.itemsize < 2 or (known.itemsize > 4 and not may_be_wide):
        bits = "16 bits or more" if may_be_wide else "16 or 32 bits"
        raise TypeError(
            f"{name} must be a floating dtype of {bits}, such as jnp.bfloat16, but is "
            f"{dtype!r}{hint}."
        )


def _check_fsdp_axes(value: Any) -> None:
    # `MoEConfig.__post_init__` has converted a mapping to the sorted tuple of its items, so `value`
    # should be a tuple of pairs.
    if not isinstance(value, tuple) or any(
        not isinstance(item, tuple) or len(item) != 2 for item in value
    ):
        raise TypeError(
            'fsdp_axes must be None or map logical axes to mesh axes, such as {"embed": "fsdp"}, '
            f"but is {checks.described(value)}."
        )
    for logical, named in value:
        if logical not in ("exp", "embed", "mlp"):
            raise ValueError(f'fsdp_axes must map "exp", "embed" or "mlp", but maps {logical!r}.')
        checks.as_axes(named, f"fsdp_axes[{logical!r}]")


def _fields_of(kind: Any, source: Any) -> dict[str, Any]:
    """Reads the fields of the dataclass `kind` from attributes of `source`."""
    return {field.name: getattr(source, field.name) for field in dataclasses.fields(kind)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The options of an MoE layer, apart from its parameters; hashable, and can be pickled.

    The router is `jax_ep.top_k_routing`, unless `router` is given.

    Attributes:
        num_experts: E, the number of routed experts, a multiple of the ranks along `expert_axis`.
        num_experts_per_token: K, the number of experts that each token chooses.
        score, choose_by, num_groups, groups_kept, group_score, normalize, normalize_epsilon, scale:
            how the router chooses experts and weighs the choices; see `jax_ep.top_k_routing`.
        router: None, or your own router: a function of one rank's tokens [T, H] and their logits
            [T, E] float32, or None without a gate, that returns a `jax_ep.Routing` of K choices.
            The function is a static argument, so trained values must reach it through the logits.
            It gets no selection bias, and must apply options such as `scale` itself.
        router_dtype: the dtype that logits are computed in and rounded to, of 16 or 32 bits. None
            means `dtype`. Scores are always float32.
        logit_softcap: None, or a number c above 0: the logits become c * tanh(logits / c), in
            float32 (Laguna).
        balance_convention: the definition of `MoEMetrics.load_balance_loss`: "switch",
            "transformers" or "deepseek_v3"; see `jax_ep.load_balance_loss`. "transformers" takes
            the softmax of the logits and its top-k, whatever the router chooses. "deepseek_v3"
            balances each sequence separately, and needs x of shape [..., sequence, H].
        capacity_factor: None gives each rank a receive buffer that fits any routing, so nothing is
            dropped. A number c above 0 gives a buffer of c times the rows that a rank receives on
            average, T * K, rounded up to a multiple of 8. Rows that do not fit are dropped and
            counted, first those of the experts that have most (`overflow="fair"` of
            `jax_ep.dispatch`). Each group of ranks along `expert_axis` has buffers of its own, so c
            must fit the fullest group.
        host_capacity_factor: None, or a number c above 0: where the expert axis spans hosts, a rank
            sends at most c * T (rounded up) of its T tokens to each other host. Choices of further
            tokens are dropped and counted; see `host_capacity` of `jax_ep.dispatch`. It suits
            routers that limit a token to few hosts, such as 0.6 for 4 of 8 hosts.
        num_slots: None, or P, which is at least E and a multiple of N, the number of ranks. Each of
            the P slots holds the weights of one expert, so experts may have several copies, and
            each rank holds P / N slots. E need not be a multiple of N then. New parameters are
            made for P slots, and a call must have a `placement`, which says which expert each slot
            holds. With None, a call's `placement` says how many slots the parameters have.
        zero_experts, identity_experts, constant_experts: the numbers of free experts, which have
            almost no cost. They return 0, the token, or a mix of the token and a trained vector
            (MoE++, LongCat-Flash). The router chooses them like other experts. Their ids follow the
            E experts' ids, in this order; the gate, its biases and `expert_counts` include them.
        free_expert_factor: the factor, above 0, of the free experts' terms in the load-balance loss
            (MoE++'s tau). Below 1, tokens choose free experts more.
        record_choices: whether the metrics include `MoEMetrics.topk_idx`, the choices of all
            tokens, which a later call takes as `topk_idx`.
        token_chunks: the number c of chunks of consecutive tokens in which a rank dispatches,
            computes and combines, one after the other. Buffers then have 1 / c of the rows, and the
            backward pass dispatches each chunk and computes its products with wi_0 and wi_1 again.
            Both capacity factors limit each chunk by itself. See the page "Flax layers".
        wire_dtype: None, or `jnp.float8_e4m3fn`: the dtype in which tokens are sent to the experts;
            see `jax_ep.dispatch`. Outputs are sent in `dtype`. None means `dtype`; but float8 with
            `matmul_dtype`, unless weights_on is "input".
        activation, clamp, matmul_dtype: what experts compute; see `jax_ep.expert_mlp`. The
            shared experts follow these options, too.
        weights_on: whether the weight of a choice multiplies the "output" of its expert or the
            "input" (Llama 4).
        shared_activation: None, or the activation of the shared experts if it differs from that of
            the routed ones; `clamp` then does not apply to them.
        lora_scale: the factor of the experts' low-rank adapters (alpha / r), if there are any.
        dtype: the dtype of tokens, expert matmuls and output: floating, of 16 or 32 bits. None
            means the dtype that x and wi_0 promote to.
        expert_axis: the mesh axis, or tuple of axes, that the experts are spread over. For the
            order of a tuple see `axis_name` of `jax_ep.dispatch`.
        batch_axes: the mesh axis, or tuple of axes, that the tokens are spread over, including the
            expert axis. None means every axis of the mesh except `tensor_axis`. In the caller's
            `jax.shard_map`, None means the axes that x varies over and the expert axis; the ranks
            along all of them must run the same layer, since its metrics are sums over these ranks.
        sequence_axes: the axis, or tuple of axes, among `batch_axes` over which the sequence
            dimension of x [batch, ..., sequence, H] is split. The remaining `batch_axes` then split
            x's leading dimension. None means the Explicit axes over which x's type shows that the
            sequences are split. See the page "Sharding".
        fsdp_axes: None, or a mapping from logical axes of the parameters, "exp", "embed" and "mlp",
            to the further mesh axis, or tuple of axes, over which their dimensions are split, such
            as {"exp": "fsdp", "embed": "fsdp"}. A mesh axis splits only the first dimension of a
            parameter that it is given for. Tokens must be spread over these axes, too. None means
            the axes that the layer finds in the parameters' types or in the axis rules; {}: none.
        tensor_axis: None, or a mesh axis, or tuple of axes, over which the hidden size F of every
            expert and of the shared experts is split. Ranks along it hold the same tokens, or
            different tokens if `batch_axes` include it; see `jax_ep.moe_layer`.
        implementation: the implementation of dispatch and combine; see `jax_ep.dispatch`. "pallas"
            needs a mesh with `expert_axis`.
        matmul_implementation: the backend of the expert matmuls; see `jax_ep.expert_mlp`.
    """

    num_experts: int
    num_experts_per_token: int
    score: routing.Score = "softmax"
    choose_by: routing.ChooseBy = "score"
    num_groups: int = 1
    groups_kept: int = 1
    group_score: routing.GroupScore = "top2"
    normalize: bool = True
    normalize_epsilon: float = 0.0
    scale: float = 1.0
    router: Router | None = None
    router_dtype: Any = jnp.float32
    logit_softcap: float | None = None
    balance_convention: losses.Convention = "switch"
    capacity_factor: float | None = None
    host_capacity_factor: float | None = None
    num_slots: int | None = None
    zero_experts: int = 0
    identity_experts: int = 0
    constant_experts: int = 0
    free_expert_factor: float = 1.0
    record_choices: bool = False
    token_chunks: int = 1
    wire_dtype: Any = None
    activation: Activation = jax.nn.silu
    clamp: float | None = None
    matmul_dtype: Any = None
    weights_on: WeightsOn = "output"
    shared_activation: Activation | None = None
    lora_scale: float = 1.0
    dtype: Any = None
    expert_axis: str | tuple[str, ...] = "expert"
    batch_axes: str | tuple[str, ...] | None = None
    sequence_axes: str | tuple[str, ...] | None = None
    fsdp_axes: Mapping[str, str | tuple[str, ...]] | None = None
    tensor_axis: str | tuple[str, ...] | None = None
    implementation: Implementation = None
    matmul_implementation: MatmulImplementation = None

    def __post_init__(self) -> None:
        for name in ("expert_axis", "batch_axes", "sequence_axes", "tensor_axis"):
            # Lists of mesh axes become tuples, so that the configuration is hashable.
            if isinstance(axes := getattr(self, name), list):
                object.__setattr__(self, name, tuple(axes))
        if isinstance(self.fsdp_axes, Mapping):
            # The items are sorted so that equal mappings give equal configurations; as strings,
            # because keys of a wrong type, which `check_config` refuses, may have no order.
            items = sorted(self.fsdp_axes.items(), key=str)
            named = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in items)
            object.__setattr__(self, "fsdp_axes", named)

    @classmethod
    def of(cls, layer: Any) -> MoEConfig:
        return cls(**_fields_of(cls, layer))

    @property
    def num_free(self) -> int:
        return self.zero_experts + self.identity_experts + self.constant_experts

    @property
    def num_choosable(self) -> int:
        """The number of experts that the router chooses among: the E experts and the free ones."""
        return self.num_experts + self.num_free

    def routing_options(self) -> RoutingOptions:
        return RoutingOptions(**_fields_of(RoutingOptions, self))

    def unit(self) -> HiddenUnit:
        return HiddenUnit(activation=self.activation, clamp=self.clamp)

    @property
    def num_held(self) -> int:
        """The number of slots, or E without slots: experts that all ranks hold, copies included."""
        return self.num_experts if self.num_slots is None else self.num_slots

    def split_axes(self) -> dict[str, tuple[str, ...]]:
        """Maps "expert_axis" and "tensor_axis" to tuples of mesh axes, which must differ."""
        expert_axes = checks.as_axes(self.expert_axis, "expert_axis")
        tensor_axis = self.tensor_axis
        tensor_axes = () if tensor_axis is None else checks.as_axes(tensor_axis, "tensor_axis")
        if set(expert_axes) & set(tensor_axes):
            raise ValueError(
                f"tensor_axis must be another mesh axis than expert_axis {expert_axes}, but is "
                f"{tensor_axes}."
            )
        return {"expert_axis": expert_axes, "tensor_axis": tensor_axes}

    def fsdp_axes_by_logical(self) -> dict[str, tuple[str, ...]]:
        return {name: checks.as_axes(a) for name, a in dict(self.fsdp_axes or ()).items()}

    def fsdp_axes_of(self, logical_axes: Sequence[str | None]) -> list[tuple[str, ...]]:
        """Returns, for each logical axis of a parameter, the axes of `fsdp_axes` that split it."""
        # As with Flax's rules, a logical axis is not split if any of its mesh axes splits a logical
        # axis before it.
        given = self.fsdp_axes_by_logical()
        found: list[tuple[str, ...]] = []
        used: set[str] = set()
        for logical in logical_axes:
            axes = given.get(logical or "", ())
            found.append(() if used & set(axes) else axes)
            used |= set(found[-1])
        return found

    def __getstate__(self) -> dict[str, Any]:
        # pickle stores functions by name, and refuses a jitted one such as jax.nn.silu, because it
        # finds another object under that name. So the name itself is stored.
        return self.__dict__ | {name: _name_of(getattr(self, name)) for name in _FUNCTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        functions = {name: state[name] for name in _FUNCTIONS if isinstance(state[name], str)}
        found = {name: pkgutil.resolve_name(path) for name, path in functions.items()}
        self.__dict__.update(state | found)


def check_config(config: MoEConfig) -> None:
    _check_fields(config)
    split = config.split_axes()
    fsdp = [set(axes) for axes in config.fsdp_axes_by_logical().values()]
    for name, axes in split.items():
        if both := set(axes) & set[str]().union(*fsdp):
            raise ValueError(
                f"fsdp_axes must name other mesh axes than {name} {axes}, but has {sorted(both)}."
            )
    if any(a & b and a != b for a in fsdp for b in fsdp):
        raise ValueError(
            "fsdp_axes must give two logical axes the same mesh axes, or different ones, but is "
            f"{config.fsdp_axes_by_logical()}."
        )
    if config.router is None:
        routing.check_choosing(
            config.num_choosable,
            config.num_experts_per_token,
            config.routing_options(),
            k_name="num_experts_per_token",
        )
    if (factor := config.host_capacity_factor) is not None:
        check_is_between_hosts("host_capacity_factor", factor, config.implementation)
    if config.num_slots is not None and config.num_slots < config.num_experts:
        raise ValueError(
            f"num_slots must be at least num_experts={config.num_experts}, or None for one "
            f"slot for each expert, but is {config.num_slots}."
        )


def _check_fields(config: MoEConfig) -> None:
    for name, least in {
        "num_experts": 1,
        "num_experts_per_token": 1,
        "zero_experts": 0,
        "identity_experts": 0,
        "constant_experts": 0,
        "token_chunks": 1,
    }.items():
        checks.check_integer(name, getattr(config, name), least)
    config.routing_options().check()
    if config.router is not None:
        wanted = "a function of tokens [T, H] and logits [T, E] that returns a jax_ep.Routing"
        checks.check_function("router", config.router, f"{wanted}, or None")
    if config.router_dtype is not None:
        check_compute_dtype(config.router_dtype, name="router_dtype", may_be_wide=False)
    checks.check_name("balance_convention", config.balance_convention, get_args(losses.Convention))
    for name in ("logit_softcap", "capacity_factor", "host_capacity_factor"):
        if (number := getattr(config, name)) is not None:
            checks.check_number(name, number, otherwise=", or None")
    if config.num_slots is not None:
        checks.check_integer("num_slots", config.num_slots)
    checks.check_number("free_expert_factor", config.free_expert_factor)
    checks.check_bool("record_choices", config.record_choices)
    config.unit().check()
    if config.shared_activation is not None:
        check_activation("shared_activation", config.shared_activation, ", or None")
    if config.matmul_dtype is not None:
        check_matmul_dtype(config.matmul_dtype)
    checks.check_name("weights_on", config.weights_on, get_args(WeightsOn))
    checks.check_number("lora_scale", config.lora_scale)
    if config.dtype is not None:
        hint = "; for float8 rows on the wire, set wire_dtype"
        check_compute_dtype(config.dtype, hint, may_be_wide=False)
    if config.sequence_axes is not None:
        checks.as_axes(config.sequence_axes, "sequence_axes")
    if config.fsdp_axes is not None:
        _check_fsdp_axes(config.fsdp_axes)


def _name_of(function: Any) -> Any:
    """Returns "module:name" of a function, or the function if its module has no such name."""
    # The public modules of JAX come first, since `__module__` may name a private one.
    for module in ("jax.nn", "jax.numpy", getattr(function, "__module__", "")):
        path = f"{module}:{getattr(function, '__qualname__', '')}"
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            if pkgutil.resolve_name(path) is function:
                return path
    return function
