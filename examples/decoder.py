"""Decoder models with MoE layers, Qwen3-MoE and GPT-OSS: weights, prefill and decoding.

`load_model` reads a published checkpoint directory; `random_model` takes the shapes of a
config.json and fills them with random numbers. `prefill` reads prompts of different lengths, in
chunks, padded on either side. `decode` continues the prompts in one compiled loop on the devices,
and `step` is one iteration of that loop. `jax_ep` computes the MoE block of each layer; attention,
norms and the rotary embedding are plain JAX in this file.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep import Format, MoEConfig, MoEParams, QuantizedArray, moe_layer, quantize
from jax_ep.checkpoints import load_moe_params
from jax_ep.checkpoints.block import plan_block
from jax_ep.checkpoints.encodings import Quantization, open_tensor
from jax_ep.checkpoints.safetensors import Directory
from jax_ep.formats import Transposed
from jax_ep.moe.params import LOGICAL_AXES
from jax_ep.placement import Placement

# The parsed content of a published config.json.
Published = dict[str, Any]
Weights = dict[str, jax.Array]

# The attention window of a layer that attends to all earlier tokens.
NO_WINDOW = 2**30
# Stands in for the token after a sequence's end, and for the position of a token that is padding.
PADDING = -1
QKV = "self_attn.qkv_proj"


class Rotary(NamedTuple):
    """The rotary embedding, which rotates the D / 2 pairs of values of a head of size D.

    Attributes:
        frequencies: an angle in radians for each pair: pair i of the token at position p is rotated
            by p * frequencies[i].
        scale: factor on cosine and sine; YaRN sets it.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0


class Config(NamedTuple):
    """The model's sizes and options; hashable, hence a static argument of jitted functions.

    In layer i a token attends to `windows[i]` tokens: itself and those right before it.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    # Added to the mean square in every RMSNorm.
    epsilon: float
    rotary: Rotary
    windows: tuple[int, ...]
    moe: MoEConfig
    stop_tokens: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.moe.mesh, Mesh)
        return self.moe.mesh


class Model(NamedTuple):
    """The model's weights, under the names of the published checkpoint.

    `layers` has the weights of each layer but its MoE block, under names without their prefix
    "model.layers.<i>."; `moe` has the MoE blocks. Both are lists with one entry per layer, or one
    entry whose arrays are stacked over the layers. The query, key and value projections are joined
    into one matrix, `QKV`. `placement` says which expert each expert slot holds. It is None if the
    number of devices divides the number of experts, because no slots are needed then.
    """

    shared: Weights
    layers: list[Weights] | Weights
    moe: list[MoEParams] | MoEParams
    placement: Placement | None = None


class Cache(NamedTuple):
    """Key-value caches of B sequences, with M token slots each, filled from slot 0 upwards.

    Attributes:
        keys, values: a list of one array per layer, [B, M, key-value heads, head size], or one
            array with an axis of layers in front.
        positions: [B, M] int32, the position in its sequence of the token in each slot; PADDING
            where the slot holds none.
        lengths: [B] int32, the number of tokens read of each sequence.
        filled: [] int32, the number of filled slots, the same for all sequences.
    """

    keys: list[jax.Array] | jax.Array
    values: list[jax.Array] | jax.Array
    positions: jax.Array
    lengths: jax.Array
    filled: jax.Array


class Sampling(NamedTuple):
    """How a token is chosen: the most likely at temperature 0, else drawn from the softmax."""

    temperature: float = 0.0
    seed: int = 0


class State(NamedTuple):
    """The state of a batch of B sequences during decoding.

    Attributes:
        tokens: [B, steps] int32, the tokens decoded so far; PADDING elsewhere.
        last: [B] int32, the newest token of each sequence.
        finished: [B] bool, whether a sequence has produced a stop token.
        done: [] int32, the number of tokens decoded of each sequence.
        cache: keys and values of all tokens but the newest.
    """

    tokens: jax.Array
    last: jax.Array
    finished: jax.Array
    done: jax.Array
    cache: Cache


# ------------------------------------------------------------------------------- weights and sizes


def layer_shapes(published: Published) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's published tensors by name, without those of its MoE block."""
    hidden, heads = published["hidden_size"], published["num_attention_heads"]
    width = head_dim(published)
    rows = {"q": heads * width, "o": heads * width}
    rows |= dict.fromkeys("kv", published["num_key_value_heads"] * width)
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}_proj.weight": (rows[name], hidden) for name in "qkv"},
        "self_attn.o_proj.weight": (hidden, rows["o"]),
    }
    if published.get("attention_bias"):
        shapes |= {f"self_attn.{name}_proj.bias": (rows[name],) for name in "qkv"}
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if published["model_type"] == "gpt_oss":
        return shapes | {"self_attn.sinks": (heads,)}
    return shapes | {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}


def shared_shapes(published: Published) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the published tensors that belong to no layer, by name."""
    table = published["vocab_size"], published["hidden_size"]
    shapes = {"model.embed_tokens.weight": table, "model.norm.weight": table[1:]}
    return shapes if published.get("tie_word_embeddings") else shapes | {"lm_head.weight": table}


def head_dim(published: Published) -> int:
    return published.get("head_dim") or published["hidden_size"] // published["num_attention_heads"]


def model_config(published: Published, moe: MoEConfig) -> Config:
    """Makes a `Config` from a config.json; exits unless it is of a Qwen3-MoE or a GPT-OSS."""
    layers, kind = published["num_hidden_layers"], published.get("model_type")
    dense = published.get("mlp_only_layers") or published.get("decoder_sparse_step", 1) != 1
    if kind not in ("qwen3_moe", "gpt_oss") or dense or published.get("use_sliding_window"):
        raise SystemExit(
            "config.json must be that of a GPT-OSS, or of a Qwen3-MoE with experts in every layer "
            f"and without sliding windows, but has model_type {kind!r}, mlp_only_layers "
            f"{published.get('mlp_only_layers')}, decoder_sparse_step "
            f"{published.get('decoder_sparse_step')} and use_sliding_window "
            f"{published.get('use_sliding_window')}."
        )
    windows = [NO_WINDOW] * layers
    if kind == "gpt_oss":
        kinds = published.get("layer_types") or ["sliding_attention", "full_attention"] * layers
        for i in range(layers):
            if kinds[i] == "sliding_attention":
                windows[i] = published["sliding_window"]
    stop = published.get("eos_token_id")
    return Config(
        num_heads=published["num_attention_heads"],
        num_key_value_heads=published["num_key_value_heads"],
        head_dim=head_dim(published),
        epsilon=published["rms_norm_eps"],
        rotary=rotary_of(published),
        windows=tuple(windows),
        moe=moe,
        stop_tokens=() if stop is None else tuple(np.atleast_1d(stop).tolist()),
    )


def rotary_of(published: Published) -> Rotary:
    """Returns the rotary embedding that a config.json asks for: plain, or YaRN (Peng et al., 2023).

    YaRN divides the frequency of pairs that rotate seldom within the original context by `factor`,
    and keeps the frequency of pairs that rotate often.
    """
    said = published.get("rope_parameters") or published.get("rope_scaling") or {}
    base = said.get("rope_theta") or published["rope_theta"]
    width = head_dim(published)
    frequencies = base ** (-np.arange(0, width, 2) / width)
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return Rotary(tuple(frequencies.tolist()))
    if kind != "yarn":
        raise SystemExit(f"config.json must have a rope_type of default or yarn, but has {kind!r}.")
    factor = said["factor"]
    context = said.get("original_max_position_embeddings") or published["max_position_embeddings"]

    # The (fractional) index of the pair of values that rotates `turns` times within the context.
    def pair(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(said.get("beta_fast") or 32), pair(said.get("beta_slow") or 1)
    if said.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    slow = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    scale = said.get("attention_factor") or 0.1 * math.log(max(factor, 1)) + 1
    return Rotary(tuple((frequencies * (1 - slow + slow / factor)).tolist()), scale)


def load_model(
    folder: Path,
    mesh: Mesh,
    dtype: Any,
    *,
    stack: bool = False,
    quantized: Literal["keep"] | Format | None = None,
    **fields: Any,
) -> tuple[Config, Model]:
    """Loads a published checkpoint onto a mesh: experts are split, other weights replicated.

    Args:
      folder: the directory, with config.json and safetensors files.
      mesh: the mesh, with the axis "expert".
      dtype: the dtype of the weights that are not quantized.
      stack: whether to stack the layers' weights into one array per name, so that the layers can be
        scanned.
      quantized: None: matrices that are stored as float8 or MXFP4 are converted to `dtype`. "keep":
        experts' matrices stay as they are stored. A format: all experts are quantized to it.
      fields: further fields of `jax_ep.MoEConfig`.
    """
    published = json.loads((folder / "config.json").read_text())
    # Exit here, before anything is loaded, if the model is of another kind.
    model_config(published, MoEConfig(num_experts=1, num_experts_per_token=1))
    files, everywhere = Directory(folder), NamedSharding(mesh, PartitionSpec())
    said = published.get("quantization_config") or {}
    block = tuple(said.get("weight_block_size") or Quantization.block)
    quantization = Quantization(said.get("quant_method"), block)

    def read(name: str, shape: tuple[int, ...]) -> jax.Array:
        stored = open_tensor(files, name, quantization)
        if stored.shape != shape:
            raise SystemExit(f"{name} must have shape {shape}, but has {stored.shape}.")
        values = stored.read((slice(None),) * len(shape)).astype(dtype)
        return jax.device_put(values, everywhere)

    slots = _slots(published, mesh)
    moe_config = None

    def layer(i: int) -> tuple[Weights, MoEParams]:
        nonlocal moe_config
        shapes = layer_shapes(published)
        weights = {name: read(f"model.layers.{i}.{name}", shapes[name]) for name in shapes}
        moe_config, params = load_moe_params(
            folder, i, mesh=mesh, dtype=dtype, quantized=quantized, **slots, **fields
        )
        return _one_qkv(weights), params

    shared = {name: read(name, shape) for name, shape in shared_shapes(published).items()}
    layers, moe = _layers(map(layer, range(published["num_hidden_layers"])), published, stack)
    assert moe_config is not None
    generation = folder / "generation_config.json"
    if generation.exists():
        published |= {"eos_token_id": json.loads(generation.read_text()).get("eos_token_id")}
    config = model_config(published, moe_config)
    return config, Model(shared, layers, moe, _placement(moe_config, mesh))


def random_model(
    published: Published,
    mesh: Mesh,
    dtype: Any,
    *,
    stack: bool = False,
    seed: int = 0,
    quantized: Format | None = None,
    **fields: Any,
) -> tuple[Config, Model]:
    """Makes a model with the shapes of a config.json and random weights; reads no checkpoint.

    The arguments are those of `load_model`; a format in `quantized` quantizes all experts.
    """
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(published))
        block = plan_block(scratch, 0)
    assert block is not None
    slots = _slots(published, mesh)
    moe_config = MoEConfig(**dict(block.fields), mesh=mesh, **slots, **fields)
    shapes = {name: block.shape(name) for name in block.params()}
    specs = {
        name: PartitionSpec(*("expert" if axis == "exp" else None for axis in LOGICAL_AXES[name]))
        for name in shapes
    }

    @functools.partial(
        jax.jit,
        out_shardings=(
            NamedSharding(mesh, PartitionSpec()),
            {name: NamedSharding(mesh, spec) for name, spec in specs.items()},
        ),
    )
    def layer(key: jax.Array) -> tuple[Weights, dict[str, Any]]:
        keys = jax.random.split(key)
        weights = _random(keys[0], layer_shapes(published), -1, dtype)
        params: dict[str, Any] = _random(keys[1], shapes, -2, dtype)
        if slots:
            # Slot s holds expert s % E, as in a checkpoint that `load_model` has loaded.
            experts = jnp.arange(slots["num_slots"]) % moe_config.num_experts
            of_experts = [name for name in params if LOGICAL_AXES[name][0] == "exp"]
            params |= {name: params[name][experts] for name in of_experts}
        if quantized is not None:
            # Quantizes the transposed matrices, as published files do.
            format = Transposed.of(quantized)
            params |= {name: quantize(params[name], format) for name in ("wi_0", "wi_1", "wo")}
        return weights, params

    def with_params(key: jax.Array) -> tuple[Weights, MoEParams]:
        weights, params = layer(key)
        return _one_qkv(weights), MoEParams.of(**params)

    key, *keys = jax.random.split(jax.random.key(seed), published["num_hidden_layers"] + 1)
    layers, moe = _layers(map(with_params, keys), published, stack)
    shared = jax.jit(
        lambda key: _random(key, shared_shapes(published), -1, dtype),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )(key)
    model = Model(shared, layers, moe, _placement(moe_config, mesh))
    return model_config(published, moe_config), model


def _random(key: jax.Array, shapes: dict[str, Any], fan_in: int, dtype: Any) -> Weights:
    """Draws weights of the given shapes at random, except norm weights, which are ones.

    A matrix is scaled by 1 / sqrt(its length along the axis `fan_in`), so that its product with a
    vector has about the vector's scale.
    """
    arrays = {}
    for one, (name, shape) in zip(jax.random.split(key, len(shapes)), shapes.items(), strict=True):
        if "norm" in name:
            arrays[name] = jnp.ones(shape, dtype)
            continue
        is_matrix = len(shape) > 1 and "bias" not in name
        scale = shape[fan_in] ** -0.5 if is_matrix else 0.3
        arrays[name] = (jax.random.normal(one, shape) * scale).astype(dtype)
    return arrays


def _slots(published: Published, mesh: Mesh) -> dict[str, Any]:
    """Returns {"num_slots": number of expert slots}, or {} if the model needs no slots.

    An expert slot is a place in a device's memory for one expert's weights. Every device has the
    same number of slots, so slots are needed if the number of devices does not divide the number of
    experts. The dict has keyword arguments for `MoEConfig` and for the loader of checkpoints.
    """
    experts = published.get("num_experts") or published["num_local_experts"]
    return {"num_slots": experts + -experts % mesh.size} if experts % mesh.size else {}


def _placement(config: MoEConfig, mesh: Mesh) -> Placement | None:
    if config.num_slots is None:
        return None
    sizes = {"num_experts": config.num_experts, "num_slots": config.num_slots}
    return Placement.in_order(**sizes, num_ranks=mesh.size)[0]


def format_of_experts(model: Model) -> str:
    """Returns the name of the format in which the experts' matrices are held, or their dtype."""
    params = model.moe[0] if isinstance(model.moe, list) else model.moe
    wi = params.wi_0
    return wi.format.name if isinstance(wi, QuantizedArray) else str(wi.dtype)


def _one_qkv(weights: Weights) -> Weights:
    """Joins the query, key and value projections, so that one matmul computes all three."""
    for kind in ("weight", "bias"):
        names = [f"self_attn.{name}_proj.{kind}" for name in "qkv"]
        if names[0] in weights:
            parts = [weights.pop(name) for name in names]
            weights[f"{QKV}.{kind}"] = jnp.concatenate(parts)
    return weights


def _layers(
    layers: Iterable[tuple[Weights, MoEParams]], published: Published, stack: bool
) -> tuple[Any, Any]:
    """Collects the layers' weights, and their MoE parameters, in lists or in stacked arrays.

    Layers are stacked one by one as they are made, so at most one layer is in memory twice.
    """
    if not stack:
        weights, moe = zip(*layers, strict=True)
        return list(weights), list(moe)
    count = published["num_hidden_layers"]

    def room(array: jax.Array) -> jax.Array:
        split = array.sharding
        assert isinstance(split, NamedSharding)
        stacked = NamedSharding(split.mesh, PartitionSpec(None, *split.spec))
        return jnp.zeros((count, *array.shape), array.dtype, device=stacked)

    @functools.partial(jax.jit, donate_argnums=0)
    def write(stacked: Any, layer: Any, i: jax.Array) -> Any:
        return jax.tree.map(lambda into, array: into.at[i].set(array), stacked, layer)

    stacked = None
    for i, layer in enumerate(layers):
        stacked = jax.tree.map(room, layer) if stacked is None else stacked
        stacked = write(stacked, layer, i)
    assert stacked is not None
    return stacked


# ------------------------------------------------------------------------------------ forward pass


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide *= jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return weight * wide.astype(x.dtype)


def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Applies rotary embedding to x [B, S, heads, D] (Su et al., "RoFormer", 2021)."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def cos_and_sin(kind: Rotary, positions: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines that `rotary` takes, each [B, S, 1, D / 2] of `dtype`.

    `positions` [B, S] are the positions of the tokens in their sequences. `kind` has the model's
    frequencies and its scale.
    """
    angle = positions[..., None, None] * jnp.array(kind.frequencies, jnp.float32)
    return (jnp.cos(angle) * kind.scale).astype(dtype), (jnp.sin(angle) * kind.scale).astype(dtype)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """Computes attention of q [B, S, heads, D] to k and v [B, M, groups, D], masked by `seen`.

    The heads form `groups` groups of equal size; the heads of a group share one key and one value
    per token. `seen` [B, S, M] bool says which keys a query attends to. `sinks` [heads], if given,
    is one more score per head in the softmax, without a value (GPT-OSS). Returns
    [B, S, heads * D].
    """
    batch, length, heads, width = q.shape
    groups = k.shape[2]
    q = q.reshape(batch, length, groups, heads // groups, width)
    scores = jnp.einsum("bsgrd,bmgd->bgrsm", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * width**-0.5, -1e30)
    top = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(groups, heads // groups, 1, 1)
        top = jnp.maximum(top, sink)
    scores = jnp.exp(scores - top)
    total = jnp.sum(scores, axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sink - top)
    out = jnp.einsum("bgrsm,bmgd->bsgrd", (scores / total).astype(v.dtype), v)
    return out.reshape(batch, length, heads * width)


def attention(
    config: Config,
    w: Weights,
    x: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    seen: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    start: jax.Array,
    layer: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the attention block for x [B, S, H]; returns the output and the updated caches.

    The keys and values of x are written into the cache slots from `start` on. The queries of x then
    attend to the slots of the cache where `seen` [B, S, M] is True.

    Args:
        config: the model's sizes.
        w: the layer's weights, by name.
        x: [B, S, H], the tokens' hidden states.
        angles: the results of `cos_and_sin` for the positions of x.
        seen: [B, S, M] bool, the cache slots that each token attends to.
        keys, values: the caches of M slots, as in `Cache`.
        start: [] int32, the first cache slot that is written.
        layer: the layer's index in caches stacked over the layers, or None if the caches are this
            layer's alone.
    """
    bias = w.get(f"{QKV}.bias", 0)
    projected = (x @ w[f"{QKV}.weight"].T + bias).reshape(*x.shape[:2], -1, config.head_dim)
    groups = config.num_key_value_heads
    q, k, v = jnp.split(projected, [config.num_heads, config.num_heads + groups], axis=2)
    if "self_attn.q_norm.weight" in w:
        q = rms_norm(q, w["self_attn.q_norm.weight"], config.epsilon)
        k = rms_norm(k, w["self_attn.k_norm.weight"], config.epsilon)
    keys = _write(keys, rotary(k, *angles), start, layer)
    values = _write(values, v, start, layer)
    own_keys, own_values = keys, values
    if layer is not None:
        own_keys, own_values = (
            jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False) for cache in (keys, values)
        )
    out = attend(rotary(q, *angles), own_keys, own_values, seen, w.get("self_attn.sinks"))
    out = out @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)
    return out, keys, values


def _write(
    cache: jax.Array, rows: jax.Array, start: jax.Array, layer: jax.Array | None
) -> jax.Array:
    if layer is None:
        return jax.lax.dynamic_update_slice_in_dim(cache, rows, start, 1)
    return jax.lax.dynamic_update_slice(cache, rows[None], (layer, 0, start, 0, 0))


def hidden_states(
    config: Config, model: Model, tokens: jax.Array, mask: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache, jax.Array]:
    """Runs all layers on tokens [B, S], writing keys and values into the cache's next S slots.

    `mask` [B, S] bool is False where a column is padding.

    Returns:
        The last layer's output [B, S, H], the new cache, and how many tokens chose each expert,
        [layers, E] int32.
    """
    positions = cache.lengths[:, None] + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    own = jnp.where(mask, positions, PADDING)
    slots = jax.lax.dynamic_update_slice_in_dim(cache.positions, own, cache.filled, 1)
    past = (slots[:, None] >= 0) & (slots[:, None] <= positions[..., None])
    x = model.shared["model.embed_tokens.weight"][tokens]
    angles = cos_and_sin(config.rotary, positions, x.dtype)

    def block(x, w, moe, window, keys, values, layer):
        seen = past & (slots[:, None] > positions[..., None] - window)
        y = rms_norm(x, w["input_layernorm.weight"], config.epsilon)
        y, keys, values = attention(config, w, y, angles, seen, keys, values, cache.filled, layer)
        x += y
        y = rms_norm(x, w["post_attention_layernorm.weight"], config.epsilon)
        y, metrics = moe_layer(moe, y, config.moe, mask, placement=model.placement)
        return x + y, keys, values, metrics.expert_counts

    keys, values = cache.keys, cache.values
    if isinstance(model.layers, list):
        counts, keys, values = [], list(keys), list(values)
        for i, (w, moe) in enumerate(zip(model.layers, model.moe, strict=True)):
            x, keys[i], values[i], count = block(
                x, w, moe, config.windows[i], keys[i], values[i], None
            )
            counts.append(count)
        chosen = jnp.stack(counts)
    else:

        def scanned(carry, layer):
            (x, keys, values), (w, moe, window, i) = carry, layer
            *carry, count = block(x, w, moe, window, keys, values, i)
            return tuple(carry), count

        windows = jnp.array(config.windows, jnp.int32)
        layers = model.layers, model.moe, windows, jnp.arange(config.num_layers)
        (x, keys, values), chosen = jax.lax.scan(scanned, (x, keys, values), layers)
    lengths, filled = cache.lengths + jnp.sum(mask, axis=1), cache.filled + tokens.shape[1]
    return x, Cache(keys, values, slots, lengths.astype(jnp.int32), filled), chosen


def logits_of(config: Config, model: Model, x: jax.Array) -> jax.Array:
    """Returns next-token logits [B, vocabulary] float32 from the last layer's output x [B, H]."""
    shared = model.shared
    head = shared.get("lm_head.weight", shared["model.embed_tokens.weight"])
    x = rms_norm(x, shared["model.norm.weight"], config.epsilon)
    return jnp.matmul(x, head.T, preferred_element_type=jnp.float32)


# -------------------------------------------------------------------------- prefill and decoding


def empty_cache(config: Config, model: Model, batch: int, room: int, dtype: Any) -> Cache:
    """Allocates a cache of `room` slots per sequence.

    Its arrays are a list of one per layer, or stacked over the layers, like the model's weights.
    The batch axis is split over the mesh if the number of devices divides it.
    """
    mesh = config.mesh
    axes = mesh.axis_names if batch % mesh.size == 0 else None
    shape = batch, room, config.num_key_value_heads, config.head_dim
    keys: Any
    values: Any
    if isinstance(model.layers, list):
        split = NamedSharding(mesh, PartitionSpec(axes))
        make = functools.partial(jnp.zeros, shape, dtype, device=split)
        keys, values = ([make() for _ in model.layers] for _ in range(2))
    else:
        split = NamedSharding(mesh, PartitionSpec(None, axes))
        keys, values = (
            jnp.zeros((config.num_layers, *shape), dtype, device=split) for _ in range(2)
        )
    rows = NamedSharding(mesh, PartitionSpec(axes))
    positions = jnp.full((batch, room), PADDING, jnp.int32, device=rows)
    lengths = jnp.zeros(batch, jnp.int32, device=rows)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Cache(keys, values, positions, lengths, jnp.zeros((), jnp.int32, device=everywhere))


def padded(prompts: Sequence[Sequence[int]], side: str = "left") -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts to tokens [B, S] int32; also returns their mask [B, S], False at padding."""
    shape = len(prompts), max(map(len, prompts))
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for i, prompt in enumerate(prompts):
        at = slice(shape[1] - len(prompt), None) if side == "left" else slice(len(prompt))
        tokens[i, at], mask[i, at] = prompt, True
    return tokens, mask


def rounded_up(length: int, chunk: int) -> int:
    """Returns how many cache slots `prefill` fills per sequence for prompts [B, length].

    That is `length` rounded up to whole chunks.
    """
    return length + -length % min(chunk, length)


@functools.partial(jax.jit, static_argnames=("config", "chunk"), donate_argnames="cache")
def prefill(
    config: Config, model: Model, tokens: jax.Array, mask: jax.Array, cache: Cache, chunk: int
) -> tuple[jax.Array, Cache]:
    """Reads prompts [B, S], `chunk` columns at a time; `mask` [B, S] is False at padding.

    Every prompt must have at least one token.

    Returns:
        The logits [B, vocabulary] float32 of each prompt's next token, and the cache.
    """
    batch, length = tokens.shape
    chunk = min(chunk, length)
    more = rounded_up(length, chunk) - length

    def chunks(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (more, 0)))
        return array.reshape(batch, -1, chunk).swapaxes(0, 1)

    def read(carry: tuple[Cache, jax.Array], part: tuple[jax.Array, jax.Array]) -> Any:
        cache, last = carry
        x, cache, _ = hidden_states(config, model, *part, cache)
        here = part[1]
        final = chunk - 1 - jnp.argmax(here[:, ::-1], axis=1)
        x = jnp.take_along_axis(x, final[:, None, None], axis=1)[:, 0]
        return (cache, jnp.where(here.any(axis=1)[:, None], x, last)), None

    table = model.shared["model.embed_tokens.weight"]
    nothing = jnp.zeros((batch, table.shape[1]), table.dtype)
    (cache, last), _ = jax.lax.scan(read, (cache, nothing), (chunks(tokens), chunks(mask)))
    return logits_of(config, model, last), cache


def choose(config: Config, sampling: Sampling, logits: jax.Array, state: State) -> State:
    """Chooses a next token for each sequence from logits [B, vocabulary]; returns the new state.

    A sequence that has ended gets PADDING.
    """
    if sampling.temperature:
        key = jax.random.fold_in(jax.random.key(sampling.seed), state.done)
        chosen = jax.random.categorical(key, logits / sampling.temperature)
    else:
        chosen = jnp.argmax(logits, axis=-1)
    chosen = chosen.astype(jnp.int32)
    column = jnp.where(state.finished, PADDING, chosen)[:, None]
    finished = state.finished
    if config.stop_tokens:
        finished |= jnp.isin(chosen, jnp.array(config.stop_tokens, jnp.int32))
    tokens = jax.lax.dynamic_update_slice_in_dim(state.tokens, column, state.done, 1)
    return State(tokens, chosen, finished, state.done + 1, state.cache)


@functools.partial(jax.jit, static_argnames=("config", "sampling", "steps"), donate_argnums=3)
def begin(config: Config, sampling: Sampling, logits: jax.Array, cache: Cache, steps: int) -> State:
    """Makes the state for decoding `steps` tokens; chooses the first by the logits of `prefill`."""
    batch = logits.shape[0]
    tokens = jnp.full((batch, steps), PADDING, jnp.int32)
    nothing = jnp.zeros(batch, jnp.int32)
    state = State(tokens, nothing, nothing != 0, jnp.int32(0), cache)
    return choose(config, sampling, logits, state)


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="state")
def step(
    config: Config, sampling: Sampling, model: Model, state: State
) -> tuple[State, jax.Array, jax.Array]:
    """Decodes one token of each sequence.

    Returns:
        The new state, the logits [B, vocabulary] float32 from which the tokens were chosen, and how
        many tokens chose each expert, [layers, E] int32.
    """
    last = jnp.where(state.finished, 0, state.last)[:, None]
    x, cache, chosen = hidden_states(config, model, last, ~state.finished[:, None], state.cache)
    logits = logits_of(config, model, x[:, 0])
    state = choose(config, sampling, logits, state._replace(cache=cache))
    return state, logits, chosen


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="state")
def decode(config: Config, sampling: Sampling, model: Model, state: State) -> State:
    """Decodes in one compiled loop until every sequence has its stop token or no step is left."""
    steps = state.tokens.shape[1]

    def goes_on(state: State) -> jax.Array:
        return (state.done < steps) & ~state.finished.all()

    return jax.lax.while_loop(goes_on, lambda state: step(config, sampling, model, state)[0], state)
