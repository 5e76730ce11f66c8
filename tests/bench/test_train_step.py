"""Tests of the training step: it agrees on all meshes and numbers of microbatches."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec
from support.jaxprs import executions
from support.meshes import mesh

from jax_ep.bench import train_step
from jax_ep.bench.decoder import MODELS, Decoder
from jax_ep.bench.train_step import Objective, TrainState

SEQ_LEN = 16
CONFIG = dataclasses.replace(MODELS["tiny"], hidden=32, mlp_dim=32, head_dim=8, num_layers=1)
MODEL = Decoder(CONFIG, dtype=jnp.float32, loss_chunk=16, moe={"selection_bias": True})
OPTIMIZER = optax.adamw(1e-3)
OBJECTIVE = Objective(bias_rate=0.25)


def make_mesh(*shape: int) -> Mesh:
    return mesh(shape, ("data", "expert", "tensor", "fsdp")[: len(shape)])


@functools.cache
def one_step(shape: tuple[int, ...], microbatches: int) -> tuple[TrainState, dict]:
    """Runs one step on 8 fixed sequences; returns the state and the metrics as NumPy arrays."""
    with jax.set_mesh(make_mesh(*shape)):
        layout = train_step.make_layout(MODEL, OPTIMIZER, make_mesh(*shape), SEQ_LEN)
        state = train_step.init_state(MODEL, OPTIMIZER, layout, SEQ_LEN)
        step = train_step.make_train_step(MODEL, OPTIMIZER, layout, OBJECTIVE)
        tokens = jax.random.randint(jax.random.key(1), (8, SEQ_LEN + 1), 0, CONFIG.vocab)
        batches = tokens.reshape(microbatches, -1, SEQ_LEN + 1)
        state, metrics = step(state, jax.device_put(batches, layout.batch))
    mu = state.opt_state[0].mu
    for parts in (mu, state.params):
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, parts, layout.state.params))
    return jax.tree.map(np.asarray, (state, metrics))


def test_a_step():
    state, metrics = one_step((1, 1), 1)
    assert state.step == 1
    assert metrics["loss"] == pytest.approx(np.log(CONFIG.vocab), rel=0.1)
    assert metrics["expert_counts"].shape == (1, CONFIG.num_experts)
    assert metrics["expert_counts"].sum() == 8 * SEQ_LEN * CONFIG.num_experts_per_token
    assert metrics["num_dropped"] == 0 and metrics["grad_norm"] > 0
    # The selection bias of an expert with more tokens than the mean falls, that of others rises.
    counts = metrics["expert_counts"][0]
    bias = state.router_state["layers_0"]["mlp"]["gate"]["bias"]
    np.testing.assert_array_equal(bias, 0.25 * np.sign(counts.mean() - counts))
    assert np.any(bias)


def agree(shape: tuple[int, ...], microbatches: int, **tolerance: float) -> None:
    state, metrics = one_step(shape, microbatches)
    want, want_metrics = one_step((1, 1), 1)
    np.testing.assert_array_equal(metrics["expert_counts"], want_metrics["expert_counts"])
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-5)
    compare = functools.partial(np.testing.assert_allclose, **tolerance)
    # Compare the gradients: after one step, Adam's first moments are a tenth of them.
    jax.tree.map(compare, state.opt_state[0].mu, want.opt_state[0].mu)
    jax.tree.map(np.testing.assert_array_equal, state.router_state, want.router_state)


@pytest.mark.slow
@pytest.mark.needs_devices(8)
@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2), (1, 2, 2, 2)])
def test_the_mesh_does_not_matter(shape):
    agree(shape, 1, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_microbatches_add_up():
    """The gradients of two microbatches must add up to those of the whole batch, roughly.

    They differ a little, since each microbatch has its own load-balance loss.
    """
    agree((1, 1), 2, rtol=0.05, atol=2e-4)


@pytest.mark.needs_devices(8)
def test_states_are_split_over_the_axes_that_hold_copies():
    layout = train_step.make_layout(MODEL, OPTIMIZER, make_mesh(4, 2), SEQ_LEN)
    experts = layout.params["layers_0"]["mlp"]["wi_0"]
    assert experts.spec == PartitionSpec("expert", None, None)
    parts = layout.state.params
    assert layout.state.opt_state[0].mu == parts
    assert layout.state.opt_state[0].count.spec == PartitionSpec()
    # Of 8 experts, 2 ranks have 4 each, which 4 ranks along "data" split further.
    assert parts["layers_0"]["mlp"]["wi_0"].spec == PartitionSpec(("expert", "data"), None, None)
    assert parts["norm"]["scale"].spec == PartitionSpec(("data", "expert"))
    assert parts["embed_tokens"]["embedding"].spec == PartitionSpec(("data", "expert"), None)
    # The projection's 4 heads cannot be split over 8 devices, but the 8 columns of a head can.
    o_proj = parts["layers_0"]["self_attn"]["o_proj"]["kernel"]
    assert o_proj.spec == PartitionSpec(None, ("data", "expert"), None)


@pytest.mark.needs_devices(8)
def test_fsdp_splits_every_matrix():
    with jax.set_mesh(mesh := make_mesh(1, 2, 1, 4)):
        layout = train_step.make_layout(MODEL, OPTIMIZER, mesh, SEQ_LEN)
        state = train_step.init_state(MODEL, OPTIMIZER, layout, SEQ_LEN, only_shapes=True)
    for x in jax.tree.leaves(state.params):
        parts = x.size // np.prod(x.sharding.shard_shape(x.shape))
        assert parts >= 4 or x.ndim == 1, x


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (1, 2, 1, 4), (2, 2, 1, 2)])
def test_microbatches_share_their_quantized_experts(shape, monkeypatch):
    """A step must quantize each expert matrix once for all microbatches.

    The gradients must equal those without sharing.
    """
    if np.prod(shape) > len(jax.devices()):
        pytest.skip(f"needs {np.prod(shape)} devices")
    # Two ranks along "fsdp" split the quantized matrices, too. Parts of four ranks are no blocks.
    config = dataclasses.replace(CONFIG, hidden=256, mlp_dim=128)
    mesh = make_mesh(*shape)
    tokens = jax.random.randint(jax.random.key(1), (2, 8, SEQ_LEN + 1), 0, config.vocab)

    model = Decoder(config, dtype=jnp.float32, moe={"matmul_dtype": "float8_e4m3fn"})

    def step():
        layout = train_step.make_layout(model, OPTIMIZER, mesh, SEQ_LEN)
        state = train_step.init_state(model, OPTIMIZER, layout, SEQ_LEN)
        run = train_step.make_train_step(model, OPTIMIZER, layout, OBJECTIVE)
        number = executions(jax.make_jaxpr(run)(state, tokens).jaxpr, "quantize_float8_matrices")
        state, _ = run(state, jax.device_put(tokens, layout.batch))
        return number, jax.tree.map(np.asarray, state.opt_state[0].mu)

    with jax.set_mesh(mesh):
        once, found = step()
        monkeypatch.setattr(Decoder, "quantize_experts", lambda self, params: None)
        each, want = step()
    assert (once, each) == (3, 2 * 3)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), found, want)


def test_shapes_of_a_state_are_those_of_the_state():
    with jax.set_mesh(make_mesh(1, 1)):
        layout = train_step.make_layout(MODEL, OPTIMIZER, make_mesh(1, 1), SEQ_LEN)
        shapes = train_step.init_state(MODEL, OPTIMIZER, layout, SEQ_LEN, only_shapes=True)
    state, _ = one_step((1, 1), 1)
    assert jax.tree.map(np.shape, state) == jax.tree.map(lambda x: x.shape, shapes)


def test_xla_knows_the_compiler_options():
    add = jax.jit(lambda x: x + 1, compiler_options=train_step.GPU_COMPILER_OPTIONS)
    assert add(1.0) == 2.0
