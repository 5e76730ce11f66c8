"""Decodes with a `jax_ep.models` decoder: prompts of any lengths, a compiled loop over tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.models import decoder
from jax_ep.models.config import DecoderConfig
from jax_ep.models.decoder import EMBED, QKV, Params, Weights
from jax_ep.moe.params import MoEParams
from jax_ep.placement.table import Placement

# Stands in for the token after a sequence's end, and for the position of a token that is padding.
PADDING = -1


class Model(NamedTuple):
    """The parameters of a decoder, as decoding reads them."""

    shared: Weights  # that belong to no layer, by their published names
    # Without "model.layers.<i>." in their names, and with queries, keys and values joined as `QKV`.
    layers: list[Weights]
    moe: list[MoEParams]  # of each layer
    placement: Placement | None = None  # of the experts; None if each has one copy, in order

    @classmethod
    def of(cls, params: Params, config: DecoderConfig, num_ranks: int) -> Model:
        """Makes the model from parameters, whose experts are spread over `num_ranks` ranks."""
        shared = {n: w for n, w in params.weights.items() if ".layers." not in n}
        layers = [params.of_layer(i) for i in range(config.num_layers)]
        for weights in layers:
            # Decoding multiplies queries', keys' and values' weights at once.
            for kind in ("weight", "bias"):
                names = [f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
                if names[0] in weights:
                    joined = jnp.concatenate([weights.pop(name) for name in names])
                    weights[f"{QKV}.{kind}"] = joined
        placement = None
        if config.moe.num_slots is not None:
            sizes = {"num_experts": config.num_experts, "num_slots": config.moe.num_slots}
            placement = Placement.in_order(**sizes, num_ranks=num_ranks)[0]
        return cls(shared, layers, params.moe, placement)


class Cache(NamedTuple):
    """Key-value caches of B sequences, with M token slots each, filled from slot 0 upwards."""

    keys: list[jax.Array]  # [B, M, key-value heads, head size] of each layer
    values: list[jax.Array]
    # [B, M] int32: each slot's token's position in its sequence; PADDING where there is no token.
    positions: jax.Array
    lengths: jax.Array  # [B] int32: the number of tokens read of each sequence
    filled: jax.Array  # [] int32: the number of filled slots, the same for all sequences


class Sampling(NamedTuple):
    """How a token is chosen: the most likely at temperature 0, else drawn from the softmax."""

    temperature: float = 0.0
    seed: int = 0


GREEDY = Sampling()


class State(NamedTuple):
    """The state of a batch of B sequences during decoding."""

    tokens: jax.Array  # [B, steps] int32: the tokens decoded so far; PADDING elsewhere
    finished: jax.Array  # [B] bool: whether a sequence has produced a stop token
    done: jax.Array  # [] int32: the number of tokens decoded of each sequence
    cache: Cache  # of all tokens but the newest


class Times(NamedTuple):
    """Seconds of prefill and of decoding, without compilation, and the number of decoding steps."""

    prefill: float
    decoding: float
    steps: int


def hidden_states(
    config: DecoderConfig, model: Model, tokens: jax.Array, mask: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache, jax.Array]:
    """Runs all layers on tokens [B, S], writing keys and values into the cache's next S slots.

    `mask` [B, S] is False at padding. Returns the last layer's output [B, S, H], the new cache, and
    how many tokens chose each expert, [layers, E].
    """
    # Columns of padding have the position of the last token before them.
    positions = cache.lengths[:, None] + jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1
    stored = jnp.where(mask, positions, PADDING)
    slot_positions = lax.dynamic_update_slice_in_dim(cache.positions, stored, cache.filled, 1)
    # [B, S, M]: whether a slot has a token that is not later than the column's.
    past = (slot_positions[:, None] >= 0) & (slot_positions[:, None] <= positions[..., None])
    x = model.shared[EMBED][tokens]
    angles = decoder.cos_and_sin(config, positions, x.dtype)
    keys, values, counts = [], [], []
    for i, (weights, moe) in enumerate(zip(model.layers, model.moe, strict=True)):
        seen = past & (slot_positions[:, None] > positions[..., None] - config.window(i))

        # Attends to the whole cache, and keeps the layer's new caches of keys and values.
        def attend(q: Any, k: Any, v: Any, sinks: Any, i: int = i, seen: Any = seen) -> Any:
            keys = lax.dynamic_update_slice_in_dim(cache.keys[i], k, cache.filled, 1)
            values = lax.dynamic_update_slice_in_dim(cache.values[i], v, cache.filled, 1)
            # JAX's attention has no sinks, and with cuDNN takes only masks of even lengths, but a
            # step has one token. Without cuDNN it computes what `masked_attention` does.
            return decoder.masked_attention(q, keys, values, seen, sinks), (keys, values)

        x, metrics, kept = decoder.decoder_layer(
            config, weights, moe, x, angles, attend, mask=mask, placement=model.placement
        )
        keys.append(kept[0])
        values.append(kept[1])
        counts.append(metrics.expert_counts)
    lengths = (cache.lengths + jnp.sum(mask, axis=1)).astype(jnp.int32)
    cache = Cache(keys, values, slot_positions, lengths, cache.filled + tokens.shape[1])
    return x, cache, jnp.stack(counts)


def logits_of(config: DecoderConfig, model: Model, x: jax.Array) -> jax.Array:
    """Returns next-token logits [B, V] float32 from the last layer's output x [B, H]."""
    head = model.shared[EMBED if config.tied else decoder.HEAD]
    x = decoder.rms_norm(x, model.shared[decoder.NORM], config.epsilon)
    return jnp.matmul(x, head.T, preferred_element_type=jnp.float32)


def empty_cache(config: DecoderConfig, batch: int, room: int, dtype: Any, mesh: Mesh) -> Cache:
    """Allocates a cache of `room` slots per sequence; the devices share the batch if they can."""
    axes = mesh.axis_names if batch % mesh.size == 0 else None
    rows = NamedSharding(mesh, PartitionSpec(axes))
    shape = batch, room, config.num_key_value_heads, config.head_dim
    make = functools.partial(jnp.zeros, shape, dtype, device=rows)
    keys = [make() for _ in range(config.num_layers)]
    values = [make() for _ in range(config.num_layers)]
    positions = jnp.full((batch, room), PADDING, jnp.int32, device=rows)
    lengths = jnp.zeros(batch, jnp.int32, device=rows)
    filled = jnp.zeros((), jnp.int32, device=NamedSharding(mesh, PartitionSpec()))
    return Cache(keys, values, positions, lengths, filled)


def padded(prompts: Sequence[Sequence[int]], side: str = "left") -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts on a `side` to tokens [B, S] int32; also returns a mask, False at padding."""
    shape = len(prompts), max(map(len, prompts))
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for i, prompt in enumerate(prompts):
        columns = slice(shape[1] - len(prompt), None) if side == "left" else slice(len(prompt))
        tokens[i, columns] = prompt
        mask[i, columns] = True
    return tokens, mask


def rounded_up(length: int, chunk: int) -> int:
    """Returns how many cache slots `prefill` fills per sequence: `length` in whole chunks."""
    return length + -length % min(chunk, length)


@functools.partial(jax.jit, static_argnames=("config", "chunk"), donate_argnames="cache")
def prefill(
    config: DecoderConfig,
    model: Model,
    tokens: jax.Array,
    mask: jax.Array,
    cache: Cache,
    chunk: int,
) -> tuple[jax.Array, Cache]:
    """Reads prompts [B, S], `chunk` columns at a time; `mask` [B, S] is False at padding.

    Returns the logits [B, V] float32 of each prompt's next token, and the cache.
    """
    batch, length = tokens.shape
    chunk = min(chunk, length)
    padding = rounded_up(length, chunk) - length

    def chunks(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (padding, 0)))
        return array.reshape(batch, -1, chunk).swapaxes(0, 1)  # [chunks, B, chunk]

    def read(carry: tuple[Cache, jax.Array], part: tuple[jax.Array, jax.Array]) -> Any:
        # `last` [B, H] is the output for the last token of each prompt that has been read.
        (cache, last), (tokens, mask) = carry, part
        x, cache, _ = hidden_states(config, model, tokens, mask, cache)
        # The last column with a token of each prompt, found from the right.
        last_column = chunk - 1 - jnp.argmax(mask[:, ::-1], axis=1)
        x = jnp.take_along_axis(x, last_column[:, None, None], axis=1)[:, 0]
        return (cache, jnp.where(mask.any(axis=1)[:, None], x, last)), None

    table = model.shared[EMBED]
    nothing = jnp.zeros((batch, table.shape[1]), table.dtype)
    (cache, last), _ = lax.scan(read, (cache, nothing), (chunks(tokens), chunks(mask)))
    return logits_of(config, model, last), cache


def choose(config: DecoderConfig, sampling: Sampling, logits: jax.Array, state: State) -> State:
    """Chooses each sequence's next token from logits [B, V], PADDING if it has ended."""
    if sampling.temperature:
        key = jax.random.fold_in(jax.random.key(sampling.seed), state.done)
        chosen = jax.random.categorical(key, logits / sampling.temperature)
    else:
        chosen = jnp.argmax(logits, axis=-1)
    chosen = chosen.astype(jnp.int32)
    column = jnp.where(state.finished, PADDING, chosen)[:, None]
    tokens = lax.dynamic_update_slice_in_dim(state.tokens, column, state.done, 1)
    finished = state.finished | jnp.isin(chosen, jnp.array(config.stop_tokens, jnp.int32))
    return State(tokens, finished, state.done + 1, state.cache)


@functools.partial(jax.jit, static_argnames=("config", "sampling", "steps"), donate_argnums=3)
def begin(
    config: DecoderConfig, sampling: Sampling, logits: jax.Array, cache: Cache, steps: int
) -> State:
    """Makes the state for decoding `steps` tokens; chooses the first by the logits of `prefill`."""
    batch = logits.shape[0]
    tokens = jnp.full((batch, steps), PADDING, jnp.int32)
    state = State(tokens, jnp.zeros(batch, jnp.bool_), jnp.int32(0), cache)
    return choose(config, sampling, logits, state)


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="state")
def step(
    config: DecoderConfig, sampling: Sampling, model: Model, state: State
) -> tuple[State, jax.Array, jax.Array]:
    """Decodes one token of each sequence.

    Returns the new state, the logits [B, V] float32, and how many tokens chose each expert, int32
    [layers, E].
    """
    mask = ~state.finished[:, None]  # a finished sequence reads padding
    newest = lax.dynamic_slice_in_dim(state.tokens, state.done - 1, 1, axis=1)
    newest = jnp.where(mask, newest, 0)
    x, cache, expert_counts = hidden_states(config, model, newest, mask, state.cache)
    logits = logits_of(config, model, x[:, 0])
    state = choose(config, sampling, logits, state._replace(cache=cache))
    return state, logits, expert_counts


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames="state")
def decode(config: DecoderConfig, sampling: Sampling, model: Model, state: State) -> State:
    """Decodes in one compiled loop until every sequence has its stop token or no step is left."""
    # `state` is from `begin`, and is donated: it has room for all steps. Returns the last state.
    steps = state.tokens.shape[1]

    def goes_on(state: State) -> jax.Array:
        return (state.done < steps) & ~state.finished.all()

    return lax.while_loop(goes_on, lambda state: step(config, sampling, model, state)[0], state)


def generate(
    config: DecoderConfig,
    model: Model,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    mesh: Mesh,
    sampling: Sampling = GREEDY,
    chunk: int = 512,
    padding: str = "left",
    loop: str = "device",
) -> tuple[list[list[int]], State, Times]:
    """Continues prompts of any lengths by up to `steps` tokens each, stop tokens included.

    Generation runs twice: the first run compiles, the second is timed. Prompts are read `chunk`
    tokens at a time; `padding` is the side on which short ones are padded, "left" or "right". With
    `loop` "device", `decode` runs all steps; with "host", each is a call of `step`. Returns the new
    tokens of each sequence, the last state, and the times.
    """
    tokens, mask = padded(prompts, padding)
    batch, length = tokens.shape
    spec = PartitionSpec(mesh.axis_names if batch % mesh.size == 0 else None)
    tokens, mask = jax.device_put((tokens, mask), NamedSharding(mesh, spec))
    dtype = model.shared[EMBED].dtype
    room = rounded_up(length, chunk) + steps

    def run() -> tuple[State, Times]:
        cache = empty_cache(config, batch, room, dtype, mesh)
        start = _seconds(cache)
        logits, cache = prefill(config, model, tokens, mask, cache, chunk)
        state = begin(config, sampling, logits, cache, steps)
        middle = _seconds(state)
        if loop == "device":
            state = decode(config, sampling, model, state)
        else:
            for _ in range(steps - 1):
                state, *_ = step(config, sampling, model, state)
        end = _seconds(state)
        # The first token was chosen from the logits of `prefill`.
        return state, Times(middle - start, end - middle, steps=int(state.done) - 1)

    with jax.set_mesh(mesh):
        run()
        state, times = run()
    found = np.asarray(state.tokens).tolist()
    return [[token for token in row if token != PADDING] for row in found], state, times


def _seconds(arrays: Any) -> float:
    """Waits until the arrays are computed; returns the time of a clock, in seconds."""
    jax.block_until_ready(arrays)
    return time.perf_counter()
