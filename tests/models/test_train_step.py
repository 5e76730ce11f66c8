"""Tests of the training step: it agrees on all meshes and numbers of microbatches."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from support.jaxprs import executions
from support.meshes import model_mesh

from jax_ep.models import train_step
from jax_ep.models.config import MODELS
from jax_ep.models.decoder import Decoder
from jax_ep.models.train_step import Layout, Objective, TrainState

SEQ_LEN = 16
CONFIG = MODELS["tiny"].replace(
    hidden=32, mlp_dim=32, head_dim=8, num_layers=1, selection_bias=True
)
MODEL = Decoder(config=CONFIG, dtype=jnp.float32, loss_chunk=16)
OPTIMIZER = optax.adamw(1e-3)
OBJECTIVE = Objective(bias_rate=0.25)


def started(model: Decoder, mesh: Any, **options: bool) -> tuple[Layout, TrainState]:
    """Returns the layout on the ambient mesh, and the state before the first step."""
    layout = train_step.make_layout(model, OPTIMIZER, mesh)
    return layout, train_step.init_state(model, OPTIMIZER, layout, **options)


@functools.cache
def one_step(shape: tuple[int, ...], microbatches: int) -> tuple[TrainState, dict]:
    """Runs one step on 8 fixed sequences; returns the state and the metrics as NumPy arrays."""
    with jax.set_mesh(model_mesh(*shape)):
        layout, state = started(MODEL, model_mesh(*shape))
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
    # A sum over many layers exceeds the largest int32.
    assert metrics["num_dropped"].dtype == np.float32
    # The selection bias of an expert with more tokens than the mean falls, that of others rises.
    counts = metrics["expert_counts"][0]
    (bias,) = state.biases
    np.testing.assert_array_equal(bias, 0.25 * np.sign(counts.mean() - counts))
    assert np.any(bias)


CLOSE = dict(rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.needs_devices(8)
@pytest.mark.parametrize(
    "shape, microbatches, tolerance",
    [((2, 4), 1, CLOSE), ((1, 2, 2, 2), 1, CLOSE), ((1, 1), 2, dict(rtol=0.05, atol=2e-4))],
)
def test_meshes_and_microbatches_do_not_matter(shape, microbatches, tolerance):
    state, metrics = one_step(shape, microbatches)
    want, want_metrics = one_step((1, 1), 1)
    np.testing.assert_array_equal(metrics["expert_counts"], want_metrics["expert_counts"])
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-5)
    compare = functools.partial(np.testing.assert_allclose, **tolerance)
    # Compare the gradients: after one step, Adam's first moments are a tenth of them.
    jax.tree.map(compare, state.opt_state[0].mu, want.opt_state[0].mu)
    jax.tree.map(np.testing.assert_array_equal, state.biases, want.biases)


@pytest.mark.needs_devices(8)
def test_states_are_split_over_the_axes_that_hold_copies():
    layout = train_step.make_layout(MODEL, OPTIMIZER, model_mesh(4, 2))
    assert layout.params.moe[0].wi_0.spec == PartitionSpec("expert", None, None)
    parts = layout.state.params
    assert layout.state.opt_state[0].mu == parts
    assert layout.state.opt_state[0].count.spec == PartitionSpec()
    # Of 8 experts, 2 ranks have 4 each, which 4 ranks along "data" split further.
    assert parts.moe[0].wi_0.spec == PartitionSpec(("expert", "data"), None, None)
    assert parts.weights["model.norm.weight"].spec == PartitionSpec(("data", "expert"))
    both = PartitionSpec(("data", "expert"), None)
    assert parts.weights["model.embed_tokens.weight"].spec == both
    assert parts.weights["model.layers.0.self_attn.o_proj.weight"].spec == both


@pytest.mark.slow
@pytest.mark.needs_devices(8)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2, 1, 2)])
def test_microbatches_share_their_quantized_experts(shape, monkeypatch):
    # Two ranks along "fsdp" split the quantized matrices, too. Parts of four ranks are no blocks.
    config = CONFIG.replace(
        hidden=256, mlp_dim=128, selection_bias=False, matmul_dtype="float8_e4m3fn"
    )
    mesh = model_mesh(*shape)
    tokens = jax.random.randint(jax.random.key(1), (2, 8, SEQ_LEN + 1), 0, config.vocab)

    model = Decoder(config=config, dtype=jnp.float32)

    def step():
        layout, state = started(model, mesh)
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


def test_xla_knows_the_compiler_options():
    add = jax.jit(lambda x: x + 1, compiler_options=train_step.GPU_COMPILER_OPTIONS)
    assert add(1.0) == 2.0


@pytest.mark.slow
def test_documents_are_apart():
    """The evaluation of packed documents must be that of each document alone.

    It must sum the losses of all targets but those that follow `document_end`.
    """
    config = CONFIG.replace(selection_bias=False)
    model, mesh = Decoder(config=config, dtype=jnp.float32), model_mesh(1, 1)
    tokens = np.array(jax.random.randint(jax.random.key(1), (2, 9), 1, config.vocab))
    tokens[:, 3] = tokens[1, 7] = 0
    with jax.set_mesh(mesh):
        layout, state = started(model, mesh)
        evaluate = train_step.make_eval_step(model, layout, Objective(document_end=0))
        found = evaluate(state, tokens)
        # Each sequence of 8 tokens is two documents of 4.
        logits, _ = jax.jit(model.logits)(state.params, tokens[:, :-1].reshape(4, 4))
    targets = tokens[:, 1:].reshape(4, 4)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    counts = tokens[:, :-1].reshape(4, 4) != 0
    assert found["tokens"] == counts.sum() == 2 * 8 - 3
    np.testing.assert_allclose(found["loss"], (losses * counts).sum(), rtol=1e-5)
    assert found["expert_counts"].sum() == 2 * 8 * config.num_experts_per_token
