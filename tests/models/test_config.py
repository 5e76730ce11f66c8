"""Tests of a decoder's configuration: sizes, and what is read from config.json."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jax_ep.models.config import MODELS, NO_WINDOW, PUBLISHED, SIZES, DecoderConfig
from jax_ep.models.decoder import Decoder

SMALL = MODELS["tiny"].replace(hidden=32, mlp_dim=32, head_dim=8, num_layers=2)


def test_active_parameters_are_those_that_a_token_meets():
    config = SMALL.replace(num_shared_experts=1)
    params = jax.eval_shape(Decoder(config=config).init, jax.random.key(0))
    total = sum(x.size for x in jax.tree.leaves(params))
    routed = sum(w.size for moe in params.moe for w in (moe.wi_0, moe.wi_1, moe.wo))
    unused = routed * (1 - config.num_experts_per_token / config.num_experts)
    assert config.active_params() == total - unused - config.vocab * config.hidden
    assert config.training_flops_per_token(10) == 6 * (config.active_params() + 2 * 10 * 4 * 8)


def test_published_sizes():
    """Qwen3-30B-A3B must have 30.5 billion parameters, of which 3.3 billion are active.

    The active parameters leave out one of the two embedding matrices.
    """
    config = MODELS["qwen3-30b-a3b"]
    embedding = config.vocab * config.hidden
    assert config.active_params() + embedding == pytest.approx(3.35e9, rel=0.01)
    everything = config.replace(num_experts_per_token=config.num_experts)
    assert everything.active_params() + embedding == pytest.approx(30.5e9, rel=0.01)


def test_a_config_json_gives_the_sizes_of_its_keys():
    # Powers of two, since the number of heads must be a multiple of the next one.
    changed = {key: 2 ** (12 - i) for i, key in enumerate(SIZES.values())}
    config = DecoderConfig.of(PUBLISHED["tiny"] | changed)
    for name, key in SIZES.items():
        assert getattr(config, name) == changed[key], name
    assert config == MODELS["tiny"].replace(**{n: changed[key] for n, key in SIZES.items()})
    assert config.stop_tokens == () and not config.sinks and config.windows == (NO_WINDOW,)


@pytest.mark.parametrize("model", ["tiny", "tiny-gpt-oss"])
def test_a_config_json_that_lacks_a_key_is_refused_by_its_name(model):
    published, lacking = PUBLISHED[model], []
    for key in published:
        others = {other: value for other, value in published.items() if other != key}
        try:
            DecoderConfig.of(others, Path("model"))
        except ValueError as error:
            assert "model/config.json" in str(error) and key in str(error)
            lacking.append(key)
    needed = {"vocab_size", "rms_norm_eps", "rope_theta", "num_key_value_heads", "model_type"}
    assert needed <= set(lacking)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type of .*config.json must be 'qwen3_moe' or 'gpt_oss'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers of .* must be \\[\\]"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type of .* but is 'linear'"),
    ],
)
def test_a_model_that_is_neither_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.of(PUBLISHED["tiny"] | changes)
