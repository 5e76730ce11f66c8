"""Tests of the loss in chunks: it is the loss of all logits, which are never whole."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.meshes import model_mesh
from support.selection import quick

from jax_ep.models.loss import cross_entropy


def whole_loss(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.dot(x, head.T, preferred_element_type=jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(losses * (targets >= 0)) / jnp.sum(targets >= 0)


@pytest.mark.needs_devices(8)
@pytest.mark.parametrize(
    ("shape", "chunk"),
    quick([((), 5), ((), 1000), ((1, 2, 2, 2), 3)], ((), 5)),
)
def test_the_loss_in_chunks_is_the_loss(shape, chunk):
    keys = jax.random.split(jax.random.key(0), 3)
    x, head = jax.random.normal(keys[0], (8, 7, 16)), jax.random.normal(keys[1], (24, 16))
    targets = jax.random.randint(keys[2], (8, 7), -1, 24)
    want, want_grads = jax.jit(jax.value_and_grad(whole_loss, (0, 1)))(x, head, targets)

    def loss(x, head):
        return 3 * cross_entropy(x, head, targets, chunk=chunk)

    with jax.set_mesh(model_mesh(*shape)) if shape else contextlib.nullcontext():
        got, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, head)
    np.testing.assert_allclose(got, 3 * want, rtol=1e-5)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(grad, 3 * want_grad, rtol=1e-4, atol=1e-6)


def largest_arrays(text: str, columns: int) -> int:
    """Returns the elements of a compiled program's largest array with a dimension of `columns`."""
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\b\w+\[([\d,]+)\]", text)]
    return max((int(np.prod(shape)) for shape in shapes if columns in shape), default=0)


def test_logits_are_never_whole():
    tokens, hidden, vocab, chunk = 512, 8, 1009, 16
    x = jax.ShapeDtypeStruct((4, tokens // 4, hidden), jnp.float32)
    head = jax.ShapeDtypeStruct((vocab, hidden), jnp.float32)
    targets = jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32)

    def largest(loss) -> int:
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, head, targets).compile()
        return largest_arrays(compiled.as_text(), vocab)

    assert largest(lambda *args: cross_entropy(*args, chunk=chunk)) == chunk * vocab
    assert largest(whole_loss) >= tokens * vocab
