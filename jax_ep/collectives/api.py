"""Defines all_reduce, all_gather, reduce_scatter, all_to_all and all_reduce_rms_norm.

Call each function inside `jax.shard_map` over `axis_name`, a mesh axis or a tuple of mesh axes, of
N ranks. The order of a tuple defines the order of the ranks, and must equal the specs' order. All
functions are differentiable in forward and reverse mode, with the gradients of the functions of
`jax.lax` that they replace.

`algorithm=None` picks the algorithm that was the fastest in measurements with this operation,
number of ranks, number of bytes and GPU generation (`jax_ep.collectives.table`), and "xla" where
there are none. A named algorithm that cannot run raises an error that says why.

  "xla"       the function of `jax.lax`; any platform, any number of hosts.
  "one_shot"  all_reduce: every rank reads all ranks' inputs and sums them.
  "two_shot"  all_reduce: every rank sums its shard and writes the sum to all ranks.
  "direct"    the other collectives: every rank reads or writes peers' buffers in place.
  "one_shot_ll", "two_shot_ll", "ll"
              "one_shot", "two_shot" and "direct" over the low-latency protocol
              (`pallas_kernels.fabric.low_latency`): a rank sends data to symmetric memory, which
              the receiver polls, so no rank waits for a peer before it sends. These algorithms are
              the fastest up to a few megabytes. On a host of up to 4 GPUs, x is at most 4 MiB in
              one_shot_ll and all_gather, 2 N MiB in two_shot_ll, and 4 N MiB in reduce_scatter and
              all_to_all. On a host of more GPUs, each limit is half as large.

The library's kernels (all algorithms but "xla") run between GPUs of one host, in any number of
processes. They sum in float32, in rank order, and round once: all ranks get the same bits, on every
run.

A kernel call communicates with the peer's call of the same number. So all GPUs must run the calls
in the same order, or results are silently wrong:

- Two programs that share two or more GPUs must start in the same order on each of these GPUs. Start
  the programs from one thread.
- XLA must not overlap the kernels of a program. Leave `xla_gpu_command_buffer_scheduling_mode` at
  its default (a concurrent mode in XLA_FLAGS is refused), and use no streams of your own.

If a peer is late by JAX_EP_TIMEOUT_SECONDS (default 100), the program ends with an error.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.checks import AxisName, as_axes
from jax_ep.collectives import primitives, table
from jax_ep.collectives.algorithms import ALGORITHMS, Algorithm, Problem
from jax_ep.collectives.xla import XlaCollectives, add_residual, rms_norm, unfused
from jax_ep.runtime import availability, jax_compat
from jax_ep.runtime.jax_compat import match_varying, varying_axes

# A hint in errors.
_ANY_DTYPE = "(the collectives of jax.lax take any)"


def all_reduce(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """Sums x over the ranks, on every rank, as `jax.lax.psum(x, axis_name)` does.

    Args:
      x: floating, any shape.
      axis_name: the mesh axis, or tuple of axes, of the ranks.
      algorithm: "one_shot_ll" or "two_shot_ll" (over the low-latency protocol), "one_shot",
        "two_shot", "xla", or None for the fastest that can run.

    Returns:
      x's shape and dtype. Under `check_vma=True` it no longer varies over `axis_name`.

    Raises:
      ValueError, TypeError: an argument does not fit, or the named algorithm cannot run here; the
        message says why. Kernels that sum take bfloat16, float16 and float32; None and "xla" take
        any floating dtype.
    """
    return _linear("all_reduce", x, axis_name, algorithm)


def all_gather(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """Concatenates the ranks' x, as `jax.lax.all_gather(x, axis_name, tiled=True)` does.

    Args:
      x: [n, ...] floating.
      axis_name: the mesh axis, or tuple of axes, of the ranks.
      algorithm: "ll" (the low-latency protocol), "direct", "xla", or None for the fastest.

    Returns:
      [N * n, ...]: rank r's x at [r * n : (r + 1) * n]. Its transpose is `reduce_scatter`.

    Raises:
      ValueError, TypeError: as for `all_reduce`.
    """
    return _linear("all_gather", x, axis_name, algorithm)


def reduce_scatter(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """Sums x over the ranks; rank r keeps part r, as `lax.psum_scatter` does with `tiled=True`.

    Args:
      x: [N * n, ...] floating.
      axis_name, algorithm: as for `all_gather`.

    Returns:
      [n, ...]: on rank r the sum of all ranks' x[r * n : (r + 1) * n]. Its transpose is
      `all_gather`.

    Raises:
      ValueError, TypeError: as for `all_reduce`, or if N does not divide the first axis of x.
    """
    return _linear("reduce_scatter", x, axis_name, algorithm)


def all_to_all(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """Sends each rank one part of x, as `jax.lax.all_to_all(x, axis_name, 0, 0, tiled=True)`.

    Args:
      x: [N * n, ...] floating: x[r * n : (r + 1) * n] is for rank r.
      axis_name, algorithm: as for `all_gather`.

    Returns:
      [N * n, ...]: rows [r * n : (r + 1) * n] came from rank r. all_to_all is its own transpose.

    Raises:
      ValueError, TypeError: as for `all_reduce`, or if N does not divide the first axis of x.
    """
    return _linear("all_to_all", x, axis_name, algorithm)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    axis_name: AxisName,
    *,
    eps: float = 1e-6,
    algorithm: Algorithm = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums x over the ranks, adds a residual and normalizes, in one pass over the data.

    This follows a row-parallel matmul in a transformer block:

        new_residual = all_reduce(x) + residual
        normalized = new_residual / sqrt(mean(new_residual ** 2) + eps) * scale

    The mean is over the last axis. Arithmetic is float32. As in separate steps, the sum over ranks
    is rounded to x's dtype and new_residual to residual's. The fusion is TokenWeave's (Gond et al.,
    2025, arXiv:2505.11329).

    Args:
      x: [..., H] floating: this rank's term of the sum over ranks.
      residual: [..., H] floating, x's shape; usually the same on all ranks.
      scale: [H] floating: the weights of the norm, by which columns are multiplied.
      axis_name: the mesh axis, or tuple of axes, of the ranks.
      eps: a number >= 0 that is added to the mean square.
      algorithm: "fused" (one kernel, for H <= 16384 and operands of bfloat16, float16 or float32:
        "fused_one_shot" or "fused_two_shot", whichever is faster for the size),
        "fused_one_shot_ll" or "fused_two_shot_ll" (one kernel over the low-latency protocol),
        "unfused" (the fastest `all_reduce`, then XLA), "xla" (`jax.lax.psum`, then XLA), or None
        for the fastest that can run.

    Returns:
      normalized (x's dtype) and new_residual (residual's dtype), both [..., H].

    Raises:
      ValueError, TypeError: as for `all_reduce`.
    """
    axes = as_axes(axis_name)
    num_ranks = checks.num_ranks(axes)
    for name, array in (("x", x), ("residual", residual), ("scale", scale)):
        checks.check_array(name, array, None, jnp.floating, _ANY_DTYPE)
    if x.ndim < 1 or residual.shape != x.shape or scale.shape != x.shape[-1:]:
        raise ValueError(
            "x and residual must have one shape [..., H], and scale the shape [H], but x has shape "
            f"{x.shape}, residual {residual.shape} and scale {scale.shape}."
        )
    checks.check_number("eps", eps, may_be_zero=True)
    operands = x, residual, scale
    problem = Problem("all_reduce_rms_norm", operands, num_ranks, axes, availability.TRACED)
    if _runs_on_xla(problem, algorithm):
        return unfused(lambda x: all_reduce(x, axes, algorithm="xla"), x, residual, scale, eps=eps)

    # Under check_vma, the results vary over each mesh axis over which residual or scale varies, and
    # over each axis over which x varies but is not summed. The casts make all operands vary over
    # these axes, and x over the summed axes, too.
    unsummed_axes = varying_axes(x) - set(axes)
    residual, scale = match_varying((residual, scale), tuple(unsummed_axes))
    x = match_varying(x, (*axes, *varying_axes(residual)))
    return _fused(axes, num_ranks, float(eps), algorithm, x, residual, scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _fused(
    axes: tuple[str, ...],
    num_ranks: int,
    eps: float,
    algorithm: Algorithm,
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs the primitive of `all_reduce_rms_norm`, which has no gradient of its own."""
    params = dict(axis_name=axes, num_ranks=num_ranks, eps=eps, algorithm=algorithm)
    normalized, new_residual = primitives.ep_all_reduce_rms_norm_p.bind(
        jax_compat.lowered_anew_for_other_devices(x), residual, scale, **params
    )
    return normalized, new_residual


@_fused.defjvp
def _fused_jvp(axes, num_ranks, eps, algorithm, primals, tangents):
    x, _, scale = primals
    x_dot, residual_dot, scale_dot = tangents
    normalized, new_residual = _fused(axes, num_ranks, eps, algorithm, *primals)
    new_residual_dot = add_residual(all_reduce(x_dot, axes), residual_dot)
    _, normalized_dot = jax.jvp(
        lambda new_residual, scale: rms_norm(new_residual, scale, eps, x.dtype),
        (new_residual, scale),
        (new_residual_dot, scale_dot),
    )
    return (normalized, new_residual), (normalized_dot, new_residual_dot)


def _linear(op: str, x: jax.Array, axis_name: AxisName, algorithm: Algorithm) -> jax.Array:
    """Checks the arguments of collective `op`; computes it by XLA or by its primitive."""
    axes = as_axes(axis_name)
    num_ranks = checks.num_ranks(axes)
    checks.check_array("x", x, None, jnp.floating, _ANY_DTYPE)
    if op != "all_reduce" and x.ndim == 0:
        raise ValueError(f"{op} works along the first axis of x, but x is a scalar.")
    if op in ("reduce_scatter", "all_to_all") and x.shape[0] % num_ranks:
        raise ValueError(
            f"{op}: the first axis of x must be a multiple of the {num_ranks} ranks along {axes}, "
            f"but x has shape {x.shape}; pad it."
        )
    problem = Problem(op, (x,), num_ranks, axes, availability.TRACED)
    runs_on_xla = _runs_on_xla(problem, algorithm)
    x = match_varying(x, axes)
    if 0 in x.shape and op in ("all_gather", "reduce_scatter"):
        # `jax.lax` refuses an empty axis, for which the result only has another shape.
        rows = x.shape[0] * num_ranks if op == "all_gather" else x.shape[0] // num_ranks
        return x.reshape(rows, *x.shape[1:])
    if runs_on_xla:
        # Over no axes, x is the only rank's, and no collective changes it.
        return getattr(XlaCollectives(axes), op)(x) if axes else x
    (out,) = primitives.LINEAR[op].bind(
        jax_compat.lowered_anew_for_other_devices(x),
        axis_name=axes,
        num_ranks=num_ranks,
        algorithm=algorithm,
    )
    return out


def _runs_on_xla(problem: Problem, algorithm: Algorithm) -> bool:
    """Returns whether tracing shows that XLA runs the call; raises if `algorithm` cannot run."""
    ALGORITHMS[problem.op].check(algorithm, problem)
    if algorithm is None:
        # This call raises, on CPUs too, if the file JAX_EP_COLLECTIVES_TABLE is not a valid table.
        table.current()
    if problem.num_ranks == 1 or 0 in problem.operands[0].shape:
        return True
    if algorithm is None:
        return availability.tracing_unavailable_reason() is not None
    return algorithm == "xla"
