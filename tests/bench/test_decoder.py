"""Tests of the decoder that the bench measures and the example trains: loss, sizes, weights."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import Mesh
from support.meshes import mesh
from support.selection import quick

from jax_ep.bench.decoder import (
    MODELS,
    REMAT,
    Decoder,
    axis_rules,
    cross_entropy,
    decoder_mesh,
    fsdp_axes,
    rotary,
)

CONFIG = dataclasses.replace(MODELS["tiny"], hidden=32, mlp_dim=32, head_dim=8, num_layers=1)


def make_mesh(*shape: int) -> Mesh:
    return mesh(shape, ("data", "expert", "tensor", "fsdp")[: len(shape)])


def whole_loss(x: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logits = jnp.dot(x, head, preferred_element_type=jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(losses * (targets >= 0)) / jnp.sum(targets >= 0)


@pytest.mark.needs_devices(8)
@pytest.mark.parametrize(
    ("shape", "chunk"),
    quick([((), 5), ((), 1000), ((8,), 3), ((2, 2, 2), 3), ((1, 2, 2, 2), 3)], ((1, 2, 2, 2), 3)),
)
def test_the_loss_in_chunks_is_the_loss(shape, chunk):
    """The loss in chunks of tokens must equal the loss of all logits at once, and so its gradients.

    Cases: chunks that do not divide the tokens, masked targets, a vocabulary split over devices.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    x, head = jax.random.normal(keys[0], (8, 7, 16)), jax.random.normal(keys[1], (16, 24))
    targets = jax.random.randint(keys[2], (8, 7), -1, 24)
    want, want_grads = jax.value_and_grad(whole_loss, (0, 1))(x, head, targets)

    def loss(x, head):
        return 3 * cross_entropy(x, head, targets, chunk=chunk)

    with jax.set_mesh(make_mesh(*shape)) if shape else contextlib.nullcontext():
        got, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, head)
    np.testing.assert_allclose(got, 3 * want, rtol=1e-5)
    for grad, want_grad in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(grad, 3 * want_grad, rtol=1e-4, atol=1e-6)


def largest_arrays(text: str, columns: int) -> int:
    """Returns the elements of a compiled program's largest array with a dimension of `columns`."""
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\b\w+\[([\d,]+)\]", text)]
    return max((int(np.prod(shape)) for shape in shapes if columns in shape), default=0)


def test_logits_are_never_whole():
    """Logits may exist only in chunks: no larger array may have the vocabulary's columns."""
    tokens, hidden, vocab, chunk = 512, 8, 1009, 16
    x = jax.ShapeDtypeStruct((4, tokens // 4, hidden), jnp.float32)
    head = jax.ShapeDtypeStruct((hidden, vocab), jnp.float32)
    targets = jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32)

    def largest(loss) -> int:
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, head, targets).compile()
        return largest_arrays(compiled.as_text(), vocab)

    assert largest(lambda *args: cross_entropy(*args, chunk=chunk)) == chunk * vocab
    assert largest(whole_loss) >= tokens * vocab


def test_active_parameters_are_those_that_a_token_meets():
    config = dataclasses.replace(CONFIG, num_layers=2, num_shared_experts=1)
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    variables = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens)
    sizes = {
        jax.tree_util.keystr(path): x.size
        for path, x in jax.tree_util.tree_leaves_with_path(nn.unbox(variables["params"]))
    }
    routed = sum(size for name, size in sizes.items() if re.search(r"'w[io](_\d)?'", name))
    unused = routed * (1 - config.num_experts_per_token / config.num_experts)
    embedding = config.vocab * config.hidden
    active = config.active_params()
    assert active == sum(sizes.values()) - unused - embedding
    assert config.training_flops_per_token(10) == 6 * (active + 2 * 10 * 4 * 8)


def test_published_sizes():
    """Qwen3-30B-A3B must have 30.5 billion parameters, of which 3.3 billion are active.

    The active parameters leave out one of the two embedding matrices.
    """
    config = MODELS["qwen3-30b-a3b"]
    embedding = config.vocab * config.hidden
    assert config.active_params() + embedding == pytest.approx(3.35e9, rel=0.01)
    everything = dataclasses.replace(config, num_experts_per_token=config.num_experts)
    assert everything.active_params() + embedding == pytest.approx(30.5e9, rel=0.01)


def test_rotary_keeps_the_angle_between_tokens():
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, 8))
    first, second = (rotary(x, jnp.array([p]), 1e4)[0, 0, 0] for p in (3, 13))
    shifted = [rotary(x, jnp.array([p]), 1e4)[0, 0, 0] for p in (20, 30)]
    np.testing.assert_allclose(first @ second, shifted[0] @ shifted[1], rtol=1e-4)
    assert abs(first @ second - x[0, 0, 0] @ x[0, 0, 0]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_remat_keeps_the_gradients(remat):
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, CONFIG.vocab)

    def gradients(remat: str):
        model = Decoder(CONFIG, dtype=jnp.float32, remat=remat)
        params = nn.unbox(jax.jit(model.init)(jax.random.key(0), tokens[:, :-1]))
        loss = jax.grad(lambda params: model.apply(params, tokens[:, :-1], tokens[:, 1:])[0])
        return jax.jit(loss)(params)

    want = gradients("none")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients(remat), want
    )


@pytest.mark.needs_devices(4)
def test_a_mesh_leaves_out_optional_axes_of_one_rank():
    def axes(**sizes: int) -> dict[str, int]:
        return dict(decoder_mesh(jax.devices()[:4], sizes).shape)

    assert axes(data=1, fsdp=1, expert=4, tensor=1) == {"data": 1, "expert": 4}
    assert axes(data=1, fsdp=2, expert=2) == {"data": 1, "fsdp": 2, "expert": 2}
    assert axes(data=2, fsdp=1, expert=1, tensor=2) == {"data": 2, "expert": 1, "tensor": 2}


@pytest.mark.needs_devices(8)
def test_fsdp_splits_experts_if_their_number_allows_it():
    mesh = make_mesh(1, 2, 2, 2)
    both = {"exp": ("expert", "fsdp"), "embed": ("fsdp",)}
    of_tensor = dict.fromkeys(("mlp", "heads", "vocab"), ("tensor",))
    # The first rule takes the axis "fsdp" of a parameter, so the experts' must come first.
    assert axis_rules(8, mesh) == [*(both | of_tensor).items()]
    assert fsdp_axes(8, mesh) == {"exp": "fsdp", "embed": "fsdp"}
    # Six experts cannot be split over four ranks.
    assert dict(axis_rules(6, mesh)) == {"exp": ("expert",), "embed": ("fsdp",)} | of_tensor
    assert fsdp_axes(6, mesh) == {"embed": "fsdp"}
    assert fsdp_axes(8, make_mesh(1, 2, 2)) == {}
