"""Tests of the decoder that is trained: rotary embedding, attention, and rematerialization."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ep.models.config import MODELS
from jax_ep.models.decoder import REMAT, Decoder, _causal, masked_attention

CONFIG = MODELS["tiny"].replace(hidden=32, mlp_dim=32, head_dim=8, num_layers=1)


@pytest.mark.parametrize("window, packed", [(3, False), (2**30, True)])
def test_attention_of_whole_sequences_is_that_of_a_mask(window, packed):
    q, k, v = (
        jax.random.normal(jax.random.key(i), (2, 7, heads, 8)) for i, heads in enumerate((4, 2, 2))
    )
    after = np.arange(7)[:, None] - np.arange(7)
    seen = np.broadcast_to((after >= 0) & (after < window), (2, 7, 7))
    documents = np.array([[0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1]]) if packed else None
    if packed:
        seen = seen & (documents[:, :, None] == documents[:, None])

    @jax.jit
    def results(q, k, v):
        attend = _causal(window, documents)
        outputs = [
            attend(q, k, v, sinks)[0] for sinks in (None, jnp.full(4, -1e9), jnp.full(4, 1e2))
        ]
        return *outputs, masked_attention(q, k, v, seen, None)

    plain, low, high, want = results(q, k, v)
    np.testing.assert_allclose(plain, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(low, plain, rtol=1e-4, atol=1e-5)
    assert np.abs(high).max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("remat", [name for name in REMAT if name != "none"])
def test_remat_keeps_the_gradients(remat):
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, CONFIG.vocab)

    def gradients(remat: str):
        model = Decoder(config=CONFIG, dtype=jnp.float32, remat=remat)
        params = jax.jit(model.init)(jax.random.key(0))
        loss = jax.grad(lambda params: model.loss(params, tokens[:, :-1], tokens[:, 1:])[0])
        return jax.jit(loss)(params)

    want = gradients("none")
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients(remat), want
    )
