"""The low-latency protocol: receivers poll the data itself, so a call needs no signals.

Data is sent in tiles of 2 KiB. Every GPU has tile buffers in symmetric memory, to which its peers
write tiles. The buffers outlive the calls of kernels. Every 32-bit word of an empty buffer holds a
sentinel, all ones. A receiver polls a buffer until none of its words is the sentinel, takes the
tile, and writes the sentinel back. TensorRT-LLM's Lamport all-reduces use this protocol, with a
negative zero as the sentinel. NCCL's protocol LL stores a flag next to each word instead.

- A *worker* is a warpgroup of a kernel. It communicates with the worker of its number on each peer.
- A *channel* leads from a worker on one GPU to the worker of the same number on another GPU. It has
  two sets of tile buffers, used by even and odd calls. Both ends count the calls.

A set is empty when it is used again. The third call of a sender uses the set of the first call. The
sender begins its third call after it has received all tiles that its peer sent in the second call.
The peer began its second call after it had ended its first call, in which it emptied the set. This
requires that two GPUs make their calls with each other one at a time and in the same order, and
that in every call each GPU receives something from each peer. Memory accesses of consecutive calls
are ordered because a kernel begins only after the previous kernel has ended.

A word of a tile that itself equals the sentinel, `EMPTY`, is sent as another word, `_INSTEAD`.

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
from jax import lax

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import memory_map, mosaic, vectors
from pallas_kernels.fabric.hardware import VECTOR_BYTES, vector_length
from pallas_kernels.fabric.mosaic import Array, Value, arith, llvm, vector

# As float32, both `EMPTY` and this word are NaN.
_INSTEAD = 0xFFFFFFFE
# A note's memory until it has arrived: a byte of `EMPTY`.
_NO_NOTE = memory_map.EMPTY & 0xFF
_NOTES_BYTES = memory_map.TILE_BUFFER_BYTES - memory_map.TILE_BYTES
_WORDS = VECTOR_BYTES // 4


@dataclasses.dataclass(frozen=True)
class Channels(fb.RanksOfMesh):
    """The ranks of a kernel that communicates by the low-latency protocol."""

    memory: TileMemory
    # [1] int32, of this rank's device: an operand of the kernels of collectives.
    mesh_index: Any = None

    operands = ()

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        return {}

    def enter(self, operands: Sequence[Any], buffers: Sequence[Any], **_: Any) -> None:
        pass


class Endpoint:
    """One warpgroup's connection to its peers during one kernel call; `close` ends the call.

    Attributes:
      rank, gpu: [] int32, this rank, and the number of its GPU on the host.
      peers: the other ranks, [] int32 each: rank + 1, rank + 2 and so on, modulo num_ranks.
    """

    def __init__(self, channels: Channels, mesh_index: jax.Array, worker: jax.Array, what: str):
        # `mesh_index`, [] int32, is the row-major index of this rank's device in the mesh.
        self.channels = channels
        self._worker = worker  # the number of this warpgroup in the kernel
        self.what = what  # names the call in a timeout's message
        self.rank, index_of_rank_0 = channels.rank_and_index_of_rank_0(mesh_index)
        num_ranks = channels.num_ranks
        self.peers = [lax.rem(self.rank + j, jnp.int32(num_ranks)) for j in range(1, num_ranks)]
        self.gpu = channels.gpu(mesh_index)
        # The number of each peer's GPU.
        self._gpus = [channels.gpu(index_of_rank_0 + self._offset(peer)) for peer in self.peers]
        # For each of `peers`, the index and the value of the counter of calls with it.
        self._counters = [worker * memory_map.MAX_LOW_LATENCY_GPUS + gpu for gpu in self._gpus]
        self._calls = channels.memory.read(self.gpu, self._counters)

    # `index` counts the tiles of a call from 0, and `exact` is whether NaNs keep their bits; sender
    # and receiver pass the same.

    def send(self, index: int, tiles_of_peers: Sequence[jax.Array], *, exact: bool = False) -> None:
        for i, tile in enumerate(tiles_of_peers):
            self.send_to(i, index, tile, exact=exact)

    def send_to(self, i: int, index: int, tile: jax.Array, *, exact: bool = False) -> None:
        """Sends `tile`, in registers, to peers[i] as its tile number `index`."""
        number = self._buffer_number(self.gpu, self._gpus[i], self._calls[i], index)
        self.channels.memory.send(self._gpus[i], number, tile, exact=exact)

    def receive(
        self, index: int, shape: tuple[int, ...], dtype: Any, *, exact: bool = False
    ) -> list[jax.Array]:
        """Waits for tile number `index` of each of `peers`; returns the tiles in registers."""
        return self.receive_all([index], shape, dtype, exact=exact)[0]

    def receive_all(
        self,
        indices: Sequence[int],
        shape: tuple[int, ...],
        dtype: Any,
        *,
        exact: bool = False,
        wanted: Sequence[Sequence[jax.Array]] | None = None,
    ) -> list[list[jax.Array]]:
        """Waits in one polling loop for the tiles that each peer sends with the numbers `indices`.

        Returns for each of `indices` the list of that tile from all peers. wanted[i][j], [] bool,
        is whether peers[j] sends tile number indices[i]; a tile that is not sent is undefined.
        None: all are sent.
        """
        buffers = [
            self._buffer_number(sender, self.gpu, calls, index)
            for index in indices
            for sender, calls in zip(self._gpus, self._calls, strict=True)
        ]
        tiles = self.channels.memory.receive(
            self,
            buffers,
            shape,
            dtype,
            exact=exact,
            wanted=None if wanted is None else [w for of_tile in wanted for w in of_tile],
        )
        count = len(self.peers)
        return [tiles[first : first + count] for first in range(0, len(tiles), count)]

    def sum(self, index: int, mine: jax.Array) -> jax.Array:
        """Receives tile number `index` from each peer; returns the sum with the tile `mine`."""
        # In rank order in float32, so that all ranks get equal bits.
        # parts[i] is the tile of rank + i, modulo N; then `rotate` moves that of rank r to index r.
        parts = [mine, *self.receive(index, mine.shape, mine.dtype)]
        parts = vectors.rotate(parts, self.rank, vector_length(mine.dtype))
        total = functools.reduce(jnp.add, (part.astype(jnp.float32) for part in parts))
        return total.astype(mine.dtype)

    def close(self) -> None:
        """Ends this call: increments this warpgroup's counter of calls with each peer."""
        calls = [calls + 1 for calls in self._calls]
        self.channels.memory.write(self.gpu, self._counters, calls)

    def delay_point(self, number: int) -> None:
        """Delays this rank if a test has set a delay; see `Fabric.delay_point`."""
        self.channels.hold_back(number, self.rank)

    def _offset(self, rank: jax.Array) -> jax.Array:
        """Returns the mesh index of `rank`'s device minus that of rank 0's, [] int32."""
        offset = jnp.int32(0)
        for stride, size in reversed(self.channels.axes):
            offset = offset + lax.rem(rank, jnp.int32(size)) * stride
            rank = lax.div(rank, jnp.int32(size))
        return offset

    def _buffer_number(
        self, sender: jax.Array, receiver: jax.Array, calls: jax.Array, index: int
    ) -> jax.Array:
        """Returns the number of the tile buffer of GPU `receiver` for tile `index` of `sender`."""
        # `calls` selects the set of buffers for even or odd calls.
        num_gpus = self.channels.memory.num_gpus
        num_senders = memory_map.num_senders(num_gpus)
        # The sending GPUs are numbered from GPU receiver + 1 on, modulo the number of GPUs, so that
        # no buffers are needed for the receiver itself.
        sender_number = lax.rem(sender - receiver + num_senders, jnp.int32(num_senders + 1))
        set_of_sender = (calls & 1) * num_senders + sender_number
        channel = set_of_sender * memory_map.MAX_WORKERS + self._worker
        return channel * memory_map.tiles_of_channel(num_gpus) + index


# ---------------------------------------------------------------------------------- tile buffers


@dataclasses.dataclass(frozen=True)
class TileMemory:
    """The call counters and tile buffers of all GPUs, in symmetric memory."""

    base: int  # the address of GPU 0's heap
    num_gpus: int  # GPUs that have a heap

    def send(self, gpu: jax.Array, buffer: jax.Array, tile: jax.Array, *, exact: bool) -> None:
        """Writes a tile to tile buffer number `buffer` of `gpu`; `exact`: NaNs keep their bits."""

        # Each thread sends one vector of the tile: `_WORDS` words, none of which may be `EMPTY`.
        def emit(gpu: Array, buffer: Array, tile: Array) -> None:
            (of_thread,) = mosaic.registers(tile)
            packed = vector.bitcast(mosaic.vector_type(_WORDS, mosaic.integer_type(32)), of_thread)
            words = [vector.extract(packed, [], [i]) for i in range(_WORDS)]
            destination = mosaic.scalar(gpu), mosaic.scalar(buffer)
            replaced = [mosaic.equal(word, memory_map.EMPTY) for word in words]
            if exact:
                self._send_note(destination, words, replaced)
            words = [
                arith.select(is_replaced, mosaic.i32(_INSTEAD), word)
                for is_replaced, word in zip(replaced, words, strict=True)
            ]
            _store(self._buffer(*destination), words)

        layout = mosaic.strided(tile.shape, vector_length(tile.dtype))
        mosaic.inline(emit, [gpu, buffer, (tile, layout)])

    def _send_note(
        self, destination: tuple[Value, Value], words: Sequence[Value], replaced: Sequence[Value]
    ) -> None:
        """Emits the note of this thread, if its words require one; `destination`: GPU, buffer."""
        bits = [
            arith.select(is_replaced, mosaic.i32(1 << i), mosaic.i32(0))
            for i, is_replaced in enumerate(replaced)
        ]
        mosaic.asm(
            "@$2 st.relaxed.sys.global.b8 [$0], $1;",
            "l,r,b",
            self._note(*destination),
            functools.reduce(arith.ori, bits),
            _any([*replaced, *(mosaic.equal(word, _INSTEAD) for word in words)]),
        )

    def receive(
        self,
        endpoint: Endpoint,
        buffers: Sequence[jax.Array],
        shape: tuple[int, ...],
        dtype: Any,
        *,
        exact: bool,
        wanted: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """Waits for the `wanted` tiles in `buffers` of this GPU, and empties the buffers.

        `endpoint.peers[i % len(endpoint.peers)]` sends to buffers[i]; wanted[i], [] bool, is
        whether it does. None: all are sent.
        """
        count, what, timeout_s = len(buffers), endpoint.what, endpoint.channels.timeout_s

        def emit(gpu: Array, rank: Array, *scalars: Array) -> list[Array]:
            here, receiver = mosaic.scalar(gpu), mosaic.scalar(rank)
            # For each tile: its buffer, the rank that sends it, and whether it does (i1).
            values = [mosaic.scalar(scalar) for scalar in scalars]
            numbers, senders = values[:count], values[count : 2 * count]
            is_sent = values[2 * count :]  # none if `wanted` is None
            pointers = [self._buffer(here, number) for number in numbers]

            def ask() -> tuple[Value, list[Value]]:
                words = [word for pointer in pointers for word in _load(pointer)]
                if is_sent:
                    return _any(list(_missing(words, is_sent))), words
                # All tiles are sent, so the words need not be told apart by tile.
                return _any([mosaic.equal(word, memory_map.EMPTY) for word in words]), words

            def late(words: Sequence[Value]) -> None:
                # Of several late peers, the message names the last.
                peer = senders[0]
                for is_missing, sender in zip(_missing(words, is_sent), senders, strict=True):
                    peer = arith.select(is_missing, sender, peer)
                mosaic.give_up(what, timeout_s, receiver, peer)

            words = mosaic.poll(
                ask, late, timeout_s=timeout_s, types=[mosaic.integer_type(32)] * _WORDS * count
            )
            for pointer in pointers:
                _store(pointer, [mosaic.i32(memory_map.EMPTY)] * _WORDS)
            tiles = []
            for number, sender, of_tile in zip(numbers, senders, _by_tile(words), strict=True):
                if exact:
                    give_up = functools.partial(mosaic.give_up, what, timeout_s, receiver, sender)
                    of_tile = self._as_sent(here, number, of_tile, timeout_s, give_up)
                tiles.append(_tile(of_tile, shape, dtype))
            return tiles

        tile = mosaic.in_registers(shape, dtype, vector_length(dtype))
        peers = endpoint.peers * (count // len(endpoint.peers))
        scalars = [endpoint.gpu, endpoint.rank, *buffers, *peers, *(wanted or ())]
        return mosaic.inline(emit, scalars, [tile] * count)

    def read(self, gpu: jax.Array, counters: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the values of this GPU's call counters that have the numbers `counters`."""

        def emit(gpu: Array, *counters: Array) -> list[Array]:
            values = []
            for counter in counters:
                address = self._counter(mosaic.scalar(gpu), mosaic.scalar(counter))
                values.append(mosaic.splat(mosaic.load_word(address), is_signed=True))
            return values

        return mosaic.inline(emit, [gpu, *counters], [mosaic.INT32] * len(counters))

    def write(
        self, gpu: jax.Array, counters: Sequence[jax.Array], values: Sequence[jax.Array]
    ) -> None:
        """Sets this GPU's call counters, by number, once all threads of the warpgroup are here."""
        count = len(counters)

        def emit(gpu: Array, *scalars: Array) -> None:
            numbers = [mosaic.scalar(scalar) for scalar in scalars]
            mosaic.barrier()  # all threads have read the counters
            with mosaic.when(mosaic.equal(mosaic.warpgroup_thread(), 0)):
                for counter, value in zip(numbers[:count], numbers[count:], strict=True):
                    mosaic.store_word(self._counter(mosaic.scalar(gpu), counter), value)

        mosaic.inline(emit, [gpu, *counters, *values])

    def _as_sent(
        self,
        gpu: Value,
        buffer: Value,
        words: Sequence[Value],
        timeout_s: float,
        give_up: Callable[[], None],
    ) -> list[Value]:
        """Emits this thread's four words of a tile as they were before the sender replaced any."""
        i32 = mosaic.integer_type(32)
        has_note = _any([mosaic.equal(word, _INSTEAD) for word in words])

        def as_noted() -> list[Value]:
            pointer = self._note(gpu, buffer)

            def ask() -> tuple[Value, list[Value]]:
                text = "ld.relaxed.sys.global.u8 $0, [$1];"
                note = mosaic.asm(text, "=r,l", pointer, returns=i32)
                return mosaic.equal(note, _NO_NOTE), [note]

            (note,) = mosaic.poll(ask, lambda _: give_up(), timeout_s=timeout_s, types=[i32])
            mosaic.asm("st.relaxed.sys.global.b8 [$0], $1;", "l,r", pointer, mosaic.i32(_NO_NOTE))
            bits = [arith.andi(note, mosaic.i32(1 << i)) for i in range(_WORDS)]
            return [
                arith.select(mosaic.equal(bit, 0), word, mosaic.i32(memory_map.EMPTY))
                for bit, word in zip(bits, words, strict=True)
            ]

        return mosaic.either(has_note, as_noted, lambda: list(words), [i32] * _WORDS)

    # Addresses in the memory of the low-latency protocol, in the heap of GPU `gpu`.

    def _counter(self, gpu: Value, counter: Value) -> Value:
        return self._address(gpu, 0, (counter, 4))

    def _buffer(self, gpu: Value, buffer: Value) -> Value:
        """Emits the address of this thread's 16 bytes in tile buffer number `buffer`."""
        counters_bytes = 4 * memory_map.NUM_COUNTERS
        of_buffer = buffer, memory_map.TILE_BYTES
        of_thread = mosaic.warpgroup_thread(), VECTOR_BYTES
        return self._address(gpu, counters_bytes, of_buffer, of_thread)

    def _note(self, gpu: Value, buffer: Value) -> Value:
        buffers_bytes = memory_map.TILE_BYTES * memory_map.num_tile_buffers(self.num_gpus)
        notes = 4 * memory_map.NUM_COUNTERS + buffers_bytes
        return self._address(gpu, notes, (buffer, _NOTES_BYTES), (mosaic.warpgroup_thread(), 1))

    def _address(self, gpu: Value, offset: int, *terms: tuple[Value, int]) -> Value:
        start = mosaic.i64(self.base + memory_map.TILES)
        return mosaic.address_at(start, offset, (gpu, memory_map.STRIDE), *terms)


def _by_tile(words: Sequence[Value]) -> list[Sequence[Value]]:
    return [words[first : first + _WORDS] for first in range(0, len(words), _WORDS)]


def _missing(words: Sequence[Value], is_sent: Sequence[Value]) -> Iterator[Value]:
    """Emits for each tile whether a word of it is missing, i1; is_sent is [] if all are sent."""
    for j, of_tile in enumerate(_by_tile(words)):
        is_empty = _any([mosaic.equal(word, memory_map.EMPTY) for word in of_tile])
        yield arith.andi(is_empty, is_sent[j]) if is_sent else is_empty


def _any(conditions: Sequence[Value]) -> Value:
    return functools.reduce(arith.ori, conditions)


def _load(pointer: Value) -> list[Value]:
    """Emits a load of the four words at a pointer that `TileMemory._buffer` returned."""
    i32 = mosaic.integer_type(32)
    words = mosaic.asm(
        "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        pointer,
        returns=mosaic.struct_type([i32] * _WORDS),
    )
    return [llvm.extractvalue(i32, words, [i]) for i in range(_WORDS)]


def _store(pointer: Value, words: Sequence[Value]) -> None:
    mosaic.asm("st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r", pointer, *words)


def _tile(words: Sequence[Value], shape: tuple[int, ...], dtype: Any) -> Array:
    words_type = mosaic.vector_type(_WORDS, mosaic.integer_type(32))
    packed = vector.from_elements(words_type, list(words))
    of_thread = mosaic.vector_type(vector_length(dtype), mosaic.element_type(dtype))
    return mosaic.array_of([vector.bitcast(of_thread, packed)], shape, vector_length(dtype))
