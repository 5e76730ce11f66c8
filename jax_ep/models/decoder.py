"""Defines a decoder-only Mixture-of-Experts language model, Qwen3-MoE or GPT-OSS.

`jax_ep.models.train_step` trains the model, and `jax_ep.models.generation` decodes with it, both by
`decoder_layer`. Parameters have the names and shapes of the published checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jax_ep.models.axes import FSDP_AXIS, TENSOR_AXIS, on_mesh, spec_of_moe, spec_of_weight
from jax_ep.models.config import DecoderConfig
from jax_ep.models.loss import cross_entropy
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.held_experts import quantize_experts
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.params import MoEParams, initializer, weight_shapes

Weights = dict[str, jax.Array]
# Computes attention of queries [B, S, heads, D], keys and values [B, S, key-value heads, D], and
# sinks [heads] or None. Returns [B, S, heads, D], and what the caller wants to keep.
Attend = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], tuple[jax.Array, Any]]

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Joins the projections of queries, keys and values, for decoding.
QKV = "self_attn.qkv_proj"

_policies = jax.checkpoint_policies
# Maps names to rematerialization policies. A policy says which intermediate arrays of a layer,
# besides its input, are kept for the backward pass, which recomputes all other ones.
REMAT: dict[str, Any] = {
    # No rematerialization: JAX keeps every array that the backward pass uses.
    "none": None,
    "full": _policies.nothing_saveable,
    # Keeps the results of attention's projections, and the router's logits.
    "projections": _policies.dots_with_no_batch_dims_saveable,
    # Keeps the received tokens, so the backward pass does not repeat the dispatch.
    "dispatched": _policies.save_only_these_names("dispatched_tokens"),
    # Keeps the received tokens, and the results of the experts' matmuls with wi_0 and wi_1.
    "experts": _policies.save_only_these_names("dispatched_tokens", "expert_pre_activations"),
}


class Params(NamedTuple):
    """The parameters of a model."""

    # All weights outside of the MoE blocks, by their published names and in their published shapes,
    # such as "model.layers.0.self_attn.o_proj.weight" [H, heads * D].
    weights: Weights
    moe: list[MoEParams]  # of each layer

    def of_layer(self, layer: int) -> Weights:
        """Returns the weights of a layer, by their names without "model.layers.<layer>."."""
        prefix = f"model.layers.{layer}."
        return {n.removeprefix(prefix): w for n, w in self.weights.items() if n.startswith(prefix)}


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's weights outside of its MoE block, by name."""
    hidden, width = config.hidden, config.head_dim
    keys = config.num_key_value_heads * width
    rows = {"q": config.num_heads * width, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}_proj.weight": (size, hidden) for name, size in rows.items()},
        "self_attn.o_proj.weight": (hidden, rows["q"]),
    }
    if config.attention_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
    return shapes | ({"self_attn.sinks": (config.num_heads,)} if config.sinks else {})


def shared_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights that belong to no layer, by name."""
    table = config.vocab, config.hidden
    return {EMBED: table, NORM: (config.hidden,)} | ({} if config.tied else {HEAD: table})


def init_weights(key: jax.Array, shapes: dict[str, tuple[int, ...]], dtype: Any) -> Weights:
    """Draws weights: norms 1, biases and sinks 0, embedding N(0, 0.02^2), others LeCun-normal."""
    # Matrices are [out, in].
    draw = jax.nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
    arrays = {}
    keys = jax.random.split(key, len(shapes))
    for own_key, (name, shape) in zip(keys, shapes.items(), strict=True):
        if name == EMBED:
            arrays[name] = jax.nn.initializers.normal(0.02)(own_key, shape, dtype)
        elif len(shape) > 1:
            arrays[name] = draw(own_key, shape, dtype)
        else:
            arrays[name] = (jnp.ones if "norm" in name else jnp.zeros)(shape, dtype)
    return arrays


def init_moe(key: jax.Array, config: DecoderConfig, dtype: Any) -> MoEParams:
    """Draws the parameters of an MoE block, without a selection bias."""
    options = config.parameters
    shapes = weight_shapes(config.moe, options, config.hidden, config.mlp_dim)
    shapes = {"gate": (config.hidden, config.moe.num_choosable), **shapes}
    assert options.gate_init is not None  # it is None only without a router, which a decoder has
    arrays = {}
    keys = jax.random.split(key, len(shapes))
    for own_key, (name, shape) in zip(keys, shapes.items(), strict=True):
        draw = options.gate_init if name == "gate" else initializer(name, config.moe, options)
        arrays[name] = draw(own_key, shape, dtype)
    return MoEParams.of(**arrays)


def specs(params: Params, config: DecoderConfig, mesh: Mesh | AbstractMesh) -> Params:
    """Returns how `params` (arrays or shapes) are split over a mesh, as `PartitionSpec` leaves."""
    config = on_mesh(config, mesh)
    names = [name for name, value in params.moe[0]._asdict().items() if value is not None]
    block = MoEParams.of(**{name: spec_of_moe(name, config, mesh) for name in names})
    weights: Any = {n: spec_of_weight(n, w.shape, mesh) for n, w in params.weights.items()}
    return Params(weights, [block] * len(params.moe))  # all blocks have the same parameters


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Divides x [..., H] by its root mean square, and multiplies it by `weight` [H], in float32."""
    wide = x.astype(jnp.float32)
    wide *= lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    # The quotient is rounded to the dtype of x first, as in published models.
    return (weight.astype(jnp.float32) * wide.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)


def rotary(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies the rotary embedding of `cos_and_sin` to x [..., S, heads, D] ("RoFormer", 2021)."""
    # Rotates each value i of a head with value i + D / 2.
    cos, sin = angles
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def cos_and_sin(
    config: DecoderConfig, positions: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine, [..., S, 1, D / 2], for the positions [..., S] of tokens."""
    frequencies, scale = config.rotary()
    angle = positions[..., None, None] * frequencies
    return (jnp.cos(angle) * scale).astype(dtype), (jnp.sin(angle) * scale).astype(dtype)


def _linear(x: jax.Array, weights: Weights, name: str) -> jax.Array:
    """Multiplies x [..., in] by the weight [out, in], and adds the bias if there is one."""
    y = jnp.einsum("...i,oi->...o", x, weights[f"{name}.weight"].astype(x.dtype))
    return y + weights[f"{name}.bias"].astype(x.dtype) if f"{name}.bias" in weights else y


def decoder_layer(
    config: DecoderConfig,
    weights: Weights,
    moe: MoEParams,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    attend: Attend,
    **call: Any,
) -> tuple[jax.Array, MoEMetrics, Any]:
    """Runs one layer: attention, and then the MoE block, each after a norm (pre-norm residuals).

    `weights` are from `Params.of_layer`, x is [B, S, H], and `angles` are the results of
    `cos_and_sin` for its positions. `call` has further arguments of `jax_ep.moe_layer`. Returns the
    hidden states [B, S, H], the metrics of the MoE block, and what `attend` keeps.
    """
    kv_heads, epsilon = config.num_key_value_heads, config.epsilon
    with jax.named_scope("input_layernorm"):
        y = rms_norm(x, weights["input_layernorm.weight"], epsilon)
    with jax.named_scope("self_attn"):
        in_heads = (*x.shape[:-1], -1, config.head_dim)
        if f"{QKV}.weight" in weights:
            # The heads of queries, then of keys, then of values.
            ends = [config.num_heads, config.num_heads + kv_heads]
            q, k, v = jnp.split(_linear(y, weights, QKV).reshape(in_heads), ends, axis=-2)
        else:
            names = (f"self_attn.{letter}_proj" for letter in "qkv")
            q, k, v = (_linear(y, weights, name).reshape(in_heads) for name in names)
        if config.qk_norm:
            q = rms_norm(q, weights["self_attn.q_norm.weight"], epsilon)
            k = rms_norm(k, weights["self_attn.k_norm.weight"], epsilon)
        sinks = weights.get("self_attn.sinks")
        y, kept = attend(rotary(q, angles), rotary(k, angles), v, sinks)
        x += _linear(y.reshape(*x.shape[:-1], -1), weights, "self_attn.o_proj")
    with jax.named_scope("post_attention_layernorm"):
        y = rms_norm(x, weights["post_attention_layernorm.weight"], epsilon)
    with jax.named_scope("mlp"):
        y, metrics = moe_layer(moe, y, config.moe, **call)
    return x + y, metrics, kept


def masked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """Computes attention of q [B, S, heads, D] to k and v [B, M, kv_heads, D].

    Equally many neighbouring heads share a key-value head. `seen` [B, S, M] bool says which keys a
    query attends to. `sinks` [heads], if given, is one more score per head in the softmax, without
    a value (GPT-OSS). Returns [B, S, heads, D].
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    # g are the key-value heads, r the heads that share one, s the queries, and m the keys.
    scores = jnp.einsum("bsgrd,bmgd->bgrsm", grouped, k, preferred_element_type=jnp.float32)
    # Instead of -inf, which would give NaN for a query that sees no key, as at padding.
    scores = jnp.where(seen[:, None, None], scores * width**-0.5, -1e30)
    # Subtracting the largest score avoids overflow, and changes neither result nor gradient.
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads, 1, 1)
        top = jnp.maximum(top, sink)
    top = lax.stop_gradient(top)
    scores = jnp.exp(scores - top)
    total = jnp.sum(scores, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    out = jnp.einsum("bgrsm,bmgd->bsgrd", (scores / total).astype(v.dtype), v)
    return out.reshape(q.shape)


def _causal(window: int, documents: jax.Array | None = None) -> Attend:
    """Returns an `Attend`: a token sees the last `window` tokens, itself included."""
    # `documents` [B, S], if given, numbers each token's document, the only one that it sees.

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> Any:
        length = q.shape[1]
        same_document = None
        if documents is not None:
            same_document = documents[:, :, None] == documents[:, None]
        # JAX's attention has no sinks.
        if sinks is not None:
            distance = jnp.arange(length)[:, None] - jnp.arange(length)
            seen = (distance >= 0) & (distance < window)
            seen = jnp.broadcast_to(seen, (q.shape[0], length, length))
            seen = seen if same_document is None else seen & same_document
            return masked_attention(q, k, v, seen, sinks), None
        # cuDNN takes only 16-bit numbers, and only masks of even lengths.
        fits_cudnn = q.dtype.itemsize == 2 and (same_document is None or length % 2 == 0)
        out = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=None if same_document is None else same_document[:, None],
            is_causal=True,
            implementation="cudnn" if fits_cudnn and jax.default_backend() == "gpu" else "xla",
            local_window_size=None if window >= length else (window - 1, 0),
        )
        return out, None

    return attend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model to be trained: a configuration, and how it is computed on whole sequences."""

    config: DecoderConfig
    dtype: Any = None  # of activations and matmuls; None: bfloat16 on GPUs, float32 elsewhere
    param_dtype: Any = jnp.float32
    remat: str = "none"  # the rematerialization policy of each layer, a key of `REMAT`
    loss_chunk: int = 1024  # the tokens whose logits a device holds at a time

    def init(self, key: jax.Array) -> Params:
        """Draws the parameters, in `param_dtype`, from a random key."""
        config, dtype = self.config, self.param_dtype
        # After the first key, two for each layer: for its weights, and for its MoE block.
        first, *keys = jax.random.split(key, 2 * config.num_layers + 1)
        weights = init_weights(first, shared_shapes(config), dtype)
        for i in range(config.num_layers):
            of_layer = init_weights(keys[2 * i], layer_shapes(config), dtype)
            weights |= {f"model.layers.{i}.{name}": weight for name, weight in of_layer.items()}
        return Params(weights, [init_moe(own_key, config, dtype) for own_key in keys[1::2]])

    def init_biases(self) -> jax.Array | None:
        """Returns the selection biases of all routers, [layers, E] of zeros; None without them."""
        if not self.config.parameters.selection_bias:
            return None
        return jnp.zeros((self.config.num_layers, self.config.moe.num_choosable), jnp.float32)

    def loss(
        self,
        params: Params,
        tokens: jax.Array,
        targets: jax.Array,
        biases: jax.Array | None = None,
        quantized_experts: Sequence[QuantizedExperts] | None = None,
        documents: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Computes the mean loss of tokens, in nats per token, [] float32.

        Also returns the metrics of the MoE blocks, with an axis of layers first.

        Args:
            tokens: the ids of the tokens, [B, S] int32.
            targets: [B, S] int32, the id of each token's successor; negative ones are ignored.
            biases: the result of `init_biases`, updated by the steps since; None: no biases.
            quantized_experts: the result of `quantize_experts`; None: each layer quantizes its own.
            documents: [B, S] int32, the number of each token's document, to which its attention is
                limited; None: to its sequence.
        """
        x, metrics = self._hidden_states(params, tokens, biases, quantized_experts, documents)
        with jax.named_scope("loss"):
            head = params.weights[EMBED if self.config.tied else HEAD]
            return cross_entropy(x, head, targets, chunk=self.loss_chunk), metrics

    def logits(
        self, params: Params, tokens: jax.Array, biases: jax.Array | None = None
    ) -> tuple[jax.Array, MoEMetrics]:
        """Computes the logits [B, S, V] float32 of all successors of tokens [B, S]."""
        x, metrics = self._hidden_states(params, tokens, biases)
        head = params.weights[EMBED if self.config.tied else HEAD].astype(x.dtype)
        return jnp.einsum("bsh,vh->bsv", x, head, preferred_element_type=jnp.float32), metrics

    def quantize_experts(self, params: Params) -> list[QuantizedExperts] | None:
        """Quantizes the experts of every layer, once for several calls of `loss`."""
        # Returns None if the layers do not multiply float8. Gradients still go to `params`.
        moe = self._on_mesh().moe
        if moe.matmul_dtype is None:
            return None
        return [quantize_experts(of_layer, moe) for of_layer in params.moe]

    def _on_mesh(self) -> DecoderConfig:
        """Returns the configuration for the ambient mesh, with the dtype of activations."""
        default = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        dtype = jnp.dtype(self.dtype or default)
        return on_mesh(self.config, jax.sharding.get_abstract_mesh()).replace(dtype=dtype)

    def _hidden_states(
        self,
        params: Params,
        tokens: jax.Array,
        biases: jax.Array | None,
        quantized: Sequence[QuantizedExperts] | None = None,
        documents: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Returns the normalized output [B, S, H] of the last layer, and the layers' metrics."""
        config = self._on_mesh()
        metrics = []
        with jax.named_scope("embed_tokens"):
            x = _look_up(params.weights[EMBED].astype(config.moe.dtype), tokens)
        angles = cos_and_sin(config, jnp.arange(tokens.shape[1]), x.dtype)
        for i, moe in enumerate(params.moe):
            attend = _causal(config.window(i), documents)

            # `attend` is a function, which `jax.checkpoint` does not take as an argument.
            def layer(weights: Any, moe: Any, x: Any, experts: Any, attend: Any = attend) -> Any:
                x, of_layer, _ = decoder_layer(
                    config, weights, moe, x, angles, attend, quantized_experts=experts
                )
                return x, of_layer

            if self.remat != "none":
                layer = jax.checkpoint(layer, policy=REMAT[self.remat])
            if biases is not None:
                moe = moe._replace(bias=biases[i])
            with jax.named_scope(f"layers_{i}"):
                experts = quantized[i] if quantized else None
                x, of_layer = layer(params.of_layer(i), moe, x, experts)
            metrics.append(of_layer)
        with jax.named_scope("norm"):
            x = rms_norm(x, params.weights[NORM], config.epsilon)
        return x, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *metrics)


def _look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings [B, S, H] of token ids [B, S], from the table [V, H]."""
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    # The table is gathered over "fsdp" first. Otherwise XLA would gather the results of the lookup,
    # for the tokens of all devices.
    if FSDP_AXIS in mesh_axes:
        split = PartitionSpec(TENSOR_AXIS if TENSOR_AXIS in mesh_axes else None)
        table = lax.with_sharding_constraint(table, split)
    return jnp.take(table, tokens, axis=0)
