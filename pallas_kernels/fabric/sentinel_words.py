"""Memory operations of the low-latency protocol: a warpgroup sends and polls tiles of 32-bit words.

In symmetric memory, every GPU's heap has counters of the GPU's calls, and tile buffers. Each buffer
receives tiles from one peer. A word of a buffer holds the sentinel `EMPTY` until it has arrived. So
a word of a tile that itself equals the sentinel is sent as another word, `_INSTEAD`.

If the receiver needs the exact bits, notes tell which words were replaced. A thread of the sender
sends four words of a tile. If one of them equals the sentinel or `_INSTEAD`, the thread also sends
a note: a byte whose bit i says whether its word i was replaced. A thread of the receiver that finds
`_INSTEAD` waits for the note.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic, ptx
from pallas_kernels.fabric.hardware import VECTOR_BYTES, vector_length
from pallas_kernels.fabric.memory_map import (
    EMPTY,
    NUM_COUNTERS,
    STRIDE,
    TILE_BUFFER_BYTES,
    TILE_BYTES,
    TILES,
    num_tile_buffers,
)
from pallas_kernels.fabric.mosaic import Array, Value, arith, ir, llvm, scf, vector

# `EMPTY` marks a word that has not arrived yet. If a word of a tile happens to equal `EMPTY`, this
# word is sent instead. As float32, both are NaN.
_INSTEAD = 0xFFFFFFFE
# A note is a byte that says which words of a tile were replaced. Until it has arrived, its memory
# holds this value, a byte of `EMPTY`.
_NO_NOTE = EMPTY & 0xFF

_NOTES_BYTES = TILE_BUFFER_BYTES - TILE_BYTES
_WORDS = VECTOR_BYTES // 4


@dataclasses.dataclass(frozen=True)
class TileMemory:
    """The call counters and tile buffers of all GPUs, in symmetric memory.

    Attributes:
      base: the address of GPU 0's heap.
      num_gpus: the number of GPUs that have a heap.
    """

    base: int
    num_gpus: int

    def send(self, gpu: jax.Array, buffer: jax.Array, tile: jax.Array, *, exact: bool) -> None:
        """Sends a tile to an empty tile buffer of another GPU.

        Args:
          gpu: [] int32, the number of the receiving GPU.
          buffer: [] int32, the number of the tile buffer among those of the receiving GPU.
          tile: an array of `memory_map.TILE_BYTES` in registers.
          exact: whether NaNs keep their bits; else a NaN may arrive as another NaN. The receiver
            must pass the same value.
        """

        def emit(gpu: Array, buffer: Array, tile: Array) -> None:
            (of_thread,) = mosaic.registers(tile)
            packed = vector.bitcast(mosaic.vector_type(_WORDS, mosaic.integer_type(32)), of_thread)
            words = [vector.extract(packed, [], [i]) for i in range(_WORDS)]
            where = mosaic.scalar(gpu), mosaic.scalar(buffer)
            empty = [_is(EMPTY, word) for word in words]
            if exact:
                bits = [
                    arith.select(is_empty, mosaic.i32(1 << i), mosaic.i32(0))
                    for i, is_empty in enumerate(empty)
                ]
                mosaic.asm(
                    "@$2 st.relaxed.sys.global.b8 [$0], $1;",
                    "l,r,b",
                    self._note(*where),
                    functools.reduce(arith.ori, bits),
                    _any([*empty, *(_is(_INSTEAD, word) for word in words)]),
                )
            words = [
                arith.select(is_empty, mosaic.i32(_INSTEAD), word)
                for is_empty, word in zip(empty, words, strict=True)
            ]
            _store(self._buffer(*where), words)

        layout = mosaic.strided(tile.shape, vector_length(tile.dtype))
        mosaic.inline(emit, [gpu, buffer, tile], [mosaic.SCALAR, mosaic.SCALAR, layout])

    def receive(
        self,
        gpu: jax.Array,
        buffers: Sequence[jax.Array],
        shape: tuple[int, ...],
        dtype: Any,
        *,
        rank: jax.Array,
        peers: Sequence[jax.Array],
        timeout_s: float,
        what: str,
        exact: bool,
        wanted: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """Waits for tiles in tile buffers of this GPU, returns them, and empties the buffers.

        Args:
          gpu: [] int32, this GPU's number.
          buffers: the number of each tile buffer, [] int32 each.
          shape: the shape of each tile.
          dtype: the dtype of each tile.
          rank: [] int32, this rank, for the message of a timeout.
          peers: for each buffer, the rank that sends to it, [] int32 each.
          timeout_s: the seconds after which the kernel traps, with a message that names `what`,
            this rank, and a peer whose tile has not arrived.
          what: the kernel's name in this message.
          exact: whether NaNs keep their bits; the sender must pass the same value.
          wanted: for each buffer, whether a tile is sent to it, [] bool each. None if a tile is
            sent to every buffer. What is returned for a buffer without a tile is undefined.

        Returns:
          The tile of each buffer, in registers.
        """
        count = len(buffers)

        def emit(gpu: Array, rank: Array, *scalars: Array) -> list[Array]:
            here, receiver = mosaic.scalar(gpu), mosaic.scalar(rank)
            values = [mosaic.scalar(scalar) for scalar in scalars]
            places, senders, comes = values[:count], values[count : 2 * count], values[2 * count :]
            pointers = [self._buffer(here, place) for place in places]

            def missing(words: Sequence[Value]) -> Iterator[Value]:
                """Emits an i1 for each buffer: whether it still lacks a word of this thread."""
                for j, of_tile in enumerate(_by_tile(words)):
                    is_empty = _any([_is(EMPTY, word) for word in of_tile])
                    yield arith.andi(is_empty, comes[j]) if comes else is_empty

            def ask() -> tuple[Value, list[Value]]:
                words = [word for pointer in pointers for word in _load(pointer)]
                waits = missing(words) if comes else (_is(EMPTY, word) for word in words)
                return _any(list(waits)), words

            def late(words: Sequence[Value]) -> None:
                peer = senders[0]
                for is_missing, sender in zip(missing(words), senders, strict=True):
                    peer = arith.select(is_missing, sender, peer)
                ptx.give_up(what, timeout_s, receiver, peer)

            words = ptx.poll(
                ask, late, timeout_s=timeout_s, types=[mosaic.integer_type(32)] * _WORDS * count
            )
            for pointer in pointers:
                _store(pointer, [mosaic.i32(EMPTY)] * _WORDS)
            tiles = []
            for place, sender, of_tile in zip(places, senders, _by_tile(words), strict=True):
                if exact:
                    give_up = functools.partial(ptx.give_up, what, timeout_s, receiver, sender)
                    of_tile = self._as_sent(here, place, of_tile, timeout_s, give_up)
                tiles.append(_tile(of_tile, shape, dtype))
            return tiles

        tile = mosaic.in_registers(shape, dtype, vector_length(dtype))
        scalars = [gpu, rank, *buffers, *peers, *(wanted or ())]
        return mosaic.inline(emit, scalars, [mosaic.SCALAR] * len(scalars), [tile] * count)

    def read(self, gpu: jax.Array, counters: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the values of some of this GPU's call counters, [] int32 each.

        `gpu` is this GPU's number, and `counters` are the numbers of the counters, [] int32 each.
        """

        def emit(gpu: Array, *counters: Array) -> list[Array]:
            values = []
            for counter in counters:
                address = self._counter(mosaic.scalar(gpu), mosaic.scalar(counter))
                values.append(mosaic.splat(ptx.load_word(address), is_signed=True))
            return values

        value = plgpu.ShapeDtypeStruct((), jnp.int32, layout=mosaic.SCALAR)
        scalars = [gpu, *counters]
        layouts = [mosaic.SCALAR] * len(scalars)
        return mosaic.inline(emit, scalars, layouts, [value] * len(counters))

    def write(
        self, gpu: jax.Array, counters: Sequence[jax.Array], values: Sequence[jax.Array]
    ) -> None:
        """Sets some of this GPU's call counters to `values`, [] int32 each.

        First waits until all threads of the warpgroup have reached this point. `gpu` is this GPU's
        number, and `counters` are the numbers of the counters, [] int32 each.
        """
        count = len(counters)

        def emit(gpu: Array, *scalars: Array) -> None:
            numbers = [mosaic.scalar(scalar) for scalar in scalars]
            mosaic.barrier()
            with mosaic.when(mosaic.equal(mosaic.warpgroup_thread(), mosaic.i32(0))):
                for counter, value in zip(numbers[:count], numbers[count:], strict=True):
                    _store_word(self._counter(mosaic.scalar(gpu), counter), value)

        scalars = [gpu, *counters, *values]
        mosaic.inline(emit, scalars, [mosaic.SCALAR] * len(scalars))

    def _as_sent(
        self,
        gpu: Value,
        buffer: Value,
        words: Sequence[Value],
        timeout_s: float,
        give_up: Callable[[], None],
    ) -> list[Value]:
        """Emits this thread's words of a tile as they were before the sender replaced any.

        If one of the received `words` is `_INSTEAD`, waits for the sender's note: a byte whose bits
        say which words were the sentinel. If none is, the sender has written no note.

        Args:
          gpu: this GPU's number.
          buffer: the number of the tile buffer from which `words` were read.
          words: this thread's four words of the tile, as received.
          timeout_s: the seconds after which the code of `give_up` runs.
          give_up: emits the code that aborts the program, with a message.
        """
        i32 = mosaic.integer_type(32)
        noted = _any([_is(_INSTEAD, word) for word in words])
        found = scf.IfOp(noted, [i32] * _WORDS, has_else=True)
        with ir.InsertionPoint(found.then_block):
            pointer = self._note(gpu, buffer)

            def ask() -> tuple[Value, list[Value]]:
                text = "ld.relaxed.sys.global.u8 $0, [$1];"
                note = mosaic.asm(text, "=r,l", pointer, returns=i32)
                return _is(_NO_NOTE, note), [note]

            (note,) = ptx.poll(ask, lambda _: give_up(), timeout_s=timeout_s, types=[i32])
            mosaic.asm("st.relaxed.sys.global.b8 [$0], $1;", "l,r", pointer, mosaic.i32(_NO_NOTE))
            bits = [arith.andi(note, mosaic.i32(1 << i)) for i in range(_WORDS)]
            scf.yield_(
                [
                    arith.select(_is(0, bit), word, mosaic.i32(EMPTY))
                    for bit, word in zip(bits, words, strict=True)
                ]
            )
        with ir.InsertionPoint(found.else_block):
            scf.yield_(list(words))
        return list(found.results)

    def _start(self, gpu: Value) -> Value:
        """Emits the address of the low-latency protocol's memory in the heap of GPU `gpu`."""
        return arith.addi(_times(gpu, STRIDE), mosaic.i64(self.base + TILES))

    def _counter(self, gpu: Value, counter: Value) -> Value:
        """Emits the address of counter number `counter` of GPU `gpu`, a 32-bit count of calls."""
        return arith.addi(self._start(gpu), _times(counter, 4))

    def _buffer(self, gpu: Value, buffer: Value) -> Value:
        """Emits the address of this thread's 16 bytes of tile buffer `buffer` of GPU `gpu`."""
        start = arith.addi(self._start(gpu), mosaic.i64(4 * NUM_COUNTERS))
        part = _times(mosaic.warpgroup_thread(), VECTOR_BYTES)
        return arith.addi(start, arith.addi(_times(buffer, TILE_BYTES), part))

    def _note(self, gpu: Value, buffer: Value) -> Value:
        """Emits the address of this thread's note on tile buffer number `buffer` of GPU `gpu`.

        The note is a byte that says which of the thread's words in the buffer were replaced.
        """
        notes = 4 * NUM_COUNTERS + TILE_BYTES * num_tile_buffers(self.num_gpus)
        start = arith.addi(self._start(gpu), mosaic.i64(notes))
        thread = arith.extui(mosaic.integer_type(64), mosaic.warpgroup_thread())
        return arith.addi(start, arith.addi(_times(buffer, _NOTES_BYTES), thread))


def _by_tile(words: Sequence[Value]) -> list[Sequence[Value]]:
    """Splits the words that a thread read from several tile buffers into 4 words for each."""
    return [words[first : first + _WORDS] for first in range(0, len(words), _WORDS)]


def _times(value: Value, size: int) -> Value:
    return arith.muli(arith.extui(mosaic.integer_type(64), value), mosaic.i64(size))


def _is(value: int, word: Value) -> Value:
    return mosaic.equal(word, mosaic.i32(value))


def _any(conditions: Sequence[Value]) -> Value:
    return functools.reduce(arith.ori, conditions)


def _store_word(pointer: Value, word: Value) -> None:
    mosaic.asm("st.relaxed.sys.global.b32 [$0], $1;", "l,r", pointer, word)


def _load(pointer: Value) -> list[Value]:
    """Emits a relaxed, system-scope load of this thread's four 32-bit words of a tile buffer."""
    i32 = mosaic.integer_type(32)
    words = mosaic.asm(
        "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        pointer,
        returns=mosaic.struct_type([i32] * _WORDS),
    )
    return [llvm.extractvalue(i32, words, [i]) for i in range(_WORDS)]


def _store(pointer: Value, words: Sequence[Value]) -> None:
    """Emits a relaxed, system-scope store of this thread's four 32-bit words of a tile buffer."""
    mosaic.asm("st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", pointer, *words)


def _tile(words: Sequence[Value], shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns a tile in registers, made of the four 32-bit words of it that this thread holds."""
    words_type = mosaic.vector_type(_WORDS, mosaic.integer_type(32))
    packed = vector.from_elements(words_type, list(words))
    of_thread = mosaic.vector_type(vector_length(dtype), mosaic.element_type(dtype))
    return mosaic.array_of([vector.bitcast(of_thread, packed)], shape, vector_length(dtype))
