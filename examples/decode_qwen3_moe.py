"""Run a published Qwen3-MoE: prefill, then greedy decoding, with experts spread over the devices.

    python examples/decode_qwen3_moe.py
    python examples/decode_qwen3_moe.py --checkpoint=Qwen3-30B-A3B --prompt=9707,11,847,829,374

A directory as published holds config.json and safetensors files. `jax_ep.checkpoints` loads the MoE
block of each layer, each device its own experts, and `qwen3_moe.py` the rest; attention and norms
are plain JAX here. Without --checkpoint a tiny model of random weights is written and loaded the
same way. Prompts and answers are token ids: the `tokenizers` package turns text into them and back.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

# XLA reads the flag once, when JAX starts, and only for CPUs. A user's own flags win.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from qwen3_moe import read_config, read_weight, write_random_model

from jax_ep import MoEConfig, MoEParams, moe_layer
from jax_ep.bench.decoder import DecoderConfig, rotary
from jax_ep.checkpoints import load_moe_params
from jax_ep.checkpoints.safetensors import Directory

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Directory of a Qwen3-MoE as published.")
_PROMPT = flags.DEFINE_list("prompt", None, "Token ids of every prompt; by default, random ones.")
_PROMPT_LENGTH = flags.DEFINE_integer(
    "prompt_length", 32, "Tokens of a random prompt.", lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 8, "Sequences, over all devices.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 32, "Tokens to decode for each.", lower_bound=1)

Weights = dict[str, jax.Array]


class Config(NamedTuple):
    """What the model is. Hashable: a static argument of the compiled functions."""

    sizes: DecoderConfig
    moe: MoEConfig


class Model(NamedTuple):
    """The weights by their published names: the layers' own names lack "model.layers.<i>."."""

    shared: Weights
    layers: list[Weights]
    moe: list[MoEParams]


class Cache(NamedTuple):
    """Keys and values of each layer, [B, M, heads, D], and how many of the M are there."""

    keys: list[jax.Array]
    values: list[jax.Array]
    length: jax.Array


ATTENTION = ("input_layernorm", "post_attention_layernorm") + tuple(
    f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
)


def load_model(folder: Path, mesh: Mesh, dtype: Any) -> tuple[Config, Model]:
    """Loads a published directory onto the mesh: experts split, all else on every device."""
    sizes, files = read_config(folder), Directory(folder)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def read(name: str) -> jax.Array:
        return jax.device_put(read_weight(files, name).astype(dtype), everywhere)

    moe_config, moe, layers = MoEConfig(num_experts=1, num_experts_per_token=1), [], []
    for i in range(sizes.num_layers):
        layers.append({name: read(f"model.layers.{i}.{name}.weight") for name in ATTENTION})
        moe_config, params = load_moe_params(folder, i, mesh=mesh, dtype=dtype)
        moe.append(params)
    shared = {name: read(f"model.{name}.weight") for name in ("embed_tokens", "norm")}
    shared["lm_head"] = shared["embed_tokens"] if sizes.tied else read("lm_head.weight")
    return Config(sizes, moe_config), Model(shared, layers, moe)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return weight * wide.astype(x.dtype)


def attention(
    config: DecoderConfig,
    w: Weights,
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    start: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attends from tokens [B, S, H] at positions from `start`; returns the caches with them too."""
    project = {
        name: (x @ w[f"self_attn.{name}_proj"].T).reshape(*x.shape[:2], -1, config.head_dim)
        for name in "qkv"
    }
    positions = start + jnp.arange(x.shape[1])
    q, k = (
        rotary(
            rms_norm(project[name], w[f"self_attn.{name}_norm"], config.epsilon),
            positions,
            config.rotary_base,
        )
        for name in "qk"
    )
    keys = jax.lax.dynamic_update_slice_in_dim(keys, k, start, 1)
    values = jax.lax.dynamic_update_slice_in_dim(values, project["v"], start, 1)
    seen = jnp.arange(keys.shape[1]) <= positions[:, None]
    out = jax.nn.dot_product_attention(q, keys, values, mask=seen[None, None])
    return out.reshape(*x.shape[:2], -1) @ w["self_attn.o_proj"].T, keys, values


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def forward(
    config: Config, model: Model, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Reads tokens [B, S]; returns the logits [B, vocabulary] float32 of the next, and the cache.

    Prefill reads a prompt, a step of decoding one token.
    """
    x = model.shared["embed_tokens"][tokens]
    keys, values = [], []
    for w, moe, k, v in zip(model.layers, model.moe, cache.keys, cache.values, strict=True):
        y = rms_norm(x, w["input_layernorm"], config.sizes.epsilon)
        y, k, v = attention(config.sizes, w, y, k, v, cache.length)
        x += y
        y, _ = moe_layer(
            moe, rms_norm(x, w["post_attention_layernorm"], config.sizes.epsilon), config.moe
        )
        x += y
        keys.append(k)
        values.append(v)
    last = rms_norm(x[:, -1], model.shared["norm"], config.sizes.epsilon)
    logits = last @ model.shared["lm_head"].T
    return logits.astype(jnp.float32), Cache(keys, values, cache.length + tokens.shape[1])


def empty_cache(config: Config, mesh: Mesh, batch: int, room: int, dtype: Any) -> Cache:
    """Returns room for so many tokens of each sequence; the sequences are split over the mesh."""
    spec = PartitionSpec(mesh.axis_names) if batch % mesh.size == 0 else PartitionSpec()
    shape = batch, room, config.sizes.num_key_value_heads, config.sizes.head_dim
    zeros = functools.partial(jnp.zeros, shape, dtype, device=NamedSharding(mesh, spec))
    layers = range(config.sizes.num_layers)
    return Cache([zeros() for _ in layers], [zeros() for _ in layers], jnp.int32(0))


def decode(
    config: Config, model: Model, prompts: np.ndarray, steps: int, mesh: Mesh, dtype: Any
) -> tuple[np.ndarray, list[np.ndarray], float, float]:
    """Continues prompts [B, S] greedily by `steps` tokens.

    Returns:
        The tokens [B, steps], the logits that each was chosen by, and the seconds of prefill and of
        the median step of decoding, neither with compilation.
    """
    batch, length = prompts.shape

    def cache() -> Cache:
        return empty_cache(config, mesh, batch, length + steps, dtype)

    def run(tokens: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array, Cache, float]:
        start = time.perf_counter()
        logits, cache = forward(config, model, tokens, cache)
        next_tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]
        next_tokens.block_until_ready()
        return next_tokens, logits, cache, time.perf_counter() - start

    prompt = jnp.asarray(prompts, jnp.int32)
    run(prompt, cache())
    tokens, logits, state, prefill = run(prompt, cache())
    decoded, all_logits, seconds = [tokens], [logits], []
    for _ in range(steps - 1):
        tokens, logits, state, step = run(tokens, state)
        decoded.append(tokens)
        all_logits.append(logits)
        seconds.append(step)
    median = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
    return np.concatenate(decoded, axis=1), list(map(np.asarray, all_logits)), prefill, median


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    devices = jax.devices()
    mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    dtype = jnp.bfloat16 if devices[0].platform == "gpu" else jnp.float32
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(_CHECKPOINT.value or scratch)
        if not _CHECKPOINT.value:
            write_random_model(folder)
        config, model = load_model(folder, mesh, dtype)
    vocabulary = model.shared["embed_tokens"].shape[0]
    if _PROMPT.value:
        words = [word.strip() for word in _PROMPT.value]
        if not all(word.isdecimal() and int(word) < vocabulary for word in words):
            raise SystemExit(
                f"--prompt must be token ids from 0 to {vocabulary - 1}, but is {','.join(words)}"
            )
        prompts = np.array([list(map(int, words))] * _BATCH_SIZE.value)
    else:
        shape = _BATCH_SIZE.value, _PROMPT_LENGTH.value
        prompts = np.random.default_rng(1).integers(vocabulary, size=shape)
    tokens, _, prefill, step = decode(config, model, prompts, _STEPS.value, mesh, dtype)
    print(
        f"{config.sizes.num_layers} layers, {config.moe.num_experts_per_token} of "
        f"{config.moe.num_experts} experts for each token, on {mesh.size} x "
        f"{devices[0].device_kind}"
    )
    print(f"first sequence: {tokens[0].tolist()}")
    print(f"prefill {prefill * 1e3:.2f} ms: {prompts.size / prefill:,.0f} tokens/s")
    if step:
        print(f"median step {step * 1e3:.2f} ms: {_BATCH_SIZE.value / step:,.0f} tokens/s")


if __name__ == "__main__":
    app.run(main)
