"""A byte-level language model: a causal transformer with `jax_ep.linen.MoE` layers as MLPs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.bench.decoder import rotary
from jax_ep.linen import MoE

SEQ_LEN = flags.DEFINE_integer("seq_len", 128, "Bytes in a sequence.", lower_bound=1)
D_MODEL = flags.DEFINE_integer("d_model", 128, "Width of the residual stream.", lower_bound=1)
NUM_LAYERS = flags.DEFINE_integer("num_layers", 2, "Transformer blocks.", lower_bound=1)
NUM_HEADS = flags.DEFINE_integer("num_heads", 4, "Attention heads.", lower_bound=1)
NUM_EXPERTS = flags.DEFINE_integer("num_experts", 8, "Experts in each block.", lower_bound=1)
TOP_K = flags.DEFINE_integer(
    "experts_per_token", 2, "Experts that each byte is sent to.", lower_bound=1
)
MLP_DIM = flags.DEFINE_integer("mlp_dim", 128, "Hidden width of one expert.", lower_bound=1)
WIRE_DTYPE = flags.DEFINE_enum(
    "wire_dtype",
    None,
    ["float8_e4m3fn"],
    "Dtype that tokens are sent to their experts in; d_model must be a multiple of 128.",
)
MATMUL_DTYPE = flags.DEFINE_enum(
    "matmul_dtype",
    None,
    ["float8_e4m3fn"],
    "Dtype that experts multiply; d_model and mlp_dim must be multiples of 128. Default: bfloat16 "
    "on GPUs, float32 on CPUs.",
)
MODEL_FLAGS = (
    *(SEQ_LEN, D_MODEL, NUM_LAYERS, NUM_HEADS, NUM_EXPERTS, TOP_K, MLP_DIM),
    *(WIRE_DTYPE, MATMUL_DTYPE),
)

# A token is one byte.
VOCAB = 256
# Sampling divides the logits by this temperature.
TEMPERATURE = 0.7


class Block(nn.Module):
    """A transformer block: causal self-attention, then an MoE layer, each after an RMSNorm."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax_ep.MoEMetrics]:
        dtype, width, heads = self.dtype, x.shape[-1], NUM_HEADS.value
        y = nn.RMSNorm(dtype=dtype)(x)
        qkv = nn.DenseGeneral((3, heads, width // heads), use_bias=False, dtype=dtype)(y)
        q, k, v = jnp.moveaxis(qkv, -3, 0)
        q, k = (rotary(heads, jnp.arange(x.shape[1]), 10_000.0) for heads in (q, k))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += nn.DenseGeneral(width, axis=(-2, -1), use_bias=False, dtype=dtype)(y)

        y = nn.RMSNorm(dtype=dtype)(x)
        # Flax stores this value only if the caller makes the collection "trace" mutable.
        self.sow("trace", "moe_input", y)
        y, metrics = MoE(
            num_experts=NUM_EXPERTS.value,
            num_experts_per_token=TOP_K.value,
            mlp_dim=MLP_DIM.value,
            wire_dtype=WIRE_DTYPE.value,
            matmul_dtype=MATMUL_DTYPE.value,
            dtype=dtype,
        )(y)
        return x + y, metrics


class LanguageModel(nn.Module):
    """The language model.

    Maps bytes [B, S] to the logits of the next bytes, [B, S, 256] float32, and to the metrics of
    the MoE layers, stacked over the blocks.
    """

    dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax_ep.MoEMetrics]:
        embed = nn.Embed(VOCAB, D_MODEL.value, dtype=self.dtype)
        x = embed(tokens)
        metrics = []
        for _ in range(NUM_LAYERS.value):
            x, block_metrics = Block(self.dtype)(x)
            metrics.append(block_metrics)
        logits = embed.attend(nn.RMSNorm(dtype=self.dtype)(x))
        return logits.astype(jnp.float32), jax.tree.map(lambda *m: jnp.stack(m), *metrics)


def choices(params: Any, trace: Any) -> jax.Array:
    """Returns the experts that each byte chose in each block, [blocks, B * S, K] int32.

    `trace` is the collection "trace" that the model fills when the caller makes it mutable. It
    holds the input of each MoE layer.
    """
    chosen = []
    for name in sorted(trace):
        (x,) = trace[name]["moe_input"]
        gate = params[name]["MoE_0"]["gate"]["kernel"]
        logits = x.reshape(-1, x.shape[-1]).astype(jnp.float32) @ gate.astype(jnp.float32)
        chosen.append(jax_ep.top_k_routing(logits, TOP_K.value).topk_idx)
    return jnp.stack(chosen)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean next-byte loss in nats; logits [B, S, 256], targets [B, S]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def sample(model: LanguageModel, params: Any, prompt: str, length: int, seed: int) -> str:
    """Continues `prompt` by `length` bytes drawn from the model, on the mesh of the parameters.

    The model sees at most the last --seq_len bytes.
    """

    @functools.partial(jax.jit, out_shardings=NamedSharding(jax.sharding.get_mesh(), P()))
    def continue_window(params: Any, window: jax.Array) -> jax.Array:
        def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            outputs: Any = model.apply({"params": params}, window[None])
            byte = jax.random.categorical(key, outputs[0][0, -1] / TEMPERATURE)
            return jnp.append(window[1:], byte), byte

        keys = jax.random.split(jax.random.key(seed), length)
        return jax.lax.scan(next_byte, window, keys)[1]

    context = prompt.encode().rjust(SEQ_LEN.value, b"\n")[-SEQ_LEN.value :]
    window = np.frombuffer(context, np.uint8).astype(np.int32)
    sampled = continue_window(params, window)
    return np.asarray(sampled, np.uint8).tobytes().decode(errors="replace")


def training_flops_per_token(params: Any) -> float:
    """Returns the matmul FLOPs per token of a training step, forward and backward.

    The forward pass costs two FLOPs for each weight that a token is multiplied by. Attention adds
    the products of its queries with keys and of its scores with values. A token attends to half of
    the sequence on average. Forward and backward together cost three times the forward pass.
    """
    sizes = {
        jax.tree_util.keystr(path): x.size
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    # The names of the expert weights, wi_0, wi_1 and wo, are the only ones that begin with w.
    experts = sum(size for path, size in sizes.items() if "'w" in path)
    used = sum(sizes.values()) - experts * (1 - TOP_K.value / NUM_EXPERTS.value)
    attention = NUM_LAYERS.value * 2 * SEQ_LEN.value / 2 * D_MODEL.value
    return 3 * 2 * (used + attention)
