"""Computes the MoE layer as a pure function, `moe_layer`; both Flax layers call `run_layer`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_ep.moe import fsdp
from jax_ep.moe.call_checks import Call, check_call, check_on_mesh
from jax_ep.moe.config import MoEConfig, check_compute_dtype
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.mesh import AxisRules, LayerMesh, find_mesh
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.params import MoEParams
from jax_ep.moe.rank import Operands, run_over_mesh, run_where_called
from jax_ep.placement.table import Placement


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
    - Outside, it opens its own `shard_map` over the mesh of `jax.set_mesh` or of a `with mesh:`
      statement. Experts are split over `expert_axis`. Tokens are split over `batch_axes` along x's
      leading dimension, and with `sequence_axes` along its sequence dimension, too. If the ranks do
      not divide these dimensions, all dimensions of x but H are flattened, padded and split. With
      `expert_axis=()`, or its default on a mesh without that axis, every rank has all experts (data
      parallelism). Any other axis that the mesh lacks raises an error.
    - Without a mesh, it runs unsharded.

    The layer raises ValueError if wi_0 is sharded, but no mesh is set: every rank would gather all
    experts on each call. It warns if that may be so, if every rank holds all experts of a mesh
    with `expert_axis`, and if an option that needs a mesh is given without one.

    With `tensor_axis`, each of the n ranks along that axis holds F / n columns of its experts, and
    computes them for the tokens of all n ranks. In the caller's `jax.shard_map`, pass each rank its
    own columns of wi_0, wi_1, their biases, wo, and the shared experts.

    The matrices of routed and of shared experts may each be a `QuantizedArray`, which has no
    gradient: differentiating with respect to it raises TypeError. See `expert_mlp`.

    Args:
        params: the parameters of the layer.
        x: [..., H] floating: the tokens. Without tokens, metrics and gradients are 0.
        config: the layer's options.
        mask: [...] bool or integer, or None: tokens with False or 0 go to no routed expert, and the
            metrics do not count them. A masked token may hold NaN or infinities, which reach no
            gradient of a parameter. The shared experts run on it, so its finite values must not
            overflow there; with `config.matmul_dtype`, it is set to 0 instead.
        placement: None, or if wi_0, wi_1 and wo are [P, ...] for P slots, as
            `jax_ep.placement.to_slots` makes them: a `jax_ep.placement.Placement` of this layer for
            the ranks along `expert_axis`; a single rank takes any. A new one does not recompile
            the program. All copies of an expert get the same gradient.
        router_x: [..., H'] floating, or None for x: the input of the gate [H', E], if it differs
            from the experts' input (Gemma 4; Nemotron's latent experts).
        topk_idx: [..., K] integer expert ids, or None: choices made by the caller, where -1 chooses
            no expert. The gate then only computes their weights (DeepSeek-V4's hash layers). With
            `config.router`, topk_weights must be given too.
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
    call = Call(x, mask, router_x, topk_idx, topk_weights)
    return run_layer(params, call, config, placement, quantized_experts)


def run_layer(
    params: MoEParams,
    call: Call,
    config: MoEConfig,
    placement: Placement | None,
    quantized: QuantizedExperts | None,
    *,
    axis_rules: AxisRules = (),
    in_init: bool | None = None,
) -> tuple[jax.Array, MoEMetrics]:
    """Runs `moe_layer`; `axis_rules` say how parameters are split where types do not show it.

    They are used for warnings and, where `config.fsdp_axes` is None, for the FSDP axes. `in_init`
    is whether Linen's `init` makes the parameters in this call; other layers give None.
    """
    check_call(params, call, config)
    if config.num_slots is None and isinstance(placement, Placement):
        config = dataclasses.replace(config, num_slots=placement.expert_of_slot.shape[-1])
    where = find_mesh(config, call.x)
    check_on_mesh(params, config, placement, quantized, where, axis_rules, in_init)
    # If none of these three is given, nothing says that parameters are split over FSDP axes.
    if config.fsdp_axes or axis_rules or where.types_show_more_axes(params):
        where = fsdp.with_fsdp_axes(where, params, config, axis_rules)
    config = _resolved(config, params, call.x, where)
    if call.mask is not None:
        call = call._replace(mask=call.mask.astype(jnp.bool_))
    return _layer(Operands(params, call, placement, quantized), config=config, where=where)


def _resolved(config: MoEConfig, params: MoEParams, x: jax.Array, where: LayerMesh) -> MoEConfig:
    """Replaces None in `config`: dtypes, and the implementation where there is no expert axis."""
    dtype = config.dtype
    if dtype is None:
        for name, array in (("x", x), ("wi_0", params.wi_0)):
            hint = "; set dtype, and wire_dtype for float8 rows on the wire"
            check_compute_dtype(array.dtype, hint, name=f"the dtype of {name}")
        # The caller may have set "strict" promotion, under which `result_type` may raise.
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
        config, dtype=jnp.dtype(dtype), router_dtype=router_dtype, implementation=implementation
    )


# The layer is jitted, so that layers with equal configurations are traced only once, and calls
# outside any jit are compiled, too.
@functools.partial(jax.jit, static_argnames=("config", "where"))
def _layer(operands: Operands, config: MoEConfig, where: LayerMesh) -> tuple[jax.Array, MoEMetrics]:
    run = run_where_called if where.mesh is None else run_over_mesh
    return run(operands, config, where)
