"""Decode with a Mixture-of-Experts transformer: every step is one compiled program.

    python examples/decode_moe.py
    python examples/decode_moe.py --batch_size=1024 --hidden=7168 --num_experts=256 \\
        --experts_per_token=8 --mlp_dim=2048 --num_heads=64   # eight large GPUs, 128 tokens on each

In each step every sequence reads its key-value cache and adds one token to it. The sequences and
the experts are split over the ranks: all GPUs of the machine, or eight virtual CPU devices. A rank
has few tokens in a step, so latency decides a step's time, above all the latency of `dispatch` and
`combine`. The weights are random; the speed does not depend on their values.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

# XLA reads this flag once, when JAX starts; GPUs ignore it. Flags that the user sets win.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep.nnx import MoE

_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Sequences, over all devices.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 200, "Tokens to decode for each sequence.", lower_bound=1)
_CONTEXT = flags.DEFINE_integer(
    "context",
    128,
    "Tokens in each sequence's key-value cache before the first step.",
    lower_bound=0,
)
_HIDDEN = flags.DEFINE_integer("hidden", 256, "Width of the residual stream.", lower_bound=1)
_NUM_LAYERS = flags.DEFINE_integer("num_layers", 2, "Transformer blocks.", lower_bound=1)
_NUM_HEADS = flags.DEFINE_integer("num_heads", 4, "Attention heads.", lower_bound=1)
_NUM_EXPERTS = flags.DEFINE_integer("num_experts", 16, "Experts in each block.", lower_bound=1)
_TOP_K = flags.DEFINE_integer(
    "experts_per_token", 2, "Experts that each token is sent to.", lower_bound=1
)
_MLP_DIM = flags.DEFINE_integer("mlp_dim", 256, "Hidden width of one expert.", lower_bound=1)
_VOCAB = flags.DEFINE_integer("vocab", 1024, "Size of the vocabulary.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights.")


class Decoding(NamedTuple):
    """The state between two decoding steps: B sequences, whose caches have room for S tokens."""

    # The newest token of each sequence, [B] int32.
    tokens: jax.Array
    # The number of tokens in each cache, [] int32.
    length: jax.Array
    # The attention keys of each block, [B, S, heads, head size]; `values` likewise.
    keys: list[jax.Array]
    values: list[jax.Array]


class Block(nnx.Module):
    """A transformer block: self-attention over a cache, then a mixture of experts."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        hidden, heads = _HIDDEN.value, _NUM_HEADS.value
        kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.norm_attention = nnx.RMSNorm(hidden, **kinds)
        self.norm_moe = nnx.RMSNorm(hidden, **kinds)
        self.qkv = nnx.LinearGeneral(hidden, (3, heads, hidden // heads), use_bias=False, **kinds)
        self.out = nnx.LinearGeneral(
            (heads, hidden // heads), hidden, axis=(-2, -1), use_bias=False, **kinds
        )
        self.moe = MoE(
            hidden,
            _MLP_DIM.value,
            num_experts=_NUM_EXPERTS.value,
            num_experts_per_token=_TOP_K.value,
            **kinds,
        )

    def __call__(
        self, x: jax.Array, keys: jax.Array, values: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns x [B, H] after the block, and the caches with the new token's key and value."""
        q, k, v = jnp.moveaxis(self.qkv(self.norm_attention(x)), 1, 0)
        keys = jax.lax.dynamic_update_index_in_dim(keys, k, length, 1)
        values = jax.lax.dynamic_update_index_in_dim(values, v, length, 1)
        lengths = jnp.full(x.shape[0], length + 1)
        y = jax.nn.dot_product_attention(q[:, None], keys, values, key_value_seq_lengths=lengths)
        x += self.out(y[:, 0])
        y, _ = self.moe(self.norm_moe(x))
        return x + y, keys, values


class Decoder(nnx.Module):
    """The language model: reads each sequence's newest token and chooses its next one."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(_VOCAB.value, _HIDDEN.value, **kinds)
        self.norm = nnx.RMSNorm(_HIDDEN.value, **kinds)
        self.logits = nnx.Linear(_HIDDEN.value, _VOCAB.value, use_bias=False, **kinds)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(_NUM_LAYERS.value)])

    def __call__(self, state: Decoding) -> Decoding:
        x = self.embed(state.tokens)
        keys, values = [], []
        for block, k, v in zip(self.blocks, state.keys, state.values, strict=True):
            x, k, v = block(x, k, v, state.length)
            keys.append(k)
            values.append(v)
        tokens = jnp.argmax(self.logits(self.norm(x)), axis=-1).astype(jnp.int32)
        return Decoding(tokens, state.length + 1, keys, values)


def init_model(dtype: Any) -> tuple[Any, Any]:
    """Returns the model's graph definition, and its weights with experts split over the ranks."""
    rules = [("exp", "expert"), ("embed", None), ("mlp", None)]
    with nnx.logical_axis_rules(rules):
        model = nnx.jit(lambda: Decoder(dtype, nnx.Rngs(_SEED.value)))()
    return nnx.split(model)


def init_decoding(mesh: Mesh, dtype: Any) -> Decoding:
    """Returns the first state: caches with --context tokens of zeros, and a token per sequence."""
    heads, room = _NUM_HEADS.value, _CONTEXT.value + _STEPS.value
    shape = _BATCH_SIZE.value, room, heads, _HIDDEN.value // heads

    def init() -> Decoding:
        tokens = jnp.arange(_BATCH_SIZE.value, dtype=jnp.int32) % _VOCAB.value
        keys = [jnp.zeros(shape, dtype) for _ in range(_NUM_LAYERS.value)]
        values = [jnp.zeros(shape, dtype) for _ in range(_NUM_LAYERS.value)]
        return Decoding(tokens, jnp.int32(_CONTEXT.value), keys, values)

    whole = NamedSharding(mesh, PartitionSpec())
    # Split the axis of sequences, which comes first, over the ranks.
    split = NamedSharding(mesh, PartitionSpec("expert"))
    layout = jax.tree.map(lambda x: split if x.ndim else whole, jax.eval_shape(init))
    return jax.jit(init, out_shardings=layout)()


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    devices = jax.devices()
    if _BATCH_SIZE.value % len(devices):
        raise SystemExit(
            f"--batch_size={_BATCH_SIZE.value} must be a multiple of the {len(devices)} devices"
        )
    mesh = Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    # The MoE layers run on this mesh.
    jax.set_mesh(mesh)
    dtype = jnp.bfloat16 if devices[0].platform == "gpu" else jnp.float32
    structure, weights = init_model(dtype)
    state = init_decoding(mesh, dtype)

    def step(weights: Any, state: Decoding) -> Decoding:
        return nnx.merge(structure, weights)(state)

    # Compile once, ahead of the loop. Donating the state lets a step write the next state into the
    # previous state's memory.
    layout = jax.tree.map(lambda x: x.sharding, state)
    compiled = jax.jit(step, donate_argnums=1, out_shardings=layout).lower(weights, state).compile()
    print(
        f"{_BATCH_SIZE.value} sequences on {mesh.size} x {devices[0].device_kind}, "
        f"{_NUM_LAYERS.value} blocks, {_TOP_K.value} of {_NUM_EXPERTS.value} experts for each token"
    )

    decoded = []
    seconds = []
    for _ in range(_STEPS.value):
        start = time.perf_counter()
        state = compiled(weights, state)
        # Copying the tokens to the host waits for the step, as a server that streams tokens does.
        decoded.append(np.array(state.tokens))
        seconds.append(time.perf_counter() - start)
    median = sorted(seconds)[len(seconds) // 2]
    print(f"first tokens of the first sequence: {[int(t[0]) for t in decoded[:16]]}")
    print(f"median step {median * 1e3:.2f} ms: {_BATCH_SIZE.value / median:,.0f} tokens/s")


if __name__ == "__main__":
    app.run(main)
