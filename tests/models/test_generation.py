"""Tests of decoding: the compiled loop decodes as single steps do, for any prompts.

tests/checkpoints/test_transformers.py compares the models with those of `transformers`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import expert_mesh
from support.selection import quick

from jax_ep.models import generation
from jax_ep.models.config import MODELS, DecoderConfig
from jax_ep.models.generation import Model, Sampling
from jax_ep.models.published import random_decoder

KINDS = "tiny", "tiny-gpt-oss"
PROMPTS = [[5, 77, 130, 9, 201, 33, 18, 64, 2, 111, 90], [250], [8, 8, 31, 7, 120], [99, 4]]
# Decode more tokens than the attention window of tiny-gpt-oss has.
STEPS = 12
NUM_EXPERTS = 16


pytestmark = pytest.mark.usefixtures("exact_matmuls")


def small(kind: str) -> DecoderConfig:
    return MODELS[kind].replace(
        hidden=64, mlp_dim=48, head_dim=16, num_experts=NUM_EXPERTS, num_experts_per_token=4
    )


def with_noise(model: Model) -> Model:
    """Draws biases and sinks, which are 0 at first, and an embedding of the usual scale."""
    key = jax.random.key(1)

    def noisy(path, x):
        name = jax.tree_util.keystr(path)
        if any(word in name for word in ("wi_0_bias", "wi_1_bias", "wo_bias")):
            # Slot s holds expert s modulo E.
            noise = jax.random.normal(key, (NUM_EXPERTS, x.shape[1]), x.dtype)
            return 0.3 * noise[jnp.arange(len(x)) % NUM_EXPERTS]
        if any(word in name for word in ("bias", "sinks")):
            return 0.3 * jax.random.normal(key, x.shape, x.dtype)
        return x * 50 if "embed_tokens" in name else x

    return jax.tree_util.tree_map_with_path(noisy, model)


@functools.cache
def random_model(kind: str, ranks: int = 2) -> tuple[DecoderConfig, Model]:
    mesh = expert_mesh(min(ranks, len(jax.devices())))
    with jax.set_mesh(mesh):
        config, model = random_decoder(small(kind), mesh, jnp.float32)
        return config, with_noise(model)


def mesh_of(model: Model):
    return jax.tree.leaves(model.moe[0].wi_0)[0].sharding.mesh


def generate(model, prompts=PROMPTS, steps=STEPS, **options):
    return generation.generate(*model, prompts, steps, mesh=mesh_of(model[1]), **options)


def tokens_of(model, prompts=PROMPTS, steps=STEPS, **options) -> list[list[int]]:
    return generate(model, prompts, steps, **options)[0]


def one_token_at_a_time(kind: str, prompt: list[int]) -> list[int]:
    """Decodes one prompt alone, by a Python loop that reads one token at a time."""
    config, model = random_model(kind)
    cache = generation.empty_cache(config, 1, 32, jnp.float32, mesh_of(model))
    tokens, found = list(prompt), []
    with jax.set_mesh(mesh_of(model)):
        while len(found) < STEPS:
            logits, cache = read_one(config, model, jnp.array([[tokens.pop(0)]]), cache)
            if not tokens:
                found.append(int(np.argmax(logits)))
                tokens.append(found[-1])
    return found


@functools.partial(jax.jit, static_argnums=0)
def read_one(config, model, token, cache):
    x, cache, _ = generation.hidden_states(config, model, token, token >= 0, cache)
    return generation.logits_of(config, model, x[:, 0]), cache


@functools.cache
def alone(kind: str) -> list[list[int]]:
    """Returns the decoded tokens of each prompt, which are those of all prompts in a batch."""
    rows = [one_token_at_a_time(kind, prompt) for prompt in PROMPTS]
    assert len({token for row in rows for token in row}) > 12
    return rows


WAYS = {
    "one loop": dict(),
    "steps from Python": dict(loop="host"),
    "padded on the right": dict(padding="right"),
    "in chunks": dict(chunk=3),
    "in chunks, padded on the right": dict(chunk=4, padding="right"),
}


@pytest.mark.parametrize("way", quick(WAYS, "in chunks", unpack=False))
@pytest.mark.parametrize("kind", quick(KINDS, "tiny-gpt-oss"))
def test_a_prompt_in_a_batch_of_unequal_lengths_decodes_as_it_does_alone(kind, way):
    assert tokens_of(random_model(kind), **way) == alone(kind)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_any_number_of_devices_decodes_the_same(ranks):
    """The number of devices must not change the tokens, even if it does not divide the experts.

    Three devices hold 18 slots for 16 experts, of which two have a second copy.
    """
    if ranks > len(jax.devices()):
        pytest.skip(f"needs {ranks} devices")
    model = random_model("tiny-gpt-oss", ranks)
    assert model[0].moe.num_slots == (18 if ranks == 3 else None)
    assert tokens_of(model) == alone("tiny-gpt-oss")


@pytest.mark.slow
def test_a_sequence_ends_with_its_stop_token_and_the_loop_with_the_last_sequence():
    config, model = random_model("tiny-gpt-oss")
    whole = alone("tiny-gpt-oss")
    stop = tuple({row[3] for row in whole})
    config = config.replace(stop_tokens=stop)
    want = [row[: 1 + min(i for i, token in enumerate(row) if token in stop)] for row in whole]
    assert len({len(row) for row in want} | {STEPS}) > 1
    found, state, _ = generate((config, model))
    assert found == want
    assert state.finished.all() and int(state.done) == max(map(len, want)) < STEPS
    # A finished sequence adds no tokens to its cache.
    assert np.asarray(state.cache.lengths).tolist() == [
        len(prompt) + len(row) - 1 for prompt, row in zip(PROMPTS, want, strict=True)
    ]


@pytest.mark.slow
def test_tokens_are_drawn_alike_in_the_loop_and_by_python():
    model, sampling = random_model("tiny-gpt-oss"), Sampling(0.7, seed=3)
    drawn = tokens_of(model, sampling=sampling)
    assert drawn == tokens_of(model, sampling=sampling, loop="host") != alone("tiny-gpt-oss")
    assert drawn != tokens_of(model, sampling=Sampling(0.7, seed=4))


@pytest.mark.slow
def test_tokens_are_drawn_by_their_probability():
    config, model = random_model("tiny", ranks=1)
    logits = jnp.log(jnp.array([0.5, 0.25, 0.125, 0.125]))
    logits = jnp.broadcast_to(logits, (4000, 4))
    cache = generation.empty_cache(config, 4000, 1, jnp.float32, mesh_of(model))
    state = generation.begin(config, Sampling(1.0, 0), logits, cache, 1)
    share = np.bincount(np.asarray(state.tokens[:, 0]), minlength=4) / 4000
    np.testing.assert_allclose(share, [0.5, 0.25, 0.125, 0.125], atol=4 * (0.25 / 4000) ** 0.5)
