"""Computes the cross-entropy of a decoder's output without holding all logits in memory."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_ep.models.axes import FSDP_AXIS, TENSOR_AXIS


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy(
    x: jax.Array, head: jax.Array, targets: jax.Array, chunk: int = 1024
) -> jax.Array:
    """Computes the mean cross-entropy of x @ head.T without holding all logits in memory.

    On the ambient mesh, sequences are split over all axes but "tensor", the vocabulary is split
    over "tensor" and, if it can be, over "fsdp". Each device computes the logits of `chunk` of its
    tokens at a time. Under differentiation, the forward pass also computes the gradients of each
    chunk, so the backward pass recomputes no logits. The gradient of `head` is accumulated in
    float32 and summed over devices once, after the last chunk.

    x is [B, S, H] floating, and B a multiple of the devices that sequences are split over. `head`
    [V, H] floating is cast to the dtype of x. `targets` are [B, S] int32 token ids; the mean, []
    float32 in nats, leaves out negative ones.
    """
    found = _sums_on_mesh(x, head, targets, chunk, gradients=False)
    return found.loss / found.number


def _cross_entropy_fwd(x: jax.Array, head: jax.Array, targets: jax.Array, chunk: int) -> Any:
    found = _sums_on_mesh(x, head, targets, chunk, gradients=True)
    # A dtype cannot be saved, so an array of zeros keeps the dtype of the gradient of `head`.
    return found.loss / found.number, (found, jnp.zeros((), head.dtype))


def _cross_entropy_bwd(chunk: int, saved: Any, g: jax.Array) -> Any:
    (_, number, dx, dhead), like_head = saved
    scale = g / number
    return (scale * dx).astype(dx.dtype), (scale * dhead).astype(like_head.dtype), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


class _Sums(NamedTuple):
    """The sum of the losses, the number of targets (at least 1), and the gradients of the sum."""

    loss: Any  # [] float32
    number: Any  # [] float32
    dx: Any = None  # as x
    dhead: Any = None  # [V, H] float32


def _sums_on_mesh(
    x: jax.Array, head: jax.Array, targets: jax.Array, chunk: int, gradients: bool
) -> _Sums:
    """Computes the sums for `cross_entropy`; without `gradients`, dx and dhead are None."""
    head = head.astype(x.dtype)
    mesh = jax.sharding.get_abstract_mesh()
    batch = tuple(name for name in mesh.axis_names if name != TENSOR_AXIS)
    tensor = tuple(name for name in mesh.axis_names if name == TENSOR_AXIS)
    fsdp = tuple(name for name in mesh.axis_names if name == FSDP_AXIS)
    # `head` is split over "fsdp", too, if the ranks divide the vocabulary.
    if head.shape[0] % math.prod(mesh.shape[name] for name in (*tensor, *fsdp)):
        fsdp = ()
    on_rank = functools.partial(
        _sums_on_rank, chunk=chunk, gradients=gradients, batch=batch, tensor=tensor, fsdp=fsdp
    )
    if mesh.empty:
        return on_rank(x, head, targets)
    whole, rows, of_head = PartitionSpec(), PartitionSpec(batch), PartitionSpec((*tensor, *fsdp))
    grads = (rows, of_head) if gradients else (None, None)
    return jax.shard_map(
        on_rank,
        in_specs=(rows, of_head, rows),
        out_specs=_Sums(whole, whole, *grads),
        # JAX needs this check only to differentiate through a shard_map. It never differentiates
        # this one, because the custom VJP computes the gradients.
        check_vma=False,
    )(x, head, targets)


def _sums_on_rank(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    chunk: int,
    gradients: bool,
    batch: tuple[str, ...],
    tensor: tuple[str, ...],
    fsdp: tuple[str, ...],
) -> _Sums:
    """Computes the losses of a rank's tokens, `chunk` at a time, and the sums over all ranks."""
    # Sequences are split over the mesh axes `batch`, which include `fsdp`, and the vocabulary of
    # `head` over `tensor` and `fsdp`. A psum or pmax over no axes, (), returns its operand.
    if fsdp:
        head = lax.all_gather(head, fsdp, axis=0, tiled=True)
    columns, hidden = head.shape
    num_tokens = targets.size
    chunk = min(chunk, num_tokens)
    padding = -num_tokens % chunk
    tokens = jnp.pad(x.reshape(num_tokens, hidden), ((0, padding), (0, 0)))
    wanted = jnp.pad(targets.reshape(num_tokens), (0, padding), constant_values=-1)
    # This rank computes the logits of `columns` tokens of the vocabulary, from `first` on.
    first = lax.axis_index(tensor) * columns if tensor else 0

    def step(carry: Any, part: tuple[jax.Array, jax.Array]) -> Any:
        loss, dhead = carry
        # The tokens of one chunk, [chunk, H], and their targets, [chunk].
        rows, target = part
        # The softmax over the whole vocabulary is exponentials / total.
        logits = jnp.dot(rows, head.T, preferred_element_type=jnp.float32)
        top = lax.pmax(jnp.max(logits, axis=1), tensor)
        exponentials = jnp.exp(logits - top[:, None])
        total = lax.psum(jnp.sum(exponentials, axis=1), tensor)
        # The logit of each target, from the rank that has its column.
        column = target - first
        is_here = (0 <= column) & (column < columns)
        logit = jnp.take_along_axis(logits, jnp.clip(column, 0, columns - 1)[:, None], axis=1)
        chosen = lax.psum(jnp.where(is_here, logit[:, 0], 0), tensor)
        is_counted = target >= 0
        loss += jnp.sum(jnp.where(is_counted, top + jnp.log(total) - chosen, 0))
        if not gradients:
            return (loss, dhead), None
        # The gradients of the sum of the losses: first with respect to the logits.
        is_target = jnp.arange(columns) == column[:, None]
        dlogits = jnp.where(is_counted[:, None], exponentials / total[:, None] - is_target, 0)
        dlogits = dlogits.astype(x.dtype)
        drows = jnp.dot(dlogits, head, preferred_element_type=jnp.float32)
        dhead += jnp.dot(dlogits.T, rows, preferred_element_type=jnp.float32)
        return (loss, dhead), lax.psum(drows, tensor).astype(x.dtype)

    zeros = jnp.zeros(head.shape, jnp.float32) if gradients else None
    chunks = tokens.reshape(-1, chunk, hidden), wanted.reshape(-1, chunk)
    (loss, dhead), dx = lax.scan(step, (jnp.float32(0), zeros), chunks)
    number = lax.psum(jnp.sum(targets >= 0, dtype=jnp.float32), batch)
    sums = _Sums(lax.psum(loss, batch), jnp.maximum(number, 1))
    if not gradients:
        return sums
    dx = dx.reshape(-1, hidden)[:num_tokens].reshape(x.shape)
    if fsdp:
        dhead = lax.psum_scatter(dhead, fsdp, scatter_dimension=0, tiled=True)
    others = tuple(name for name in batch if name not in fsdp)
    return sums._replace(dx=dx, dhead=lax.psum(dhead, others))
