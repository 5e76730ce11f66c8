"""Implements the fabric for ranks with a GPU each, over symmetric memory (see `memory_map`).

A kernel first enters the fabric: it learns the number of its call with each peer, and its block 0
sends each peer the addresses of this rank's buffers. `connect` waits for the addresses that peers
send; after it `peer` is address arithmetic, and every copy, load and store of Pallas reaches a
peer's buffer. A signal is a word that only grows: the number of the call in its high bits, a count
in its low bits. So nothing is zeroed between calls, and ranks meet in one trip over the link.

Why the memory of one call may be used by the next: a call ends at a rank when every peer's last
signal has arrived, and a peer's block sends it after it has read what this rank sent to its heap.
Two ranks make their calls in the same order, one at a time. So when a rank begins a call, each of
its peers has ended every earlier call of the two, or has nothing of it left to read but addresses
that a block without work does not use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import memory_map, mosaic, ptx
from pallas_kernels.fabric.fabric import RanksOfMesh
from pallas_kernels.fabric.hardware import LANES
from pallas_kernels.fabric.mosaic import REFERENCE, SCALAR, Value, arith, i32, i64, scalar

# A word that gives a buffer's address holds, from the highest bit: the address without its last
# four bits, a flag, and a tag, the low bits of the call's number.
_TAG_BITS = 18
_NOT_SHARED = 1 << _TAG_BITS  # the flag of a buffer outside the pool that other processes map
_VALUES_AT_ONCE = 1024  # the words that a warpgroup polls at a time


@dataclasses.dataclass(frozen=True)
class Gpus(RanksOfMesh):
    """Ranks along some axes of a mesh, each with a GPU of one domain.

    Attributes:
      place: [1] int32, the place of this rank's GPU in the mesh; an operand of every kernel.
      base: the address of GPU 0's heap.
    """

    place: Any = None
    base: int = memory_map.BASE

    def __post_init__(self) -> None:
        object.__setattr__(self, "_calls", [])  # holds the call that is being traced, if any

    def async_fence(self) -> None:
        """Makes writes visible to this warpgroup's bulk copies, after it has waited for them."""
        ptx.async_fence()

    def delay_point(self, number: int) -> None:
        """See `fabric.Fabric.delay_point`.

        Point 0 is where a rank enters a call; there `enter` itself holds ranks back.
        """
        if number > 0:
            self.hold_back(number, self.rank())

    def rank(self) -> jax.Array:
        return self._call.rank

    def here(self) -> jax.Array:
        """Returns the place of this rank's GPU in the mesh."""
        return self._call.place

    @property
    def _call(self) -> _Call:
        return self._calls[-1]  # type: ignore[attr-defined]

    @property
    def operands(self) -> Sequence[jax.Array]:
        return (self.place,)

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        """Returns the shared memory that a call needs for `_Call.table`."""
        return {"fabric_table": plgpu.SMEM((2 * self.num_ranks * (num_buffers + 1),), jnp.int32)}

    def enter(
        self,
        operands: Sequence[Any],
        buffers: Sequence[Any],
        *,
        name: str,
        num_blocks: int,
        reads: bool,
        **scratch: Any,
    ) -> None:
        """Begins a call; every warpgroup of every block runs this before anything else.

        Args:
          operands: the references to `self.operands`.
          buffers: the buffers that peers write to or read, in the same order on every rank.
          name: the kernel's name, for messages.
          num_blocks: the kernel's number of blocks.
          reads: whether peers read what this rank wrote to buffers before the call.
          scratch: the references to the memory of `scratch_types`.
        """
        if num_blocks > memory_map.MAX_BLOCKS:
            raise ValueError(f"{name} has {num_blocks} blocks of at most {memory_map.MAX_BLOCKS}.")
        if len(buffers) > memory_map.MAX_BUFFERS or self.num_ranks > memory_map.MAX_GPUS:
            raise ValueError(f"{name}: {len(buffers)} buffers of {self.num_ranks} ranks.")
        place = operands[0][0]
        rank, corner = self.rank_and_corner(place)
        table, offsets = scratch["fabric_table"], [0]
        for stride, size in self.axes:
            offsets = [offset + i * stride for offset in offsets for i in range(size)]
        peers = [self.gpu(corner + offset) for offset in offsets]
        name = name.removeprefix("ep_")
        call = _Call(place, rank, self.gpu(place), peers, table, list(buffers), name, reads)
        self._calls[:] = [call]  # type: ignore[attr-defined]
        self.hold_back(0, rank)
        num_ranks = self.num_ranks

        def emit(table: Any, here: Any, *args: Any) -> None:
            here, peers, refs = scalar(here), list(map(scalar, args[:num_ranks])), args[num_ranks:]
            lane, block = mosaic.lane(), mosaic.block()
            heap = self._heap(here)
            numbers = call.numbers(table)
            # Write to shared memory the number of this call with each peer. Numbers count from 1,
            # so that a word of zeros belongs to no call. Offsets to a peer's buffers follow in
            # `connect`; `reach_peers` makes copies add them.
            peer = _of_lane(peers, lane)
            counter = _at(heap, memory_map.CALLS, (peer, 8 * memory_map.MAX_BLOCKS), (block, 8))
            with mosaic.when(_below(lane, num_ranks)):
                number = arith.addi(_load(counter), i64(1))
                _store_shared(_plus(numbers, (lane, 8)), number)
            mosaic.barrier()
            first = mosaic.equal(block, i32(0))
            thread = mosaic.thread()
            # Every call writes all address words, so that no word keeps an old call's tag.
            sends = _below(thread, memory_map.MAX_BUFFERS * num_ranks)
            with mosaic.when(arith.andi(first, sends)):
                self._send_addresses(call, heap, here, peers, refs, numbers, lane)
            mosaic.block_barrier()
            # All warpgroups of this block have read the call's number, so it may be stored as the
            # last one. Blocks that this kernel lacks get it too: the next call may have them.
            own = _below(thread, LANES)
            for r, peer in enumerate(peers):
                number = _load_shared(_plus(numbers, (i32(r), 8)))
                for start in range(0, memory_map.MAX_BLOCKS, LANES * num_blocks):
                    index = _plus(block, (i32(1), start), (lane, num_blocks))
                    counter = _at(
                        heap, memory_map.CALLS, (peer, 8 * memory_map.MAX_BLOCKS), (index, 8)
                    )
                    with mosaic.when(arith.andi(own, _below(index, memory_map.MAX_BLOCKS))):
                        _store(counter, number)

        layouts = [REFERENCE, *[SCALAR] * (1 + num_ranks), *[REFERENCE] * len(buffers)]
        mosaic.inline(emit, [table, call.here, *peers, *buffers], layouts)
        mosaic.reach_peers(table, lambda t, entry: _load_shared(_plus(call.deltas(t), (entry, 8))))

    def _send_addresses(self, call, heap, here, peers, refs, numbers, lane) -> None:
        """Sends the address of buffer i // N to rank i % N, in thread i."""
        buffer = arith.divui(lane, i32(self.num_ranks))
        rank = arith.remui(lane, i32(self.num_ranks))
        tag = arith.andi(_load_shared(_plus(numbers, (rank, 8))), i64(_NOT_SHARED - 1))
        start = _load(_at(heap, 8 * memory_map.POOL_START))
        # A call without buffers sends an address in the pool. At a peer, a block without work may
        # still be in an earlier call and take this word for that call's. It must not find the flag
        # `_NOT_SHARED` in the word.
        address = _of_lane([mosaic.address(ref) for ref in refs] or [start], buffer)
        size = _load(_at(heap, 8 * memory_map.POOL_BYTES))
        outside = arith.cmpi(arith.CmpIPredicate.uge, arith.subi(address, start), size)
        flag = arith.select(outside, i64(_NOT_SHARED), i64(0))
        word = arith.shli(arith.shrui(address, i64(4)), i64(_TAG_BITS + 1))
        word = arith.ori(arith.ori(word, flag), tag)
        there = _at(
            self._heap(_of_lane(peers, rank)),
            memory_map.ADDRESSES,
            (here, 8 * memory_map.MAX_BUFFERS),
            (buffer, 8),
        )
        _store(there, word, release=call.reads)

    def connect(self) -> None:
        """Waits until every rank has sent its buffers' addresses; after that, `peer` may be used.

        If peers read buffers (`reads` of `enter`), what a rank wrote to them before the call is
        visible after this.
        """
        call, num_ranks = self._call, self.num_ranks
        if not call.buffers:
            return

        def emit(table: Any, here: Any, rank: Any, *args: Any) -> None:
            peers, refs = list(map(scalar, args[:num_ranks])), args[num_ranks:]
            lane, heap = mosaic.lane(), self._heap(scalar(here))
            with mosaic.when(_below(lane, len(refs) * num_ranks)):
                buffer = arith.divui(lane, i32(num_ranks))
                source = arith.remui(lane, i32(num_ranks))
                peer = _of_lane(peers, source)
                number = _load_shared(_plus(call.numbers(table), (source, 8)))
                delta = _load(_at(heap, 8 * memory_map.DELTA, (peer, 8)))
                mask = i64(_NOT_SHARED - 1)
                place = _at(
                    heap, memory_map.ADDRESSES, (peer, 8 * memory_map.MAX_BUFFERS), (buffer, 8)
                )

                def ask() -> tuple[Value, list[Value]]:
                    word = _load(place)
                    # The tag may be a later call's: a peer does not wait for a block that has no
                    # work. Compare modulo the tag's range.
                    ahead = arith.andi(arith.subi(word, number), mask)
                    behind = arith.cmpi(arith.CmpIPredicate.ugt, ahead, i64(_NOT_SHARED // 2))
                    return behind, [word]

                (word,) = ptx.poll(
                    ask,
                    lambda _: ptx.give_up(call.name, self.timeout_s, scalar(rank), source),
                    timeout_s=self.timeout_s,
                    types=[mosaic.integer_type(64)],
                )
                hidden = arith.cmpi(
                    arith.CmpIPredicate.ne, arith.andi(word, i64(_NOT_SHARED)), i64(0)
                )
                elsewhere = arith.cmpi(arith.CmpIPredicate.ne, delta, i64(0))
                with mosaic.when(arith.andi(hidden, elsewhere)):
                    ptx.refuse(call.name, scalar(rank), source)
                address = arith.shli(arith.shrui(word, i64(_TAG_BITS + 1)), i64(4))
                own = _of_lane([mosaic.address(ref) for ref in refs], buffer)
                offset = arith.subi(arith.addi(address, delta), own)
                _store_shared(_plus(call.deltas(table), (lane, 8)), offset)
            if call.reads:
                _acquire()
                mosaic.asm("fence.proxy.async;", "~{memory}")
            mosaic.barrier()

        layouts = [REFERENCE, *[SCALAR] * (2 + num_ranks), *[REFERENCE] * len(call.buffers)]
        operands = [call.table, call.here, call.rank, *call.peers, *call.buffers]
        mosaic.inline(emit, operands, layouts)

    def peer(self, ref: Any, rank: Any) -> Any:
        """Returns a reference to rank `rank`'s buffer that corresponds to `ref` on this rank."""
        base = getattr(ref, "ref", ref)
        found = [i for i, other in enumerate(self._call.buffers) if other is base]
        if not found:
            raise ValueError(
                f"{self._call.name}: peers do not reach a buffer of shape {base.shape} and dtype "
                f"{base.dtype}; name it in `shared`."
            )
        (buffer,) = found
        entry = jnp.asarray(rank, jnp.int32) + buffer * self.num_ranks
        return mosaic.remote_ref(ref, entry)

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        """Signals `count`, for one kind of signal, to this block's counterpart on every rank.

        `count` is from 1 to 2**memory_map.COUNT_BITS - 1.

        With `release`, a peer that sees the signal also sees what this warpgroup wrote before it.
        Without `release`, the signal is only ordered after this warpgroup's earlier reads. It does
        not wait for writes, and arrives about a microsecond sooner.
        """
        call = self._call

        def emit(table: Any, here: Any, count: Any, *peers: Any) -> None:
            lane = mosaic.lane()
            peer = _of_lane(list(map(scalar, peers)), lane)
            mosaic.barrier()
            with mosaic.when(_below(lane, self.num_ranks)):
                word = call.signal(table, lane, scalar(count))
                _store(self._signal(peer, scalar(here), kind), word, release=release)

        layouts = [REFERENCE, *[SCALAR] * (2 + self.num_ranks)]
        operands = [call.table, call.here, jnp.asarray(count, jnp.int32), *call.peers]
        mosaic.inline(emit, operands, layouts)

    def wait(self, kind: int, count: Any, what: str) -> None:
        """Waits until this block's counterpart on every rank has signalled `count` or more.

        `what` names the wait in the message that ends the program after `timeout_s`.
        """
        call = self._call

        def emit(table: Any, here: Any, rank: Any, count: Any, *peers: Any) -> None:
            lane = mosaic.lane()
            peer = _of_lane(list(map(scalar, peers)), lane)
            some = arith.cmpi(arith.CmpIPredicate.ne, scalar(count), i32(0))
            with mosaic.when(arith.andi(some, _below(lane, self.num_ranks))):
                target = call.signal(table, lane, scalar(count))
                place = self._signal(scalar(here), peer, kind)

                def ask() -> tuple[Value, list[Value]]:
                    return mosaic.below(_load(place), target), []

                ptx.poll(
                    ask,
                    lambda _: ptx.give_up(what, self.timeout_s, scalar(rank), lane),
                    timeout_s=self.timeout_s,
                )
            _acquire()
            mosaic.barrier()

        layouts = [REFERENCE, *[SCALAR] * (3 + self.num_ranks)]
        operands = [call.table, call.here, call.rank, jnp.asarray(count, jnp.int32), *call.peers]
        mosaic.inline(emit, operands, layouts)

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        """Sends `count` pairs of int32 words to every rank, from pair number `first` on.

        Pair i is words 2i and 2i + 1 of `words` [n], in this rank's global memory. One value holds
        a pair as two halves of 16 bits. A word that does not fit in 16 bits becomes -1. See
        `send_values`.
        """
        call, last = self._call, words.shape[0] - 1

        def emit(table: Any, here: Any, first: Any, words: Any, *peers: Any) -> None:
            numbers = [
                _load_shared(_plus(call.numbers(table), (i32(r), 8))) for r in range(len(peers))
            ]
            for start in range(0, count, LANES):
                index = arith.addi(mosaic.lane(), i32(start))
                with mosaic.when(_below(index, count)):
                    pair = arith.addi(scalar(first), index)
                    halves = []
                    for which in range(2):
                        place = arith.minui(_plus(i32(which), (pair, 2)), i32(last))
                        word = mosaic.element_at(words, place)
                        short = _low_half(word)
                        word = arith.select(mosaic.equal(word, short), word, i32(0xFFFFFFFF))
                        halves.append(arith.andi(word, i32(0xFFFF)))
                    value = _widen(arith.ori(halves[0], arith.shli(halves[1], i32(16))))
                    for number, peer in zip(numbers, peers, strict=True):
                        word = arith.ori(arith.shli(number, i64(32)), value)
                        _store(self._value(scalar(peer), scalar(here), number, pair), word)

        layouts = [REFERENCE, SCALAR, SCALAR, REFERENCE, *[SCALAR] * self.num_ranks]
        first = jnp.asarray(first, jnp.int32)
        mosaic.inline(emit, [call.table, call.here, first, words, *call.peers], layouts)

    def read_halves(self, rank: Any, words: Any, what: str) -> None:
        """Waits for all pairs that a rank sends by `send_halves`, and copies them to `words` [n].

        See `read_values`.
        """
        (total,) = words.shape
        self._read(rank, 0, words, -(-total // 2), what, halves=True)

    def send_values(self, words: Any, start: Any, ranks: Sequence[Any] | None = None) -> None:
        """Sends words to `ranks` (None: to all) as this rank's values from number `start` on.

        Any warpgroup may send, and any block of the receiver may `read_values`. Calls use two sets
        of values in turn, so a sender need not wait until its values are read. This requires that
        in every call a rank receives something from each peer: by the time a set is used again, two
        calls later, the peer has read it.

        `words` [n] is of 32-bit elements in this rank's global or shared memory.
        """
        call, (count,) = self._call, words.shape
        if count > memory_map.MAX_VALUES:
            raise ValueError(
                f"{call.name}: a rank sends at most {memory_map.MAX_VALUES} values, not {count}."
            )
        ranks = range(self.num_ranks) if ranks is None else ranks
        to = [jnp.asarray(rank, jnp.int32) for rank in ranks]

        def emit(table: Any, here: Any, start: Any, words: Any, *args: Any) -> None:
            peers, to = list(map(scalar, args[: self.num_ranks])), args[self.num_ranks :]
            i32_type = mosaic.integer_type(32)
            indices = [arith.addi(mosaic.lane(), i32(i)) for i in range(0, count, LANES)]
            for index in indices:
                with mosaic.when(_below(index, count)):
                    value = _widen(arith.bitcast(i32_type, mosaic.element_at(words, index)))
                    place = arith.addi(scalar(start), index)
                    for rank in map(scalar, to):
                        number = _load_shared(_plus(call.numbers(table), (rank, 8)))
                        word = arith.ori(arith.shli(number, i64(32)), value)
                        peer = _of_lane(peers, rank)
                        _store(self._value(peer, scalar(here), number, place), word)

        layouts = [REFERENCE, SCALAR, SCALAR, REFERENCE, *[SCALAR] * (self.num_ranks + len(to))]
        start = jnp.asarray(start, jnp.int32)
        mosaic.inline(emit, [call.table, call.here, start, words, *call.peers, *to], layouts)

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        """Waits for n values that a rank sends, from number `start` on; copies them to `words`.

        `words` is of 32-bit elements in shared memory. The caller puts a barrier between this and
        other threads' use of it. `what` names the wait in the message that ends the program after
        `timeout_s`.
        """
        self._read(rank, start, words, words.shape[0], what)

    def _read(
        self, rank: Any, start: Any, words: Any, total: int, what: str, *, halves: bool = False
    ) -> None:
        """Reads `total` values into `words`: words, or pairs of 16 bits."""
        call, (num_words,) = self._call, words.shape

        def emit(
            table: Any, here: Any, me: Any, rank: Any, start: Any, words: Any,
            *peers: Any,
        ) -> None:  # fmt: skip
            source = scalar(rank)
            number = _load_shared(_plus(call.numbers(table), (source, 8)))
            peer = _of_lane(list(map(scalar, peers)), source)
            to = mosaic.address(words, 32)

            def ask(places: Sequence[Value]) -> tuple[Value, list[Value]]:
                values = [_load(place) for place in places]
                late = [
                    arith.cmpi(
                        arith.CmpIPredicate.ne,
                        _narrow(arith.shrui(value, i64(32))),
                        _narrow(number),
                    )
                    for value in values
                ]
                return functools.reduce(arith.ori, late), [_narrow(value) for value in values]

            def poll(places: Sequence[Value]) -> list[Value]:
                return ptx.poll(
                    lambda: ask(places),
                    lambda _: ptx.give_up(what, self.timeout_s, scalar(me), source),
                    timeout_s=self.timeout_s,
                    types=[mosaic.integer_type(32)] * len(places),
                )

            for first in range(0, total, _VALUES_AT_ONCE):
                count = min(_VALUES_AT_ONCE, total - first)
                rounds = range(first, first + count, LANES)
                indices = [arith.addi(mosaic.lane(), i32(i)) for i in rounds]
                last = i32(total - 1)
                places = [
                    self._value(
                        scalar(here), peer, number, arith.addi(scalar(start), arith.minui(i, last))
                    )
                    for i in indices
                ]

                # All blocks poll the same words, so poll only the last few until they arrive.
                if len(places) > 1:
                    poll(places[-1:])
                values = poll(places)
                for index, value in zip(indices, values, strict=True):
                    parts = [(index, value)]
                    if halves:
                        both = _low_half(value), arith.shrsi(value, i32(16))
                        parts = [(_plus(i32(i), (index, 2)), half) for i, half in enumerate(both)]
                    for at, word in parts:
                        with mosaic.when(_below(at, num_words)):
                            place = _plus(to, (at, 4))
                            mosaic.asm("st.shared.b32 [$0], $1;", "r,r,~{memory}", place, word)

        layouts = [REFERENCE, *[SCALAR] * 4, REFERENCE, *[SCALAR] * self.num_ranks]
        rank, start = (jnp.asarray(value, jnp.int32) for value in (rank, start))
        operands = [call.table, call.here, call.rank, rank, start, words, *call.peers]
        mosaic.inline(emit, operands, layouts)

    # Addresses.

    def _heap(self, number: Value) -> Value:
        return _at(i64(self.base), 0, (number, memory_map.STRIDE))

    def _signal(self, owner: Value, sender: Value, kind: int) -> Value:
        """Returns the address, in `owner`'s heap, of the signal from GPU `sender` to this block."""
        start = memory_map.SIGNALS + 8 * memory_map.MAX_GPUS * memory_map.MAX_BLOCKS * kind
        return _at(self._heap(owner), start, (mosaic.block(), 8 * memory_map.MAX_GPUS), (sender, 8))

    def _value(self, owner: Value, sender: Value, number: Value, index: Value) -> Value:
        """Returns the address, in `owner`'s heap, of a value of GPU `sender` in a call."""
        which = arith.andi(_narrow(number), i32(1))
        of_sender = _plus(sender, (which, memory_map.MAX_GPUS))
        return _at(
            self._heap(owner), memory_map.VALUES, (of_sender, 8 * memory_map.MAX_VALUES), (index, 8)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A call of a kernel, while the kernel is traced.

    Attributes:
      place: [] int32, the place of this rank's GPU in the mesh.
      rank: [] int32, this rank.
      here: [] int32, the number of this rank's GPU.
      peers: the number of each rank's GPU, [] int32 each.
      table: 64-bit words in shared memory: the offset from each buffer's address here to its
        address at each rank, [buffers, N], then the number of the call with each rank, [N].
      buffers: the references that peers reach.
      name: the kernel's name, for messages.
      reads: whether peers read what was written to buffers before the call.
    """

    place: jax.Array
    rank: jax.Array
    here: jax.Array
    peers: list[jax.Array]
    table: Any
    buffers: list[Any]
    name: str
    reads: bool

    def deltas(self, table: Value) -> Value:
        return mosaic.address(table, 32)

    def numbers(self, table: Value) -> Value:
        return _plus(self.deltas(table), (i32(len(self.buffers)), 8 * len(self.peers)))

    def signal(self, table: Value, rank: Value, count: Value) -> Value:
        """Returns the word that signals `count` in this call with `rank`."""
        number = _load_shared(_plus(self.numbers(table), (rank, 8)))
        return arith.ori(arith.shli(number, i64(memory_map.COUNT_BITS)), _widen(count))


def _below(value: Value, count: int) -> Value:
    return mosaic.below(value, arith.constant(value.type, count))


def _widen(value: Value) -> Value:
    return arith.extui(mosaic.integer_type(64), value)


def _low_half(value: Value) -> Value:
    """Emits the lower 16 bits of an int32 as a signed number."""
    return arith.shrsi(arith.shli(value, i32(16)), i32(16))


def _narrow(value: Value) -> Value:
    return arith.trunci(mosaic.integer_type(32), value)


def _of_lane(values: Sequence[Value], lane: Value) -> Value:
    """Returns values[lane], or values[0] where lane is past the last."""
    value = values[0]
    for i, other in enumerate(values[1:], 1):
        value = arith.select(mosaic.equal(lane, i32(i)), other, value)
    return value


def _at(base: Value, offset: int, *terms: tuple[Value, int]) -> Value:
    """Returns base + offset + the sum of index · size over `terms`, in 64 bits."""
    address = arith.addi(base, i64(offset))
    for index, size in terms:
        address = arith.addi(address, arith.muli(_widen(index), i64(size)))
    return address


def _plus(base: Value, *terms: tuple[Value, int]) -> Value:
    """Returns base + the sum of index · size over `terms`, in 32 bits, as shared memory needs."""
    for index, size in terms:
        base = arith.addi(base, arith.muli(index, i32(size)))
    return base


def _load(address: Value) -> Value:
    text, word = "ld.relaxed.sys.global.b64 $0, [$1];", mosaic.integer_type(64)
    return mosaic.asm(text, "=l,l,~{memory}", address, returns=word)


def _store(address: Value, value: Value, *, release: bool = False) -> None:
    order = "release" if release else "relaxed"
    mosaic.asm(f"st.{order}.sys.global.b64 [$0], $1;", "l,l,~{memory}", address, value)


def _acquire() -> None:
    mosaic.asm("fence.acquire.sys;", "~{memory}")


def _load_shared(address: Value) -> Value:
    text, word = "ld.shared.b64 $0, [$1];", mosaic.integer_type(64)
    return mosaic.asm(text, "=l,r,~{memory}", address, returns=word)


def _store_shared(address: Value, value: Value) -> None:
    mosaic.asm("st.shared.b64 [$0], $1;", "r,l,~{memory}", address, value)
