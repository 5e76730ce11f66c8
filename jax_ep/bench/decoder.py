"""Defines a decoder-only Mixture-of-Experts language model in Flax Linen, with published sizes.

`python -m jax_ep bench train` measures this model and `examples/train_qwen3_moe.py` trains it, both
with the training step of `jax_ep.bench.train_step`.

The architecture is Qwen3-MoE's: RMSNorm before attention and before experts, grouped-query
attention with normalized queries and keys, a rotary embedding, and `jax_ep.linen.MoE` in every
layer. Modules have the names of the published checkpoint, so that the path of a parameter leads to
its published weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jax_ep.checks import as_axes
from jax_ep.linen import MoE
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.routing import Score

TENSOR_AXIS = "tensor"
FSDP_AXIS = "fsdp"
# Maps the logical axes of parameters (see `flax.linen.with_logical_partitioning`) to the mesh axes
# over which they are split, besides those of `fsdp_axes`.
_AXES: dict[str, tuple[str, ...]] = {
    "exp": ("expert",),
    "embed": (),
    "mlp": (TENSOR_AXIS,),
    "heads": (TENSOR_AXIS,),
    "vocab": (TENSOR_AXIS,),
}

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes of a `Decoder` model.

    Attributes:
        vocab: V, the size of the vocabulary.
        hidden: H, the width of the residual stream.
        num_layers: the number of decoder layers.
        num_heads: the number of query heads.
        num_key_value_heads: the number of key and value heads, which divides `num_heads`.
        head_dim: D, the width of a head.
        mlp_dim: F, the hidden width of one expert.
        num_experts: E, the number of routed experts of a layer.
        num_experts_per_token: K, the number of routed experts that each token chooses.
        num_shared_experts: the number of experts of width F that compute every token.
        score: the router's score function.
        normalize: whether the K router weights of a token are divided by their sum.
        epsilon: the constant that RMSNorm adds to the mean square.
        rotary_base: the base of the rotary embedding's wavelengths.
        tied: whether the output matrix is the transposed embedding.
    """

    vocab: int
    hidden: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    mlp_dim: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int = 0
    score: Score = "softmax"
    normalize: bool = True
    epsilon: float = 1e-6
    rotary_base: float = 1e6
    tied: bool = False

    def active_params(self) -> int:
        """Returns the number of parameters that are used to compute one token.

        In every layer, they are the matrices of K routed experts and of the shared experts, and
        the parameters of attention, router and norms. The output matrix [H, V] counts, too, but not
        the embedding, which is only looked up.
        """
        queries, keys = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys) + 2 * self.head_dim
        experts = self.num_experts_per_token + self.num_shared_experts
        moe = self.hidden * self.num_experts + experts * 3 * self.hidden * self.mlp_dim
        layer = attention + moe + 2 * self.hidden
        return self.num_layers * layer + self.hidden + self.vocab * self.hidden

    def training_flops_per_token(self, seq_len: int) -> float:
        """Returns the FLOPs of one token, forward and backward, in sequences of `seq_len` tokens.

        Each active parameter takes 6 FLOPs. Causal attention takes 6 * S * num_heads * head_dim
        FLOPs in each layer, because a token attends to S / 2 keys on average; S is `seq_len`.
        Recomputation by rematerialization does not count.
        """
        attention = self.num_layers * seq_len * self.num_heads * self.head_dim
        return 6.0 * (self.active_params() + attention)


MODELS = {
    "qwen3-30b-a3b": DecoderConfig(
        vocab=151936,
        hidden=2048,
        num_layers=48,
        num_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        mlp_dim=768,
        num_experts=128,
        num_experts_per_token=8,
    ),
    # A model with the sizes of DeepSeek-V3, but with grouped-query attention in place of multi-head
    # latent attention.
    "deepseek-v3-like": DecoderConfig(
        vocab=129280,
        hidden=7168,
        num_layers=61,
        num_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        mlp_dim=2048,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        score="sigmoid",
    ),
    "tiny": DecoderConfig(
        vocab=256,
        hidden=128,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        mlp_dim=128,
        num_experts=8,
        num_experts_per_token=2,
    ),
}


def decoder_mesh(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> Mesh:
    """Makes a mesh of Auto axes for a `Decoder`; `sizes` maps names of axes to numbers of ranks.

    The axes "fsdp" and "tensor" are left out if they have one rank. With an axis "fsdp", the layers
    gather their parameters, even those that are whole.
    """
    names = [n for n, size in sizes.items() if size > 1 or n not in (FSDP_AXIS, TENSOR_AXIS)]
    array = np.array(devices).reshape([sizes[name] for name in names])
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def fsdp_axes(num_experts: int, mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """Returns the attribute `fsdp_axes` of `jax_ep.linen.MoE` for a mesh.

    Over the mesh axis "fsdp", it splits the experts if their number is a multiple of the ranks
    along "expert" and "fsdp", because shards of whole experts are gathered without transposing
    them. Otherwise, and for parameters without experts, it splits H. Without "fsdp", it is {}.
    """
    if FSDP_AXIS not in mesh.axis_names:
        return {}
    ranks = mesh.shape.get("expert", 1) * mesh.shape[FSDP_AXIS]
    return ({} if num_experts % ranks else {"exp": FSDP_AXIS}) | {"embed": FSDP_AXIS}


def axis_rules(num_experts: int, mesh: Mesh) -> list[tuple[str, tuple[str, ...]]]:
    """Returns Flax's logical axis rules for a mesh: pairs (logical axis, mesh axes).

    Experts are split over the mesh axis "expert"; heads, experts' hidden width F and the vocabulary
    are split over "tensor"; and `fsdp_axes` over "fsdp". A mesh without one of these axes gets no
    rule for it.
    """
    further = fsdp_axes(num_experts, mesh)
    found = ((name, (*own, *as_axes(further.get(name, ())))) for name, own in _AXES.items())
    on_mesh = ((name, tuple(a for a in axes if a in mesh.axis_names)) for name, axes in found)
    return [(name, axes) for name, axes in on_mesh if axes]


def rotary(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Applies the rotary embedding (Su et al., 2021) to x [..., S, heads, D] at positions [S]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention_implementation(platform: str, dtype: Any) -> Literal["cudnn", "xla"]:
    """Returns how to compute attention: by "cudnn" for 16-bit dtypes on GPUs, else by "xla"."""
    return "cudnn" if platform == "gpu" and jnp.dtype(dtype).itemsize == 2 else "xla"


def _dot_of_heads(x: jax.Array, kernel: jax.Array, _: Any, precision: Any = None) -> jax.Array:
    """Multiplies x [..., heads, D] by a kernel [heads, D, H], with heads and D as one dimension.

    So the kernel's gradient is computed in the kernel's layout. XLA would transpose it otherwise.
    """
    return jnp.dot(
        x.reshape(*x.shape[:-2], -1), kernel.reshape(-1, kernel.shape[-1]), precision=precision
    )


class Attention(nn.Module):
    """Causal grouped-query self-attention with normalized queries and keys."""

    config: DecoderConfig
    implementation: Literal["cudnn", "xla"]
    dtypes: Mapping[str, Any]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Computes attention: x [B, S, H] -> [B, S, H], without the residual connection."""
        config, positions = self.config, jnp.arange(x.shape[1])
        norm = functools.partial(nn.RMSNorm, epsilon=config.epsilon, **self.dtypes)

        def heads(name: str, number: int) -> jax.Array:
            init = _partitioned(_kernel_init, "embed", "heads", None)
            shape = number, config.head_dim
            return nn.DenseGeneral(
                shape, use_bias=False, kernel_init=init, name=name, **self.dtypes
            )(x)

        q = norm(name="q_norm")(heads("q_proj", config.num_heads))
        k = norm(name="k_norm")(heads("k_proj", config.num_key_value_heads))
        y = jax.nn.dot_product_attention(
            rotary(q, positions, config.rotary_base),
            rotary(k, positions, config.rotary_base),
            heads("v_proj", config.num_key_value_heads),
            is_causal=True,
            implementation=self.implementation,
        )
        init = _partitioned(_kernel_init, "heads", None, "embed")
        return nn.DenseGeneral(
            x.shape[-1],
            axis=(-2, -1),
            use_bias=False,
            kernel_init=init,
            dot_general=_dot_of_heads,
            name="o_proj",
            **self.dtypes,
        )(y)


def moe_module(
    config: DecoderConfig, dtypes: Mapping[str, Any], moe: Mapping[str, Any], **module: Any
) -> MoE:
    """Makes the MoE layer of a decoder layer.

    If the ambient mesh has the axis "fsdp", the layer's parameters are split over this axis, and
    the layer gathers them in each call.

    Args:
        config: the sizes of the model.
        dtypes: the attributes `dtype` and `param_dtype` of the layer.
        moe: further attributes of `jax_ep.linen.MoE`, such as `matmul_dtype`.
        module: attributes that every Flax module has, such as `name`.
    """
    return MoE(
        num_experts=config.num_experts,
        num_experts_per_token=config.num_experts_per_token,
        mlp_dim=config.mlp_dim,
        num_shared_experts=config.num_shared_experts,
        score=config.score,
        normalize=config.normalize,
        tensor_axis=TENSOR_AXIS,
        fsdp_axes=fsdp_axes(config.num_experts, jax.sharding.get_abstract_mesh()),
        **module,
        **dtypes,
        **moe,
    )


class Layer(nn.Module):
    """A decoder layer: attention, and then an MoE layer.

    Both take the normalized x, and their result is added to x (pre-norm residual layers).
    """

    config: DecoderConfig
    implementation: Literal["cudnn", "xla"]
    dtypes: Mapping[str, Any]
    moe: Mapping[str, Any]

    @nn.compact
    def __call__(
        self, x: jax.Array, quantized_experts: QuantizedExperts | None = None
    ) -> tuple[jax.Array, MoEMetrics]:
        """Runs the layer on x [B, S, H]; returns its output [B, S, H] and the MoE layer's metrics.

        `quantized_experts` are the layer's experts in float8, if they were quantized before.
        """
        config = self.config
        norm = functools.partial(nn.RMSNorm, epsilon=config.epsilon, **self.dtypes)
        attention = Attention(config, self.implementation, self.dtypes, name="self_attn")
        x += attention(norm(name="input_layernorm")(x))
        moe = moe_module(config, self.dtypes, self.moe, name="mlp")
        y, metrics = moe(
            norm(name="post_attention_layernorm")(x), quantized_experts=quantized_experts
        )
        return x + y, metrics


class Decoder(nn.Module):
    """A decoder-only language model with an MoE layer in every decoder layer.

    Attributes:
        config: the model's sizes.
        dtype: the dtype of activations and matmuls.
        param_dtype: the dtype of the parameters.
        attention: the `implementation` argument of `jax.nn.dot_product_attention`.
        remat: the rematerialization policy of each layer, a key of `REMAT`.
        loss_chunk: the number of tokens whose logits a device holds at a time; see
            `cross_entropy`.
        moe: further attributes of `jax_ep.linen.MoE`, such as `matmul_dtype`.
    """

    config: DecoderConfig
    dtype: Any = jnp.bfloat16
    param_dtype: Any = jnp.float32
    attention: Literal["cudnn", "xla"] = "xla"
    remat: str = "none"
    loss_chunk: int = 1024
    moe: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        targets: jax.Array | None = None,
        quantized_experts: Sequence[QuantizedExperts] | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Runs the model on token ids and returns the loss or the logits.

        Args:
            tokens: [B, S] int32, token ids.
            targets: [B, S] int32, the id of each token's successor; the loss ignores positions
                with -1. None: logits are returned instead of the loss.
            quantized_experts: the result of `quantize_experts`. None: each layer quantizes its
                experts by itself, if it multiplies float8.

        Returns:
            The mean loss in nats per token, [] float32, or without targets the logits [B, S, V]
            float32; and the metrics of the MoE layers, each array with a leading axis of layers.
        """
        config, dtypes = self.config, self._dtypes
        embed = nn.Embed(
            config.vocab,
            config.hidden,
            embedding_init=_partitioned(nn.initializers.normal(0.02), "vocab", "embed"),
            name="embed_tokens",
            **dtypes,
        )
        x, metrics = _look_up(embed.embedding.astype(self.dtype), tokens), []
        kind: Any = Layer
        if self.remat != "none":
            kind = nn.remat(Layer, policy=REMAT[self.remat])
        for i in range(config.num_layers):
            layer = kind(config, self.attention, dtypes, self.moe, name=f"layers_{i}")
            x, layer_metrics = layer(x, quantized_experts[i] if quantized_experts else None)
            metrics.append(layer_metrics)
        x = nn.RMSNorm(epsilon=config.epsilon, name="norm", **dtypes)(x)
        if config.tied:
            head = embed.embedding.T
        else:
            init = _partitioned(_kernel_init, "embed", "vocab")
            head = self.param("lm_head", init, (config.hidden, config.vocab), self.param_dtype)
        if targets is None:
            out = jnp.dot(x, head.astype(self.dtype), preferred_element_type=jnp.float32)
        else:
            with jax.named_scope("loss"):
                out = cross_entropy(x, head, targets, chunk=self.loss_chunk)
        return out, jax.tree.map(lambda *m: jnp.stack(m), *metrics)

    @property
    def _dtypes(self) -> dict[str, Any]:
        """The keyword arguments `dtype` and `param_dtype` of every module of the model."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def quantize_experts(self, params: Any) -> list[QuantizedExperts] | None:
        """Quantizes the experts of every layer, once for several calls of the model.

        Returns the argument `quantized_experts` of these calls, a list with an entry per layer, or
        None if the layers do not multiply float8. Gradients still go to `params`.
        """
        if self.moe.get("matmul_dtype") is None:
            return None
        moe = moe_module(self.config, self._dtypes, self.moe, parent=None)
        quantize: Any = functools.partial(moe.apply, method="quantize_experts")
        layers = (params[f"layers_{i}"]["mlp"] for i in range(self.config.num_layers))
        return [quantize({"params": layer}) for layer in layers]


def _look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the rows of the embedding table [V, H] that belong to the tokens [B, S].

    If the table is split along H over "fsdp", it is gathered before the lookup. Otherwise XLA would
    gather the results of the lookup instead, for the tokens of all devices.
    """
    names = jax.sharding.get_abstract_mesh().axis_names
    if FSDP_AXIS in names:
        split = PartitionSpec(TENSOR_AXIS if TENSOR_AXIS in names else None)
        table = lax.with_sharding_constraint(table, split)
    return jnp.take(table, tokens, axis=0)


_kernel_init = nn.initializers.lecun_normal()


def _partitioned(init: Any, *axes: str | None) -> Any:
    return nn.with_logical_partitioning(init, axes)


def cross_entropy(
    x: jax.Array, head: jax.Array, targets: jax.Array, *, chunk: int = 1024
) -> jax.Array:
    """Computes the mean cross-entropy of x @ head without holding all logits in memory.

    On the ambient mesh, sequences are split over all axes but "tensor", the vocabulary is split
    over "tensor", and H of `head` over "fsdp". Each device computes the logits of `chunk` of its
    tokens at a time. Under differentiation, the forward pass also computes the gradients of each
    chunk, so the backward pass recomputes no logits. The gradient of `head` is accumulated in
    float32 and summed over devices once, after the last chunk.

    Args:
        x: [B, S, H] floating, the final hidden states; B is a multiple of the number of devices
            that sequences are split over.
        head: [H, V] floating, the output matrix; it is cast to the dtype of x.
        targets: [B, S] int32, the target token ids, below V; the loss ignores negative ones.
        chunk: the number of tokens of a chunk.

    Returns:
        The mean over targets that are not negative, [] float32, in nats.
    """
    return _cross_entropy(x, head, targets, chunk)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cross_entropy(x: jax.Array, head: jax.Array, targets: jax.Array, chunk: int) -> jax.Array:
    found = _on_ranks(x, head, targets, chunk, gradients=False)
    return found.loss / found.number


def _cross_entropy_fwd(x: jax.Array, head: jax.Array, targets: jax.Array, chunk: int) -> Any:
    found = _on_ranks(x, head, targets, chunk, gradients=True)
    return found.loss / found.number, (found, jnp.zeros((), head.dtype))


def _cross_entropy_bwd(chunk: int, saved: Any, g: jax.Array) -> Any:
    (_, number, dx, dhead), like_head = saved
    scale = g / number
    return (scale * dx).astype(dx.dtype), (scale * dhead).astype(like_head.dtype), None


_cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


class _Sums(NamedTuple):
    """The sum of the cross-entropy over all tokens whose target is not negative, and its gradients.

    Attributes:
        loss: [] float32, the sum of the tokens' losses.
        number: [] float32, the number of targets that are not negative, at least 1.
        dx: the gradient of `loss` for x, with x's shape and dtype; None if not computed.
        dhead: the gradient of `loss` for head, [H, V] float32; None if not computed.
    """

    loss: Any
    number: Any
    dx: Any = None
    dhead: Any = None


def _on_ranks(
    x: jax.Array, head: jax.Array, targets: jax.Array, chunk: int, gradients: bool
) -> _Sums:
    head = head.astype(x.dtype)
    mesh = jax.sharding.get_abstract_mesh()
    batch = tuple(name for name in mesh.axis_names if name != TENSOR_AXIS)
    tensor = tuple(name for name in mesh.axis_names if name == TENSOR_AXIS)
    fsdp = tuple(name for name in mesh.axis_names if name == FSDP_AXIS)
    on_rank = functools.partial(
        _chunks, chunk=chunk, gradients=gradients, batch=batch, tensor=tensor, fsdp=fsdp
    )
    if mesh.empty:
        return on_rank(x, head, targets)
    whole, rows, of_head = PartitionSpec(), PartitionSpec(batch), PartitionSpec(fsdp, tensor)
    grads = (rows, of_head) if gradients else (None, None)
    return jax.shard_map(
        on_rank,
        in_specs=(rows, of_head, rows),
        out_specs=_Sums(whole, whole, *grads),
        # JAX needs this check only to differentiate through a shard_map. It never differentiates
        # this one, because the custom VJP computes the gradients.
        check_vma=False,
    )(x, head, targets)


def _chunks(
    x: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    chunk: int,
    gradients: bool,
    batch: tuple[str, ...],
    tensor: tuple[str, ...],
    fsdp: tuple[str, ...],
) -> _Sums:
    """Computes the summed cross-entropy on one rank, for a chunk of its tokens at a time.

    Args:
        x: [b, S, H], the rank's b sequences of S tokens.
        head: the rank's part of the output matrix [H, V]: H is split over the ranks along `fsdp`,
            and V over those along `tensor`.
        targets: [b, S], the target token ids of the rank's sequences.
        chunk: the number of tokens of a chunk.
        gradients: whether to compute the gradients of x and `head`, too.
        batch: the mesh axes over which sequences are split.
        tensor: the mesh axes over which the vocabulary is split.
        fsdp: the mesh axes over which H of `head` is split.

    Returns:
        The sums over the tokens of all ranks. `dx` and `dhead` are the rank's parts, in the shapes
        of x and `head`.
    """
    if fsdp:
        head = lax.all_gather(head, fsdp, axis=0, tiled=True)
    hidden, columns = head.shape
    num_tokens = targets.size
    chunk = min(chunk, num_tokens)
    padding = -num_tokens % chunk
    tokens = jnp.pad(x.reshape(num_tokens, hidden), ((0, padding), (0, 0)))
    wanted = jnp.pad(targets.reshape(num_tokens), (0, padding), constant_values=-1)
    first = lax.axis_index(tensor) * columns if tensor else 0

    def step(carry: Any, rows: tuple[jax.Array, jax.Array]) -> Any:
        loss, dhead = carry
        # The tokens of one chunk, [chunk, H], and their targets, [chunk].
        x, target = rows
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)
        top = lax.pmax(jnp.max(logits, axis=1), tensor)
        exponentials = jnp.exp(logits - top[:, None])
        total = lax.psum(jnp.sum(exponentials, axis=1), tensor)
        column = target - first
        here = (0 <= column) & (column < columns)
        logit = jnp.take_along_axis(logits, jnp.clip(column, 0, columns - 1)[:, None], axis=1)
        chosen = lax.psum(jnp.where(here, logit[:, 0], 0), tensor)
        counts = target >= 0
        loss += jnp.sum(jnp.where(counts, top + jnp.log(total) - chosen, 0))
        if not gradients:
            return (loss, dhead), None
        is_target = jnp.arange(columns) == column[:, None]
        dlogits = jnp.where(counts[:, None], exponentials / total[:, None] - is_target, 0)
        dlogits = dlogits.astype(x.dtype)
        dx = jnp.dot(dlogits, head.T, preferred_element_type=jnp.float32)
        dhead += jnp.dot(x.T, dlogits, preferred_element_type=jnp.float32)
        return (loss, dhead), lax.psum(dx, tensor).astype(x.dtype)

    zeros = jnp.zeros(head.shape, jnp.float32) if gradients else None
    chunks = tokens.reshape(-1, chunk, hidden), wanted.reshape(-1, chunk)
    (loss, dhead), dx = lax.scan(step, (jnp.float32(0), zeros), chunks)
    number = lax.psum(jnp.sum(targets >= 0, dtype=jnp.float32), batch)
    sums = _Sums(lax.psum(loss, batch), jnp.maximum(number, 1))
    if not gradients:
        return sums
    dx = dx.reshape(-1, hidden)[:num_tokens].reshape(x.shape)
    if fsdp:
        dhead = lax.psum_scatter(dhead, fsdp, scatter_dimension=0, tiled=True)
    others = tuple(name for name in batch if name not in fsdp)
    return sums._replace(dx=dx, dhead=lax.psum(dhead, others))
