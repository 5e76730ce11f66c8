"""Computes the MoE layer as a pure function, `moe_layer`; both Flax layers call it.

`moe_layer` routes every token, dispatches it to its experts, runs the experts, combines their
outputs, and adds the shared experts. On a mesh, it opens a `jax.shard_map` for these steps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from jax_ep import checks
from jax_ep.dtypes import wide_dtype
from jax_ep.exchange.api import dispatch
from jax_ep.exchange.routes import dropless_capacity
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.moe import few_tokens, fsdp, losses, shared_experts, tensor_axis, token_chunks
from jax_ep.moe.config import MoEConfig, check_compute_dtype, check_config
from jax_ep.moe.expert_matmuls import (
    Experts,
    QuantizedExperts,
    check_are_arrays,
    check_quantized,
    check_same_kind,
    quantize_experts_of_rank,
    specs_of_quantized,
)
from jax_ep.moe.free_experts import output as free_output
from jax_ep.moe.free_experts import without_free
from jax_ep.moe.mesh import (
    AxisRules,
    LayerMesh,
    check_mesh_of_experts,
    explicit_axes,
    find_mesh,
    reshard,
)
from jax_ep.moe.metrics import MoEMetrics, Sequences, metrics_of
from jax_ep.moe.params import (
    LOGICAL_AXES,
    MoEParams,
    check_num_held,
    check_params,
)
from jax_ep.moe.routed_experts import run_experts
from jax_ep.moe.router import RouterInputs, check_router, makes_distinct_choices, route
from jax_ep.moe.slots import check_placement, counts_by_expert, equal_copies, slots_of_choices
from jax_ep.moe.traced import Traced
from jax_ep.placement.table import Placement
from jax_ep.placement.weights import ROUTED_WEIGHTS
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT


def moe_layer(
    params: MoEParams,
    x: jax.Array,
    config: MoEConfig,
    mask: jax.Array | None = None,
    *,
    placement: Placement | None = None,
    router_x: jax.Array | None = None,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    quantized_experts: QuantizedExperts | None = None,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs one MoE layer; on any mesh the output is the same up to rounding.

    Where the layer runs:
    - Inside a `jax.shard_map` that binds `expert_axis`, it runs in that `shard_map`. x is this
      rank's tokens; wi_0, wi_1 and wo are this rank's experts, [E / N, ...] on N ranks, or all
      experts. Give `batch_axes` if the `shard_map` binds other axes too and has check_vma=False.
    - Outside, it opens its own `shard_map` over the ambient mesh (`jax.set_mesh`), `config.mesh`,
      or the mesh of a `with mesh:` statement. Experts are split over `expert_axis`. Tokens are
      split over `batch_axes` along x's leading dimension, and with `sequence_axes` along its
      sequence dimension, too. If the ranks do not divide these dimensions, all dimensions of x but
      H are flattened, padded and split. On a mesh without `expert_axis`, every rank has all experts
      (data parallelism).
    - Without a mesh, it runs unsharded.

    If every rank would have to gather all experts on each call, the layer raises ValueError or
    warns. It raises if the experts are sharded over `expert_axis`, but no mesh is set. It warns if
    the experts are sharded over other axes, or if their sharding is not known, as under `jax.jit`.

    With `tensor_axis`, each of the n ranks along that axis holds F / n columns of its experts, and
    computes them for the tokens of all n ranks. If these ranks hold the same tokens, each
    dispatches them, and the partial outputs [T, H] are summed after combine. If `tensor_axis` is
    among `batch_axes`, tokens are gathered along it before dispatch, and the sums are scattered
    after combine. In the caller's `jax.shard_map`, pass each rank its own columns of wi_0, wi_1,
    their biases, wo, and the shared experts.

    wi_0, wi_1 and wo may each be a `QuantizedArray`, of which only values and scales stay in
    memory, and so may the matrices of the shared experts. With `config.matmul_dtype`, float8
    matrices in blocks of 128 x 128 are multiplied as they are stored. Without it, a Hopper GPU
    reads matrices as they are stored if they are in MXFP4 and transposed, as in published models,
    and tokens are bfloat16; with few tokens float8 matrices, too. Those of shared experts are read
    so only with few tokens. All other quantized matrices are dequantized to `config.dtype` in each
    call, right before they are multiplied. Quantized matrices have no gradient; differentiating
    with respect to them raises TypeError.

    Args:
        params: the parameters of the layer; their global shapes do not depend on the mesh.
        x: [..., H] floating: the tokens.
        config: the layer's options.
        mask: [...] bool or integer, or None: tokens with False or 0 go to no routed expert, and the
            metrics do not count them. A masked token may hold NaN or infinities, which reach no
            gradient of a parameter. Its finite values must not overflow in the shared experts. With
            `config.matmul_dtype`, it is 0 there.
        placement: if `config.num_slots` is P, a `jax_ep.placement.Placement` of this layer, which
            says which expert each of the P slots holds. It consists of arrays, so a new one does
            not recompile the program. wi_0, wi_1 and wo are then [P, ...], as
            `jax_ep.placement.to_slots` makes them, and all copies of an expert get the same
            gradient.
        router_x: [..., H'] floating, or None for x: the input of the gate [H', E], if it differs
            from the experts' input (Gemma 4; Nemotron's latent experts).
        topk_idx: [..., K] integer expert ids, or None: choices made by the caller, where -1 chooses
            no expert. The gate then only computes the weights of these choices, by `score`,
            `normalize` and `scale` (as in DeepSeek-V4's hash layers). With `config.router`, which
            gives weights only to its own choices, topk_weights must be given too.
        topk_weights: [..., K] floating, or None: the weights of `topk_idx`. If they are given, no
            router runs, both losses in the metrics are 0, and `params.gate` may be None.
        quantized_experts: with `config.matmul_dtype`, what `jax_ep.quantize_experts` returned for
            these parameters; None quantizes them in each call.

    Returns:
        The output, [..., H] of the compute dtype, and `MoEMetrics`. The metrics are equal on all
        ranks, except `MoEMetrics.topk_idx`, which has the choices of the tokens in x.

    Raises:
        ValueError, TypeError: an argument does not fit; raised at trace time, naming it.
    """
    inputs = RouterInputs(router_x, topk_idx, topk_weights)
    return run_layer(params, x, config, mask, placement, inputs, quantized_experts, axis_rules=())


def run_layer(
    params: MoEParams,
    x: jax.Array,
    config: MoEConfig,
    mask: jax.Array | None,
    placement: Placement | None,
    inputs: RouterInputs,
    quantized: QuantizedExperts | None = None,
    *,
    axis_rules: AxisRules,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs one MoE layer; see `moe_layer`.

    `inputs` holds those arguments of `moe_layer` that concern the router, and `quantized` is its
    argument `quantized_experts`.

    `axis_rules` are pairs of a logical axis and mesh axes, as in Flax. They say how parameters are
    probably sharded where their types do not show it. They are used for warnings. Where
    `config.fsdp_axes` is None, they also give the FSDP axes; else they must agree with it.
    """
    _check_types(params, config)
    check_config(config)
    check_params(params, config.num_choosable, config.constant_experts)
    _check_tokens(x, mask, params.wi_0.shape[1], config)
    check_placement(placement, config.num_experts, config.num_slots)
    check_router(params, x, inputs, config)
    if mask is not None:
        mask = mask.astype(jnp.bool_)
    where = find_mesh(config, x)
    check_same_kind(params, QuantizedExperts._fields)
    check_mesh_of_experts(params.wi_0, config, where, axis_rules)
    _check_experts(params, config, where)
    shared_experts.check(params, config, where)
    where = fsdp.with_further_axes(where, params, config, axis_rules)
    check_quantized(quantized, params, config.matmul_dtype)
    config = _resolved(config, params, x, where)
    call = _Call(x, mask, inputs)
    traced = _traced_functions(config, params, call, where)
    program = _moe_layer
    # A `Traced` function without a key equals only itself, so no later call could reuse the program
    # that is compiled for it. A jit of its own frees the program, which `_moe_layer` would keep.
    if any(function.key is None for function in traced.values()):
        program = jax.jit(lambda *args, **kw: _layer(*args, **kw), static_argnames=_STATIC)
    config = dataclasses.replace(config, **traced)
    return program(params, call, placement, quantized, config=config, where=where)


def _resolved(config: MoEConfig, params: MoEParams, x: jax.Array, where: LayerMesh) -> MoEConfig:
    """Returns the configuration with the defaults of options that are None filled in.

    `dtype` and `router_dtype` become dtypes. `implementation` becomes "xla" if it is None and there
    is no expert axis.
    """
    dtype = config.dtype
    if dtype is None:
        for name, array in (("x", x), ("wi_0", params.wi_0)):
            hint = "; set dtype, and for float8 rows on the wire wire_dtype"
            check_compute_dtype(array.dtype, hint, name=f"the dtype of {name}")
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(x, params.wi_0.dtype)
    router_dtype = jnp.dtype(dtype if config.router_dtype is None else config.router_dtype)
    # The logits are float32 at most, even if x is float64.
    if router_dtype.itemsize > 4:
        router_dtype = jnp.dtype(jnp.float32)
    implementation = config.implementation
    if not where.expert_axes and implementation is None:
        # Without an expert axis, ranks exchange no rows, and the exchange kernels need a mesh.
        implementation = "xla"
    return dataclasses.replace(
        config,
        dtype=jnp.dtype(dtype),
        router_dtype=router_dtype,
        implementation=implementation,
    )


def _traced_functions(
    config: MoEConfig, params: MoEParams, call: _Call, where: LayerMesh
) -> dict[str, Any]:
    """Wraps the functions in `config` in `Traced`, so that equal functions compile only once.

    Returns a dict by field name: "router" if the caller gives a router, and "gating", or
    "activation" if there is no gating. The router is traced for the shapes of one rank's tokens and
    their logits, and the other function for one row of one rank's pre-activations.
    """
    wide = wide_dtype(config.dtype)
    split = where.num_parts()
    rows = [jax.ShapeDtypeStruct((1, params.wi_0.shape[2] // split), wide)]
    if params.shared_wo is not None:
        rows.append(jax.ShapeDtypeStruct((1, params.shared_wo.shape[0] // split), wide))
    name, count = ("activation", 1) if config.gating is None else ("gating", 2)
    traced = {name: Traced(getattr(config, name), [[row] * count for row in rows])}
    if config.router is not None:
        parts = math.prod(where.mesh.shape[a] for a in where.batch_axes) if where.mesh else 1
        num_tokens = -(-math.prod(call.x.shape[:-1]) // parts)
        router_x = call.x if call.router.router_x is None else call.router.router_x
        tokens = jax.ShapeDtypeStruct((num_tokens, router_x.shape[-1]), router_x.dtype)
        logits = None
        if params.gate is not None:
            logits = jax.ShapeDtypeStruct((num_tokens, config.num_choosable), jnp.float32)
        traced["router"] = Traced(config.router, [[tokens, logits]])
    return traced


class _Call(NamedTuple):
    """The array arguments of one call of the layer; each is None or has x's leading dimensions.

    `sequence_ids` has the id of each token's sequence, int32, for the load-balance loss. It is not
    None if the tokens of a sequence may be on several ranks.
    """

    x: jax.Array
    mask: jax.Array | None
    router: RouterInputs
    sequence_ids: jax.Array | None = None


def _layer(
    params: MoEParams,
    call: _Call,
    placement: Placement | None,
    quantized: QuantizedExperts | None,
    config: MoEConfig,
    where: LayerMesh,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs one call in a `jax.shard_map`: one of its own over the mesh, or the caller's."""
    on_rank = functools.partial(_on_rank, config=config, where=where)
    if where.mesh is not None:
        return _in_shard_map(on_rank, params, call, placement, quantized, where)
    ambient = jax.sharding.get_abstract_mesh()
    operands = params, call, placement, quantized
    if not explicit_axes(ambient):
        return on_rank(*operands)
    # The caller's shard_map does not map over all axes of the mesh, and the remaining ones are
    # Explicit. All arrays are replicated over the Explicit axes, so that all ranks along them
    # compute the same.
    spec = jax.typeof(call.x).sharding.spec
    args = jax.tree.map(lambda a: reshard(a, ambient, PartitionSpec()), operands)
    out, metrics = on_rank(*args)
    if (choices := metrics.topk_idx) is not None:
        of_tokens = PartitionSpec(*[*spec][:-1])
        metrics = metrics._replace(topk_idx=reshard(choices, ambient, of_tokens))
    return reshard(out, ambient, spec), metrics


# The layer is jitted, so that layers with equal configurations are traced only once, and calls
# outside any jit are compiled, too.
_STATIC = ("config", "where")
_moe_layer = jax.jit(_layer, static_argnames=_STATIC)


def _in_shard_map(
    on_rank,
    params: MoEParams,
    call: _Call,
    placement: Placement | None,
    quantized: QuantizedExperts | None,
    where: LayerMesh,
) -> tuple[jax.Array, MoEMetrics]:
    """Opens a `jax.shard_map` over the mesh, and runs `on_rank` on each rank's shards in it.

    If the ranks do not divide the dimensions of x, the tokens are flattened and padded first.
    Returns the output in x's shape and sharding, and the metrics.
    """
    mesh = where.mesh
    assert mesh is not None
    shape, spec = call.x.shape, jax.typeof(call.x).sharding.spec
    tokens_over = where.axes_of_tokens(len(shape))
    divides = len(shape) > 1 and not any(
        n % where.size(axes) for n, axes in zip(shape, tokens_over, strict=False)
    )
    if len(shape) < 3 or not divides or where.sequence_axes:
        number = math.prod(shape[:-2])
        ids = jnp.arange(number, dtype=jnp.int32).reshape(*shape[:-2], *(1,) * (len(shape) > 1))
        call = call._replace(sequence_ids=jnp.broadcast_to(ids, shape[:-1]))
        on_rank = functools.partial(on_rank, num_sequences=number)
    if not divides:
        tokens_over = (where.batch_axes,)
        call = _flattened(call, where)

    tokens_spec = PartitionSpec(*(axes or None for axes in tokens_over))
    params_spec = _specs_of(params, where)
    placement_spec = jax.tree.map(lambda _: PartitionSpec(), placement)
    quantized_spec = None
    if quantized is not None:
        of_quantized = fsdp.mesh_of_quantized(where, params)
        quantized_spec = specs_of_quantized(quantized, _specs_of(params, of_quantized))
    specs = params_spec, jax.tree.map(lambda _: tokens_spec, call), placement_spec, quantized_spec
    operands = params, call, placement, quantized
    args = jax.tree.map(lambda a, spec: reshard(a, mesh, spec), operands, specs)
    of_metrics: dict[str, Any] = dict.fromkeys(MoEMetrics._fields, PartitionSpec())
    metrics_specs = MoEMetrics(**(of_metrics | {"topk_idx": tokens_spec}))
    out, metrics = jax.shard_map(
        on_rank,
        mesh=None if isinstance(mesh, AbstractMesh) else mesh,
        in_specs=specs,
        out_specs=(tokens_spec, metrics_specs),
    )(*args)

    def like_x(array: jax.Array, spec: PartitionSpec) -> jax.Array:
        if not divides:
            array = reshard(array, mesh, PartitionSpec())[: math.prod(shape[:-1])]
            array = array.reshape(*shape[:-1], array.shape[-1])
        return reshard(array, mesh, spec)

    if (choices := metrics.topk_idx) is not None:
        metrics = metrics._replace(topk_idx=like_x(choices, PartitionSpec(*[*spec][:-1])))
    # On Explicit axes, the output must be sharded like x, so that callers can add it to x.
    return like_x(out, spec), metrics


def _flattened(call: _Call, where: LayerMesh) -> _Call:
    """Makes one dimension of those of the tokens, padded with masked tokens to a number per rank.

    Raises ValueError if the number of tokens is symbolic.
    """
    mesh, shape, parts = where.mesh, call.x.shape, where.size(where.batch_axes)
    assert mesh is not None
    num_tokens = math.prod(shape[:-1])
    if checks.is_symbolic(num_tokens):
        raise ValueError(
            "x must have a dimension that the ranks are known to divide where its dimensions are "
            f"symbolic, since padding would be needed for {shape} on {parts} ranks. Export with a "
            f"dimension such as {parts} * n."
        )
    if call.mask is None:
        call = call._replace(mask=jnp.ones(shape[:-1], jnp.bool_))
    padding = -num_tokens % parts

    def flattened(array: jax.Array) -> jax.Array:
        # The Explicit axes that shard the array may not divide the flattened number of tokens, so
        # the array is replicated over them first.
        array = reshard(array, mesh, PartitionSpec())
        array = array.reshape(num_tokens, *array.shape[len(shape) - 1 :])
        return jnp.pad(array, ((0, padding), *[(0, 0)] * (array.ndim - 1)))

    return jax.tree.map(flattened, call)


def quantize_experts(params: MoEParams, config: MoEConfig) -> QuantizedExperts:
    """Quantizes the experts' matrices once, for all calls of a layer with the same parameters.

    A training step quantizes them before its microbatches, and passes the result to the call of
    each microbatch as `quantized_experts`. Gradients go to `params`, as if quantization were the
    identity (straight-through). The result has each matrix twice, as it is and transposed, with 2
    bytes per number in total. It is sharded as the parameters are, but over `fsdp_axes` only if
    each rank's shard has whole blocks of 128 x 128 numbers.

    Args:
        params: the parameters of a layer.
        config: the configuration of the layer, with a `matmul_dtype`.

    Returns:
        The quantized matrices, which `moe_layer` takes as `quantized_experts`.

    Raises:
        ValueError: `config.matmul_dtype` is None, or H or F is not a multiple of 128.
    """
    return quantize_by_rules(params, config, axis_rules=())


def quantize_by_rules(
    params: MoEParams, config: MoEConfig, *, axis_rules: AxisRules
) -> QuantizedExperts:
    """Runs `quantize_experts` with Flax's axis rules, pairs of a logical axis and mesh axes.

    Where `config.fsdp_axes` is None, they give the FSDP axes; else they must agree with it.
    """
    _check_types(params, config)
    if config.matmul_dtype is None:
        raise ValueError(
            "config.matmul_dtype must be a dtype, such as jnp.float8_e4m3fn, for quantize_experts, "
            "but is None."
        )
    check_config(config)
    check_are_arrays("experts cannot be quantized by quantize_experts", params)
    where = find_mesh(config, None)
    _check_experts(params, config, where)
    where = fsdp.with_further_axes(where, params, config, axis_rules)
    where = fsdp.mesh_of_quantized(where, params) if where.mesh is not None else where
    matrices = {name: getattr(params, name) for name in QuantizedExperts._fields}
    # A layer that quantizes its matrices in each call casts them to the compute dtype first, so the
    # same is done here.
    if config.dtype is not None:
        matrices = jax.tree.map(lambda w: w.astype(config.dtype), matrices)

    def quantize(matrices: dict[str, Any]) -> QuantizedExperts:
        return quantize_experts_of_rank(**matrices, implementation=config.matmul_implementation)

    if where.mesh is None:
        return quantize(matrices)
    present = {name: array for name, array in matrices.items() if array is not None}
    specs = {name: fsdp.spec_of_parameter(name, where) for name in present}
    given = {name: reshard(array, where.mesh, specs[name]) for name, array in present.items()}
    specs_of_given = specs | {name: None for name in matrices if name not in specs}
    return jax.shard_map(
        quantize,
        mesh=None if isinstance(where.mesh, AbstractMesh) else where.mesh,
        in_specs=(specs_of_given,),
        out_specs=specs_of_quantized(jax.eval_shape(quantize, matrices), MoEParams.of(**specs)),
    )({name: given.get(name) for name in matrices})


def _specs_of(params: MoEParams, where: LayerMesh) -> MoEParams:
    specs: dict[str, Any] = {}
    for name, array in params._asdict().items():
        if array is not None:
            spec = fsdp.spec_of_parameter(name, where)
            specs[name] = array.specs(spec) if isinstance(array, QuantizedArray) else spec
    return MoEParams.of(**specs)


def _on_rank(
    params: MoEParams,
    call: _Call,
    placement: Placement | None,
    quantized: QuantizedExperts | None,
    *,
    num_sequences: int | None = None,
    config: MoEConfig,
    where: LayerMesh,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs the layer on one rank's tokens and experts, inside a `jax.shard_map` if there is a mesh.

    Returns the output in the shape of this rank's `call.x`, and the metrics of all ranks' tokens.
    `num_sequences` is the number of sequences on all ranks, to which `call.sequence_ids` refer. It
    is None if each rank holds whole sequences.
    """
    shape = call.x.shape
    num_lead = len(shape) - 1
    x, mask, inputs, ids = jax.tree.map(lambda a: a.reshape(-1, *a.shape[num_lead:]), call)
    sequences = Sequences(math.prod(shape[:-2]) if num_sequences is None else num_sequences, ids)
    # `tokens` go to the router and the routed experts, with masked tokens set to 0. The shared
    # experts run on `x`, with masked tokens as they are, if they are finite.
    tokens = x
    if mask is not None:
        # A masked token may hold NaN or infinities. Times a zero cotangent, these would make the
        # gate's gradient NaN, so masked tokens are set to 0.
        tokens = jnp.where(mask[:, None], x, 0)
        # With float8, a token's numbers also determine the scales of other tokens, so masked
        # tokens are 0 in the shared experts, too.
        is_float8 = config.matmul_dtype is not None
        x = tokens if is_float8 else jnp.where(mask[:, None] | jnp.isfinite(x), x, 0)
        if inputs.router_x is not None:
            inputs = inputs._replace(router_x=jnp.where(mask[:, None], inputs.router_x, 0))
    # Free experts run on this rank's own tokens, before tokens are gathered over the tensor axes.
    own_tokens = tokens
    router_x = tokens if inputs.router_x is None else inputs.router_x
    with jax.named_scope("router"):
        params = _gathered(params, ("gate",), where)
        routed, logits = route(params, router_x, inputs, mask, config)
        topk_idx = without_free(routed.topk_idx, config) if config.num_free else routed.topk_idx
    arrays = tokens, x, topk_idx, routed.topk_weights
    with jax.named_scope("dispatch"):
        tokens, x, topk_idx, topk_weights = tensor_axis.for_all_ranks(
            arrays, where, config.implementation
        )
    distinct = makes_distinct_choices(inputs, config)
    out, dropped = _run_routed_experts(
        params, quantized, tokens, topk_idx, topk_weights, placement, distinct, config, where
    )
    if params.shared_wo is not None:
        with jax.named_scope("shared_experts"):
            out += shared_experts.output(params, x, config, where)
    with jax.named_scope("combine"):
        out = tensor_axis.sum_over_ranks(out, where, config.implementation)
    if config.num_free:
        with jax.named_scope("free_experts"):
            params = _gathered(params, ("constant_value", "constant_gate"), where)
            free = free_output(own_tokens, routed.topk_idx, routed.topk_weights, params, config)
            out = (out.astype(jnp.float32) + free).astype(out.dtype)
    with jax.named_scope("metrics"):
        metrics = metrics_of(routed, logits, mask, dropped, sequences, config, where)
    if config.record_choices:
        metrics = metrics._replace(topk_idx=routed.topk_idx.reshape(*shape[:-1], -1))
    return out.reshape(shape), metrics


def _run_routed_experts(
    params: MoEParams,
    quantized: QuantizedExperts | None,
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    placement: Placement | None,
    distinct: bool,
    config: MoEConfig,
    where: LayerMesh,
) -> tuple[jax.Array, jax.Array]:
    """Dispatches tokens [T, H], runs the routed experts, and combines their outputs.

    Returns the output [T, H], and for each expert the number of rows that were sent to this rank
    and dropped here, [E] int32. `distinct` says whether the K choices of each token are known to
    differ.
    """
    with jax.named_scope("dispatch"):
        slots = topk_idx
        if placement is not None:
            slots = slots_of_choices(topk_idx, placement, where.expert_axes)
        tokens = tokens.astype(config.dtype)
    with jax.named_scope("experts"):
        experts = _experts_of_rank(params, quantized, placement, config, where)
    by_dispatch = functools.partial(_run_chunk, distinct=distinct, config=config, where=where)
    out, counts = token_chunks.run(
        functools.partial(few_tokens.run, by_dispatch, config=config, where=where),
        experts,
        (tokens, slots, topk_weights),
        config,
        where.expert_axes,
        {
            matrices.dtype
            for matrices in (params.wi_0, params.wi_1, params.wo)
            if matrices is not None
        },
    )
    with jax.named_scope("metrics"):
        dropped = (
            _of_all_experts(counts, where)
            if placement is None
            else counts_by_expert(counts, placement, where.expert_axes)
        )
    return out, dropped


def _run_chunk(
    experts: Experts,
    tokens: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    distinct: bool,
    config: MoEConfig,
    where: LayerMesh,
) -> tuple[jax.Array, jax.Array]:
    """Dispatches one chunk of tokens [T, H], runs the experts, and combines their outputs.

    Returns the output [T, H], and the dropped rows of each of this rank's L experts or slots, [L]
    int32. `topk_idx` [T, K] has ids of slots if the layer has slots.
    """
    # Float8 matmuls quantize each row by itself, so a row may as well be quantized before it is
    # sent: the numbers are the same. So rows are sent as float8 even if wire_dtype is None. With
    # weights_on="input", however, rows are multiplied by their weights on arrival, and must be
    # quantized after that.
    wire_dtype = config.wire_dtype
    if config.matmul_dtype is not None and config.weights_on == "output":
        wire_dtype = config.matmul_dtype
    # Rows that are sent quantized stay quantized for float8 matmuls. Quantized rows have no
    # gradient, so dispatch sends none back to `tokens`. Instead, `run_experts` gets `tokens`, and
    # sends the gradient of the received rows back to them.
    stays_quantized = config.matmul_dtype is not None and wire_dtype is not None
    with jax.named_scope("dispatch"):
        received = dispatch(
            lax.stop_gradient(tokens) if stays_quantized else tokens,
            topk_idx,
            num_experts=config.num_held,
            axis_name=where.expert_axes,
            capacity=receive_capacity(config, tokens.shape[0], where.num_ranks(), distinct),
            expert_alignment=config.expert_alignment,
            # Without a capacity factor, every row fits in the receive buffer, so "tail" and "fair"
            # give the same result.
            overflow="tail" if config.capacity_factor is None else config.overflow,
            host_capacity=_host_capacity(config, tokens.shape[0], where),
            wire_dtype=wire_dtype,
            output="quantized" if stays_quantized else "dequantized",
            zero_unused=False,
            implementation=config.implementation,
        )
    out = run_experts(
        received,
        experts,
        topk_weights,
        config.expert_options(),
        config.implementation,
        config.matmul_implementation,
        tokens if stays_quantized else None,
    )
    return out, received.dropped_counts


def _experts_of_rank(
    params: MoEParams,
    quantized: QuantizedExperts | None,
    placement: Placement | None,
    config: MoEConfig,
    where: LayerMesh,
) -> Experts:
    """Returns the weights of this rank's experts, gathered over FSDP axes, in the compute dtype.

    If the matmuls multiply float8 and FSDP axes split the matrices into whole float8 blocks, the
    float8 copies in `Experts.quantized` are gathered instead of the matrices.
    """
    own: dict[str, Any] = {
        name: _own_experts(name, weights, placement, config, where)
        for name in ROUTED_WEIGHTS
        if (weights := getattr(params, name)) is not None
    }
    matrices = {name: own[name] for name in QuantizedExperts._fields if name in own}
    if config.matmul_dtype is not None and where.splits_further(*matrices):
        if fsdp.has_whole_blocks(*(w.shape for w in matrices.values())):
            if quantized is None:
                parts = MoEParams.of(**{n: w.astype(config.dtype) for n, w in matrices.items()})
                quantized = quantize_experts_of_rank(
                    parts.wi_0, parts.wi_1, parts.wo, config.matmul_implementation
                )
            quantized = fsdp.gather_quantized(quantized, where)
    for name, part in own.items():
        dtype = config.dtype if name in matrices else None
        whole = fsdp.gather if quantized is None or name not in matrices else fsdp.stand_in
        own[name] = whole(name, part, where, dtype)
    if quantized is not None:
        of_rank = functools.partial(_of_rank, num=config.num_held // where.num_ranks(), where=where)
        quantized = jax.tree.map(of_rank, quantized)
    if config.matmul_dtype is not None:
        on_a_rank = " on a rank" if where.num_ranks() * where.num_tensor_ranks() > 1 else ""
        for name in matrices:
            FLOAT8_MATRICES.check_shape(f"with matmul_dtype, {name}{on_a_rank}", own[name].shape)
    experts = Experts(own["wi_0"], own.get("wi_1"), own["wo"])
    experts = experts._replace(**own, quantized=quantized)
    # The partial outputs of the ranks along the tensor axes are summed, so only the first of these
    # ranks adds the output's bias.
    if where.tensor_axes and experts.wo_bias is not None:
        is_first = lax.axis_index(where.tensor_axes) == 0
        experts = experts._replace(wo_bias=jnp.where(is_first, experts.wo_bias, 0))
    return experts


def receive_capacity(
    config: MoEConfig, num_tokens: int, num_ranks: int, distinct: bool = True
) -> int | None:
    """Returns the capacity R, the number of rows in a rank's receive buffer, for `dispatch`.

    Without a `config.capacity_factor`, R is large enough for any routing. It is smaller if the K
    choices of a token are `distinct`, since a rank then receives at most one row per token for each
    of its experts. With a capacity factor f, R is at most f times the T·K rows that a rank receives
    on average, plus the padding of the experts' blocks. If `num_tokens` is symbolic, returns None,
    which lets `dispatch` choose.

    Raises ValueError if a capacity factor is given and `num_tokens` is symbolic.
    """
    if checks.is_symbolic(num_tokens):
        for name in ("capacity_factor", "host_capacity_factor"):
            if (factor := getattr(config, name)) is not None:
                raise ValueError(
                    f"{name} must be None where the number of tokens is symbolic, as it may be for "
                    f"jax.export, but is {factor}."
                )
        return None
    num_local_experts = config.num_held // num_ranks
    choices = config.num_experts_per_token
    rows = num_ranks * num_tokens * (min(choices, num_local_experts) if distinct else choices)
    if config.capacity_factor is not None:
        average = num_tokens * config.num_experts_per_token
        rows = min(rows, math.ceil(config.capacity_factor * average))
    rows = dropless_capacity(rows, num_local_experts, config.expert_alignment)
    # R is a multiple of ROW_ALIGNMENT, because the matmul kernels would have to copy any other
    # receive buffer to pad it.
    multiple = math.lcm(config.expert_alignment, ROW_ALIGNMENT)
    return -(-rows // multiple) * multiple


def _host_capacity(config: MoEConfig, num_tokens: int, where: LayerMesh) -> int | None:
    """Returns the most tokens that a rank sends to each other host; None means no limit."""
    if config.host_capacity_factor is None or not where.expert_axes:
        return None
    return math.ceil(config.host_capacity_factor * num_tokens)


def _own_experts(
    name: str,
    weights: jax.Array | QuantizedArray,
    placement: Placement | None,
    config: MoEConfig,
    where: LayerMesh,
) -> jax.Array | QuantizedArray:
    """Returns this rank's experts from `weights`, the parameter that is called `name`.

    The leading dimension of `weights` counts experts, either all of them or only this rank's. With
    a placement, the gradients of an expert's copies are summed, so that all copies get the same
    gradient.
    """
    axes = where.expert_axes + (where.further(name) or ((),))[0]
    own = functools.partial(_of_rank, num=config.num_held // where.size(axes), where=where)
    weights = jax.tree.map(own, weights)
    # Quantized matrices have no gradient, so there is none to sum over an expert's copies.
    if placement is None or isinstance(weights, QuantizedArray):
        return weights
    return equal_copies(weights, placement, axes)


def _of_rank(weights: jax.Array, num: int, where: LayerMesh) -> jax.Array:
    """Returns the weights [num, ...] of the `num` experts of this rank.

    `weights` has either only these experts, or the experts of all ranks along the expert axes.
    """
    if weights.shape[0] == num:
        return weights
    return lax.dynamic_slice_in_dim(weights, lax.axis_index(where.expert_axes) * num, num)


def _of_all_experts(counts: jax.Array, where: LayerMesh) -> jax.Array:
    """Expands counts of this rank's experts to counts of all E experts; the others get 0."""
    experts = jnp.arange(counts.shape[0] * where.num_ranks(), dtype=jnp.int32)
    rank_of_expert = experts // counts.shape[0]
    here = rank_of_expert == lax.axis_index(where.expert_axes)
    return jnp.where(here, jnp.tile(counts, where.num_ranks()), 0)


def _gathered(params: MoEParams, names: tuple[str, ...], where: LayerMesh) -> MoEParams:
    """Returns `params`, with those in `names` gathered over their FSDP axes, without a cast."""
    given = {name: array for name in names if (array := getattr(params, name)) is not None}
    return params._replace(**{name: fsdp.gather(name, a, where) for name, a in given.items()})


def _check_tokens(x: jax.Array, mask: jax.Array | None, hidden: int, config: MoEConfig) -> None:
    checks.check_array("x", x, None, jnp.floating, f"[..., H={hidden}]")
    if x.ndim < 1 or x.shape[-1] != hidden:
        raise ValueError(f"x must be [..., H={hidden}], but has shape {x.shape}.")
    if 0 in x.shape:
        raise ValueError(f"x must hold at least one token, but has shape {x.shape}.")
    if config.balance_convention == "deepseek_v3" and x.ndim < 2:
        raise ValueError(
            'x must be [..., sequence, H] for balance_convention="deepseek_v3", but has shape '
            f"{x.shape}."
        )
    if mask is not None:
        losses.check_mask(mask, "[...], x's without its last axis")
        if mask.shape != x.shape[:-1]:
            raise ValueError(
                f"mask must have one value for each token of x {x.shape}, but has shape "
                f"{mask.shape}."
            )


def _check_types(params: Any, config: Any) -> None:
    for name, value, kind in (("params", params, MoEParams), ("config", config, MoEConfig)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {kind.__name__}, but is {checks.described(value)}.")


def _check_blocks(params: MoEParams, where: LayerMesh) -> None:
    """Raises ValueError if splitting F over the tensor axes would cut a quantized block.

    A block of a `QuantizedArray` has one scale, so the numbers of a block must be on one rank.
    """
    num_ranks = where.num_tensor_ranks()
    for name, array in params._asdict().items():
        if isinstance(array, QuantizedArray):
            sizes = zip(array.shape, LOGICAL_AXES[name], strict=True)
            shape = tuple(size // num_ranks if axis == "mlp" else size for size, axis in sizes)
            array.format.check_shape(f"{name} on one of {num_ranks} ranks of tensor_axis", shape)


def _check_experts(params: MoEParams, config: MoEConfig, where: LayerMesh) -> None:
    num_ranks = where.num_ranks()
    if config.num_held % num_ranks:
        name = "num_experts" if config.num_slots is None else "num_slots"
        raise ValueError(
            f"{name} must be a multiple of the {num_ranks} ranks along expert_axis "
            f"{where.expert_axes}, but is {config.num_held}."
        )
    allowed = {config.num_held}
    # In the caller's shard_map, wi_0, wi_1 and wo may hold only this rank's experts instead of all.
    if where.mesh is None:
        allowed.add(config.num_held // num_ranks)
    check_num_held(params, config.num_experts, allowed)
    if where.mesh is not None:
        widths = {"wi_0": params.wi_0.shape[2]}
        if params.shared_wo is not None:
            widths["shared_wo"] = params.shared_wo.shape[0]
        for name, width in widths.items():
            if width % where.num_tensor_ranks():
                raise ValueError(
                    f"{name} must have a width that is a multiple of the "
                    f"{where.num_tensor_ranks()} ranks along tensor_axis {where.tensor_axes}, but "
                    f"it is {width}, of shape {getattr(params, name).shape}."
                )
        _check_blocks(params, where)
    if not where.expert_axes and config.implementation == "pallas":
        raise ValueError(
            'implementation="pallas" exchanges rows between the ranks of expert_axis '
            f"{config.expert_axis!r}, and there is no mesh with that axis here; set one with "
            "jax.set_mesh, or leave implementation at None."
        )
