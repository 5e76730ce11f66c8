"""Collectives that choose their algorithm: all_reduce, all_gather, reduce_scatter, all_to_all.

Everything is called inside `jax.shard_map` over `axis_name`, a mesh axis or a tuple of them, of N
ranks. All are differentiable, forwards and backwards, and their gradients are those of the
functions of `jax.lax` that they stand for.

Algorithms. `algorithm=None` looks up what was measured to be the fastest for the operation, the
number of ranks, the bytes and the GPU generation (`jax_ep.collectives.table`); on any other
machine it is "xla". A named algorithm that cannot serve is an error that says why.

  "xla"       the function of `jax.lax`; any platform, any number of hosts;
  "one_shot"  all_reduce: every rank reads all ranks' inputs and sums them;
  "two_shot"  all_reduce: every rank sums its shard and writes the sum to all ranks;
  "direct"    the others: every rank reads, or writes, what it is to get, or give, at its place;
  "one_shot_ll", "two_shot_ll", "ll"
              the same by LL (`pallas_kernels.ll`): data are sent to memory that the library keeps
              on every GPU, and there polled, so that no rank waits for another before it sends.
              The fastest for up to some megabytes, and there is room for no more: 4 MiB of x of
              one_shot_ll and all_gather, 2 N MiB of two_shot_ll, 4 N MiB of the others;
  "multimem"  all_reduce: JAX's own kernels, in which the NVLink switch sums float32 and
              broadcasts; needs multicast memory, and is never chosen unless it is named.

The library's kernels (all but "xla" and "multimem") need the GPUs of one process. They sum in
float32, in rank order, and round once: all ranks get the same bits, on every run.

LL, and so None, counts calls. Two programs that have two or more GPUs in common must be started in
the same order on both, so start them from one thread; and XLA must not be told to overlap the calls
of a program (`xla_gpu_command_buffer_scheduling_mode`, which XLA_FLAGS are searched for, or streams
of one's own). Nothing detects it otherwise, and sums are wrong. A rank waits for its peers' data
within the kernel: one that is held up for JAX_EP_TIMEOUT_SECONDS (default 100) ends the program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.checks import AxisName, as_axes
from jax_ep.collectives import primitives
from jax_ep.collectives.primitives import ALGORITHMS, Algorithm
from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import match_varying, varying_axes


def all_reduce(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """The sum of x over ranks, on every rank: `jax.lax.psum(x, axis_name)`.

    Args:
      x: floating, any shape.
      axis_name: the mesh axis, or tuple of axes, to sum over.
      algorithm: "one_shot_ll", "two_shot_ll", "one_shot", "two_shot", "xla", "multimem", or None
        for the best that serves.

    Returns:
      x's shape and dtype. Under `check_vma=True` it no longer varies over `axis_name`.

    Raises:
      ValueError, TypeError: an argument does not fit, or the named algorithm cannot serve here;
        the message says why. One that sums takes bfloat16, float16 and float32 if it is not "xla";
        None and "xla" take any floating dtype.
    """
    return _collective("all_reduce", x, axis_name, algorithm)


def all_gather(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """All ranks' x, one after another: `jax.lax.all_gather(x, axis_name, tiled=True)`.

    Args:
      x: [n, ...] floating.
      axis_name: the mesh axis, or tuple of axes, to gather over.
      algorithm: "ll", "direct", "xla", or None for the best that serves.

    Returns:
      [N * n, ...]: rank r's x at [r * n : (r + 1) * n]. Its transpose is `reduce_scatter`.

    Raises:
      ValueError, TypeError: as for `all_reduce`.
    """
    return _collective("all_gather", x, axis_name, algorithm)


def reduce_scatter(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """A shard of the sum of x over ranks: `jax.lax.psum_scatter(x, axis_name, tiled=True)`.

    Args:
      x: [N * n, ...] floating.
      axis_name: the mesh axis, or tuple of axes, to sum over.
      algorithm: "ll", "direct", "xla", or None for the best that serves.

    Returns:
      [n, ...]: on rank r the sum of all ranks' x[r * n : (r + 1) * n]. Its transpose is
      `all_gather`.

    Raises:
      ValueError: the first axis of x is not a multiple of N, as `jax.lax.psum_scatter` asks for
        too; pad it.
      ValueError, TypeError: as for `all_reduce`.
    """
    return _collective("reduce_scatter", x, axis_name, algorithm)


def all_to_all(x: jax.Array, axis_name: AxisName, *, algorithm: Algorithm = None) -> jax.Array:
    """Every rank sends each rank a part: `jax.lax.all_to_all(x, axis_name, 0, 0, tiled=True)`.

    Args:
      x: [N * n, ...] floating: x[r * n : (r + 1) * n] is for rank r.
      axis_name: the mesh axis, or tuple of axes, to exchange over.
      algorithm: "ll", "direct", "xla", or None for the best that serves.

    Returns:
      [N * n, ...]: [r * n : (r + 1) * n] is from rank r. It is its own transpose.

    Raises:
      ValueError: the first axis of x is not a multiple of N, as `jax.lax.all_to_all` asks for too;
        pad it.
      ValueError, TypeError: as for `all_reduce`.
    """
    return _collective("all_to_all", x, axis_name, algorithm)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    axis_name: AxisName,
    *,
    eps: float = 1e-6,
    algorithm: Algorithm = None,
) -> tuple[jax.Array, jax.Array]:
    """What follows a row-parallel matmul in a transformer block, in one pass over the data:

        new_residual = all_reduce(x) + residual
        normalized = new_residual / sqrt(mean(new_residual ** 2) + eps) * scale

    The mean is over the last axis. Arithmetic is float32; the sum over ranks is rounded to x's
    dtype and new_residual to residual's before they are used, as separate steps would do. The
    fusion is TokenWeave's (Gond et al., 2025, arXiv:2505.11329).

    Args:
      x: [..., H] floating: this rank's part of the sum.
      residual: [..., H] floating, x's shape; usually the same on all ranks.
      scale: [H] floating.
      axis_name: the mesh axis, or tuple of axes, to sum over.
      eps: added to the mean square.
      algorithm: "fused" (a kernel for H <= 16384; "fused_one_shot" and "fused_two_shot" name its
        two ways, and with "_ll" those by LL, as of `all_reduce`), "unfused" (the best `all_reduce`
        and what XLA makes of the rest), "xla" (`lax.psum` and the same), or None for the best that
        serves.

    Returns:
      normalized (x's dtype) and new_residual (residual's dtype), both [..., H].

    Raises:
      ValueError, TypeError: as for `all_reduce`.
    """
    axes = as_axes(axis_name)
    num_ranks = checks.num_ranks(axes)
    for name, array in (("x", x), ("residual", residual), ("scale", scale)):
        _check_floating(name, array)
    if x.ndim < 1 or residual.shape != x.shape or scale.shape != x.shape[-1:]:
        raise ValueError(
            "x and residual must have one shape [..., H], and scale the shape [H], but x has shape "
            f"{x.shape}, residual {residual.shape} and scale {scale.shape}."
        )
    if _is_for_xla("all_reduce_rms_norm", algorithm, x, num_ranks):
        new_residual = primitives.add(_collective("all_reduce", x, axes, "xla"), residual)
        return primitives.rms_norm(new_residual, scale, eps, x.dtype), new_residual

    # The results vary over what any operand does, but for the axes that x is summed over.
    others = varying_axes(x) - set(axes)
    residual, scale = match_varying((residual, scale), tuple(others))
    (x,) = match_varying((x,), (*axes, *varying_axes(residual)))
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
    params = dict(axis_name=axes, num_ranks=num_ranks, eps=eps, algorithm=algorithm)
    normalized, new_residual = primitives.ep_all_reduce_rms_norm_p.bind(
        primitives.lowered_for_devices(x), residual, scale, **params
    )
    return normalized, new_residual


@_fused.defjvp
def _fused_jvp(axes, num_ranks, eps, algorithm, primals, tangents):
    """The parts of it, of which all but the norm are linear; the norm starts from its input."""
    x, _, scale = primals
    x_dot, residual_dot, scale_dot = tangents
    normalized, new_residual = _fused(axes, num_ranks, eps, algorithm, *primals)
    new_residual_dot = primitives.add(_collective("all_reduce", x_dot, axes, None), residual_dot)
    _, normalized_dot = jax.jvp(
        lambda new_residual, scale: primitives.rms_norm(new_residual, scale, eps, x.dtype),
        (new_residual, scale),
        (new_residual_dot, scale_dot),
    )
    return (normalized, new_residual), (normalized_dot, new_residual_dot)


def _collective(op: str, x: jax.Array, axis_name: AxisName, algorithm: Algorithm) -> jax.Array:
    axes = as_axes(axis_name)
    num_ranks = checks.num_ranks(axes)
    _check_floating("x", x)
    if op != "all_reduce" and x.ndim == 0:
        raise ValueError(f"{op} works along the first axis of x, but x is a scalar.")
    if op in ("reduce_scatter", "all_to_all") and x.shape[0] % num_ranks:
        raise ValueError(
            f"{op}: the first axis of x must be a multiple of the {num_ranks} ranks along {axes}, "
            f"but x has shape {x.shape}; pad it."
        )
    is_for_xla = _is_for_xla(op, algorithm, x, num_ranks)
    (x,) = match_varying((x,), axes)
    if is_for_xla:
        return primitives.xla(op, x, axes) if axes else x
    (out,) = primitives.PRIMITIVES[op].bind(
        primitives.lowered_for_devices(x),
        axis_name=axes,
        num_ranks=num_ranks,
        algorithm=algorithm,
    )
    return out


def _check_floating(name: str, array: Any) -> None:
    checks.check_array(name, array, None, jnp.floating, "(the collectives of jax.lax take any)")


def _is_for_xla(op: str, algorithm: Algorithm, x: jax.Array, num_ranks: int) -> bool:
    """Whether it is sure that XLA serves; ValueError if a named algorithm is sure not to."""
    if algorithm is None:
        return num_ranks == 1 or availability.tracing_unavailable_reason() is not None
    if algorithm not in ALGORITHMS[op]:
        raise ValueError(
            f"algorithm of {op} must be one of {ALGORITHMS[op]} or None, but is {algorithm!r}."
        )
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    on_gpu = device is None or device.platform == "gpu"
    here = None if on_gpu else "it needs NVIDIA GPUs, and the mesh here is of other devices"
    if reason := primitives.unavailable_reason(op, algorithm, x, num_ranks, here):
        raise ValueError(
            f'{op}: algorithm="{algorithm}" cannot serve here: {reason}. algorithm=None picks one '
            "that does."
        )
    return num_ranks == 1 or algorithm == "xla"
