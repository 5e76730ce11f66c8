"""Communication within kernels over symmetric memory, between ranks that have a GPU each.

`Gpus` implements `fabric.Fabric`; `memory_map` defines the memory. A kernel first calls `enter`. It
computes, for each peer, the number of this call: how many calls the two ranks have made with each
other, this one included. Block 0 also sends each peer the addresses of this rank's buffers.
`connect` waits for the addresses that the peers send. After it, `peer` only computes an address,
and Pallas' copies, loads and stores access a peer's buffer.

A signal is a 64-bit word that only grows: its high bits are the number of the call, and its low
bits are a count. So no memory is zeroed between calls, and ranks synchronize in the time that one
signal takes over the link.

A call may reuse the memory of the previous call, because the peers no longer read it. A block ends
a call only after the last signal of the call from the block of the same index on every peer. The
peer's block sends this signal after it has read the words that this rank sent to the peer's heap.
Two ranks make their calls with each other in the same order, one at a time. So when a rank begins a
call, its peers' blocks have read the words of earlier calls.

Blocks without work are an exception, such as the blocks of a combine that have no tokens: they send
no signals, and no peer waits for them. Such a block may call `connect` when a peer has already
replaced the addresses of the block's call by those of a later call. This is harmless, because the
block accesses no peer's buffer.
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
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.fabric.mosaic import REFERENCE, SCALAR, Value, arith, i32, i64, scalar

# A rank sends a buffer's address as a 64-bit word. From the highest bit on, the word holds the
# address without its last four bits, which are 0; the flag `_NOT_SHARED`; and a tag of _TAG_BITS
# bits, the low bits of the call's number.
_TAG_BITS = 18
# The flag says that a buffer lies outside the memory pool which the rank's process shares, so that
# a peer in another process cannot access the buffer.
_NOT_SHARED = 1 << _TAG_BITS
# `read_values` polls this many 32-bit values at a time: 8 for each thread of the warpgroup.
_VALUES_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Gpus(RanksOfMesh):
    """The fabric whose ranks lie along some axes of a mesh, each with a GPU of one host.

    Attributes:
      mesh_index: [1] int32, the row-major index of this rank's device in the mesh; an operand of
        every kernel.
      base: the address of GPU 0's heap.
    """

    mesh_index: Any = None
    base: int = memory_map.BASE

    def __post_init__(self) -> None:
        # A list of at most one `_Call`, the kernel call that is being traced. `enter` sets it.
        object.__setattr__(self, "_calls", [])

    def async_fence(self) -> None:
        """Orders this warpgroup's next bulk copies (TMA) after the peers' writes it waited for."""
        ptx.async_fence()

    def delay_point(self, number: int) -> None:
        """Delays this rank if a test has set a delay for delay point `number` of the kernel.

        Does nothing for point 0, the beginning of a call, where `enter` has delayed the rank.
        """
        if number > 0:
            self.hold_back(number, self.rank())

    def rank(self) -> jax.Array:
        return self._call.rank

    def here(self) -> jax.Array:
        """Returns the index of this rank's device in the mesh, in row-major order, [] int32."""
        return self._call.mesh_index

    @property
    def _call(self) -> _Call:
        return self._calls[-1]  # type: ignore[attr-defined]

    @property
    def operands(self) -> Sequence[jax.Array]:
        return (self.mesh_index,)

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        """Returns the type of the scratch that `enter` takes, by name: that of `_Call.table`.

        `num_buffers` is the number of buffers that peers access.
        """
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
        """Begins a call of the kernel; every warpgroup of every block runs this first.

        For each peer, finds the sequence number of this call: how many calls the peer and this rank
        have made with each other, this one included. Block 0 sends peers the buffers' addresses.

        Args:
          operands: references to `self.operands`.
          buffers: references to the buffers that peers read or write, in one order on all ranks.
          name: the kernel's name, for messages.
          num_blocks: the kernel's number of thread blocks.
          reads: whether peers read data that this rank wrote to its buffers before the call.
          scratch: references to the shared memory of `scratch_types`, by name.

        Raises:
          ValueError: the kernel exceeds a limit of `memory_map`.
        """
        if num_blocks > memory_map.MAX_BLOCKS:
            raise ValueError(
                f"{name} must have at most {memory_map.MAX_BLOCKS} thread blocks, but has "
                f"{num_blocks}."
            )
        if len(buffers) > memory_map.MAX_BUFFERS or self.num_ranks > memory_map.MAX_GPUS:
            raise ValueError(
                f"{name} must have at most {memory_map.MAX_BUFFERS} buffers that peers access and "
                f"at most {memory_map.MAX_GPUS} ranks, but has {len(buffers)} buffers and "
                f"{self.num_ranks} ranks."
            )
        mesh_index = operands[0][0]
        rank, corner = self.rank_and_corner(mesh_index)
        table, offsets = scratch["fabric_table"], [0]
        for stride, size in self.axes:
            offsets = [offset + i * stride for offset in offsets for i in range(size)]
        peers = [self.gpu(corner + offset) for offset in offsets]
        name = name.removeprefix("ep_")
        here = self.gpu(mesh_index)
        call = _Call(mesh_index, rank, here, peers, table, list(buffers), name, reads)
        self._calls[:] = [call]  # type: ignore[attr-defined]
        self.hold_back(0, rank)
        num_ranks = self.num_ranks

        def emit(table: Any, here: Any, *args: Any) -> None:
            here, peers, refs = scalar(here), list(map(scalar, args[:num_ranks])), args[num_ranks:]
            thread, block = mosaic.warpgroup_thread(), mosaic.block()
            heap = self._heap(here)
            numbers = call.numbers(table)
            # Write this call's sequence number with each peer to the table in shared memory.
            # Numbers begin with 1, so that a word of zeros belongs to no call. `connect` later
            # writes the table's other words: the offsets from this rank's buffers to the peers'
            # (see `mosaic.reach_peers`).
            peer = _select(peers, thread)
            counter = _at(heap, memory_map.CALLS, (peer, 8 * memory_map.MAX_BLOCKS), (block, 8))
            with mosaic.when(_below(thread, num_ranks)):
                number = arith.addi(_load(counter), i64(1))
                _store_shared(_plus(numbers, (thread, 8)), number)
            mosaic.barrier()
            first = mosaic.equal(block, i32(0))
            of_block = mosaic.thread()
            # Every call sends MAX_BUFFERS words with addresses, even if the kernel has fewer
            # buffers. Otherwise a word of an old call could remain in the peer's memory, with the
            # low bits of that call's number as its tag. When the tags have wrapped around, the peer
            # would take it for a word of the current call.
            sends = _below(of_block, memory_map.MAX_BUFFERS * num_ranks)
            with mosaic.when(arith.andi(first, sends)):
                self._send_addresses(call, heap, here, peers, refs, numbers, thread)
            mosaic.block_barrier()
            # All warpgroups of this block have now read the block's call counters. So the counters
            # may be set to this call's sequence numbers. The next kernel may have more blocks than
            # this one, so the counters of the blocks that this kernel lacks are set, too.
            own = _below(of_block, WARPGROUP)
            for r, peer in enumerate(peers):
                number = _load_shared(_plus(numbers, (i32(r), 8)))
                for start in range(0, memory_map.MAX_BLOCKS, WARPGROUP * num_blocks):
                    index = _plus(block, (i32(1), start), (thread, num_blocks))
                    counter = _at(
                        heap, memory_map.CALLS, (peer, 8 * memory_map.MAX_BLOCKS), (index, 8)
                    )
                    with mosaic.when(arith.andi(own, _below(index, memory_map.MAX_BLOCKS))):
                        _store(counter, number)

        layouts = [REFERENCE, *[SCALAR] * (1 + num_ranks), *[REFERENCE] * len(buffers)]
        mosaic.inline(emit, [table, call.here, *peers, *buffers], layouts)
        mosaic.reach_peers(table, lambda t, entry: _load_shared(_plus(call.deltas(t), (entry, 8))))

    def _send_addresses(self, call, heap, here, peers, refs, numbers, thread) -> None:
        """Emits code that sends the buffers' addresses to the ranks.

        Thread i sends the address of buffer i // N to rank i % N, where N is the number of ranks.

        Args:
          call: the kernel call.
          heap: the address of this GPU's heap.
          here: the number of this GPU.
          peers: the number of each rank's GPU.
          refs: memrefs of the buffers.
          numbers: the address in shared memory of an array [N] of 64-bit words: for each rank, the
            sequence number of this call (see `_Call.table`).
          thread: the index of the thread in its warpgroup, i.
        """
        buffer = arith.divui(thread, i32(self.num_ranks))
        rank = arith.remui(thread, i32(self.num_ranks))
        tag = arith.andi(_load_shared(_plus(numbers, (rank, 8))), i64(_NOT_SHARED - 1))
        start = _load(_at(heap, 8 * memory_map.POOL_START))
        # A kernel without buffers sends an address, too: the start of the memory pool, for which
        # the flag `_NOT_SHARED` is not set. A peer's block without work may still be in an earlier
        # call, and may read this word in place of the earlier call's. If the flag were set, the
        # block would abort.
        address = _select([mosaic.address(ref) for ref in refs] or [start], buffer)
        size = _load(_at(heap, 8 * memory_map.POOL_BYTES))
        outside = arith.cmpi(arith.CmpIPredicate.uge, arith.subi(address, start), size)
        flag = arith.select(outside, i64(_NOT_SHARED), i64(0))
        word = arith.shli(arith.shrui(address, i64(4)), i64(_TAG_BITS + 1))
        word = arith.ori(arith.ori(word, flag), tag)
        there = _at(
            self._heap(_select(peers, rank)),
            memory_map.ADDRESSES,
            (here, 8 * memory_map.MAX_BUFFERS),
            (buffer, 8),
        )
        _store(there, word, release=call.reads)

    def connect(self) -> None:
        """Waits until every rank has sent its buffers' addresses to this rank.

        For each buffer and each rank, stores the address of the rank's buffer minus the address of
        this rank's buffer; `peer` needs these offsets. If `enter` was called with `reads`, this
        rank then also sees the data that the ranks wrote to their buffers before the call.
        """
        call, num_ranks = self._call, self.num_ranks
        if not call.buffers:
            return

        def emit(table: Any, here: Any, rank: Any, *args: Any) -> None:
            peers, refs = list(map(scalar, args[:num_ranks])), args[num_ranks:]
            thread, heap = mosaic.warpgroup_thread(), self._heap(scalar(here))
            with mosaic.when(_below(thread, len(refs) * num_ranks)):
                buffer = arith.divui(thread, i32(num_ranks))
                source = arith.remui(thread, i32(num_ranks))
                peer = _select(peers, source)
                number = _load_shared(_plus(call.numbers(table), (source, 8)))
                delta = _load(_at(heap, 8 * memory_map.DELTA, (peer, 8)))
                mask = i64(_NOT_SHARED - 1)
                pointer = _at(
                    heap, memory_map.ADDRESSES, (peer, 8 * memory_map.MAX_BUFFERS), (buffer, 8)
                )

                def ask() -> tuple[Value, list[Value]]:
                    word = _load(pointer)
                    # A peer does not wait for a block of this rank that has no work, so it may
                    # already have sent the word of a later call. So accept a word whose tag, the
                    # low bits of its call's number, equals this call's tag or is ahead of it,
                    # modulo the tags' range. Poll again if the tag is behind.
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
                own = _select([mosaic.address(ref) for ref in refs], buffer)
                offset = arith.subi(arith.addi(address, delta), own)
                _store_shared(_plus(call.deltas(table), (thread, 8)), offset)
            if call.reads:
                _acquire()
                mosaic.asm("fence.proxy.async;", "~{memory}")
            mosaic.barrier()

        layouts = [REFERENCE, *[SCALAR] * (2 + num_ranks), *[REFERENCE] * len(call.buffers)]
        operands = [call.table, call.here, call.rank, *call.peers, *call.buffers]
        mosaic.inline(emit, operands, layouts)

    def peer(self, ref: Any, rank: Any) -> Any:
        """Returns a reference to the memory of rank `rank` that corresponds to `ref` on this rank.

        `ref` is one of the buffers given to `enter`, or a slice of one.
        """
        base = getattr(ref, "ref", ref)
        found = [i for i, other in enumerate(self._call.buffers) if other is base]
        if not found:
            raise ValueError(
                f"{self._call.name}: peers cannot access a buffer of shape {base.shape} and dtype "
                f"{base.dtype}; name it in `shared`."
            )
        (buffer,) = found
        entry = jnp.asarray(rank, jnp.int32) + buffer * self.num_ranks
        return mosaic.remote_ref(ref, entry)

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        """Sends a signal with the number `count` to every rank, for the block of the same index.

        Args:
          kind: 0 or 1. A block has a signal of each kind from each rank.
          count: int32 from 1 to 2**memory_map.COUNT_BITS - 1. Of two signals of a kind in a call,
            the later one must have the larger count.
          release: whether a peer that sees the signal also sees this warpgroup's earlier writes.
            If False, the signal is ordered only after the warpgroup's earlier reads. It does not
            wait for the writes, so it arrives about a microsecond sooner.
        """
        call = self._call

        def emit(table: Any, here: Any, count: Any, *peers: Any) -> None:
            thread = mosaic.warpgroup_thread()
            peer = _select(list(map(scalar, peers)), thread)
            mosaic.barrier()
            with mosaic.when(_below(thread, self.num_ranks)):
                word = call.signal(table, thread, scalar(count))
                _store(self._signal(peer, scalar(here), kind), word, release=release)

        layouts = [REFERENCE, *[SCALAR] * (2 + self.num_ranks)]
        operands = [call.table, call.here, jnp.asarray(count, jnp.int32), *call.peers]
        mosaic.inline(emit, operands, layouts)

    def wait(self, kind: int, count: Any, what: str) -> None:
        """Waits for a signal from every rank, sent by the block of this block's index.

        Args:
          kind: the kind of the signals, 0 or 1.
          count: int32. The wait ends when all signals are at least `count`, or at once if it is 0.
          what: names the wait in the message of a program that aborts after `timeout_s` seconds.
        """
        call = self._call

        def emit(table: Any, here: Any, rank: Any, count: Any, *peers: Any) -> None:
            thread = mosaic.warpgroup_thread()
            peer = _select(list(map(scalar, peers)), thread)
            some = arith.cmpi(arith.CmpIPredicate.ne, scalar(count), i32(0))
            with mosaic.when(arith.andi(some, _below(thread, self.num_ranks))):
                target = call.signal(table, thread, scalar(count))
                pointer = self._signal(scalar(here), peer, kind)

                def ask() -> tuple[Value, list[Value]]:
                    return mosaic.below(_load(pointer), target), []

                ptx.poll(
                    ask,
                    lambda _: ptx.give_up(what, self.timeout_s, scalar(rank), thread),
                    timeout_s=self.timeout_s,
                )
            _acquire()
            mosaic.barrier()

        layouts = [REFERENCE, *[SCALAR] * (3 + self.num_ranks)]
        operands = [call.table, call.here, call.rank, jnp.asarray(count, jnp.int32), *call.peers]
        mosaic.inline(emit, operands, layouts)

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        """Sends int32 of `words` to every rank, two at a time: `count` pairs from pair `first` on.

        Pair i is (words[2 * i], words[2 * i + 1]), where `words` is [n] int32 in this rank's global
        memory. The two are sent as halves of one 32-bit value, so that they take half the memory
        that `send_values` would need. An int32 that does not fit in 16 bits becomes -1.
        """
        call, last = self._call, words.shape[0] - 1

        def emit(table: Any, here: Any, first: Any, words: Any, *peers: Any) -> None:
            numbers = [
                _load_shared(_plus(call.numbers(table), (i32(r), 8))) for r in range(len(peers))
            ]
            for start in range(0, count, WARPGROUP):
                index = arith.addi(mosaic.warpgroup_thread(), i32(start))
                with mosaic.when(_below(index, count)):
                    pair = arith.addi(scalar(first), index)
                    halves = []
                    for which in range(2):
                        at = arith.minui(_plus(i32(which), (pair, 2)), i32(last))
                        word = mosaic.element_at(words, at)
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
        """Waits for the pairs of int32 that `rank` sends by `send_halves`; copies them to `words`.

        `words` is [n] int32 in shared memory, for n / 2 pairs, rounded up. Pair i goes to
        words[2 * i] and words[2 * i + 1]. The caller must put a barrier between this call and other
        threads' reads of `words`. `what` names the wait in the error message of a timeout.
        """
        (total,) = words.shape
        self._read(rank, 0, words, -(-total // 2), what, halves=True)

    def send_values(self, words: Any, start: Any, ranks: Sequence[Any] | None = None) -> None:
        """Sends n 32-bit values to other ranks, which read them with `read_values`.

        Any warpgroup may send, and any block of the receiver may read. Even and odd calls use
        different memory at the receiver, so a sender need not wait until its values are read: when
        it uses the memory again, two calls later, the receiver has read them. This requires that a
        rank receives something from each peer in every call.

        Args:
          words: [n] 32-bit elements in this rank's global or shared memory.
          start: int32, the index of words[0] among the values that this rank sends in the call. A
            receiver selects values by this index.
          ranks: the ranks to send to, or None to send to all.

        Raises:
          ValueError: n exceeds `memory_map.MAX_VALUES`.
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
            indices = [
                arith.addi(mosaic.warpgroup_thread(), i32(i)) for i in range(0, count, WARPGROUP)
            ]
            for index in indices:
                with mosaic.when(_below(index, count)):
                    value = _widen(arith.bitcast(i32_type, mosaic.element_at(words, index)))
                    at = arith.addi(scalar(start), index)
                    for rank in map(scalar, to):
                        number = _load_shared(_plus(call.numbers(table), (rank, 8)))
                        word = arith.ori(arith.shli(number, i64(32)), value)
                        peer = _select(peers, rank)
                        _store(self._value(peer, scalar(here), number, at), word)

        layouts = [REFERENCE, SCALAR, SCALAR, REFERENCE, *[SCALAR] * (self.num_ranks + len(to))]
        start = jnp.asarray(start, jnp.int32)
        mosaic.inline(emit, [call.table, call.here, start, words, *call.peers, *to], layouts)

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        """Waits for values that a rank sends by `send_values`, and copies them to `words`.

        Args:
          rank: the rank that sends the values.
          start: int32, the index of the first value to read among those that `rank` sends.
          words: [n] 32-bit elements in shared memory, for the n values from `start` on. The caller
            must put a barrier between this call and other threads' reads of `words`.
          what: names the wait in the message of a program that aborts after `timeout_s` seconds.
        """
        self._read(rank, start, words, words.shape[0], what)

    def _read(
        self, rank: Any, start: Any, words: Any, total: int, what: str, *, halves: bool = False
    ) -> None:
        """Waits for `total` values that `rank` sends, and copies them to `words`.

        They are the values with the indices start to start + total - 1 among all that `rank` sends
        in the call. If `halves` is set, a value is a pair of 16-bit integers, which becomes two
        int32 in `words`; else it is one 32-bit word. `what` names the wait in a timeout's message.
        """
        call, (num_words,) = self._call, words.shape

        def emit(
            table: Any, here: Any, me: Any, rank: Any, start: Any, words: Any,
            *peers: Any,
        ) -> None:  # fmt: skip
            source = scalar(rank)
            number = _load_shared(_plus(call.numbers(table), (source, 8)))
            peer = _select(list(map(scalar, peers)), source)
            to = mosaic.address(words, 32)

            def ask(pointers: Sequence[Value]) -> tuple[Value, list[Value]]:
                values = [_load(pointer) for pointer in pointers]
                late = [
                    arith.cmpi(
                        arith.CmpIPredicate.ne,
                        _narrow(arith.shrui(value, i64(32))),
                        _narrow(number),
                    )
                    for value in values
                ]
                return functools.reduce(arith.ori, late), [_narrow(value) for value in values]

            def poll(pointers: Sequence[Value]) -> list[Value]:
                return ptx.poll(
                    lambda: ask(pointers),
                    lambda _: ptx.give_up(what, self.timeout_s, scalar(me), source),
                    timeout_s=self.timeout_s,
                    types=[mosaic.integer_type(32)] * len(pointers),
                )

            for first in range(0, total, _VALUES_AT_ONCE):
                count = min(_VALUES_AT_ONCE, total - first)
                rounds = range(first, first + count, WARPGROUP)
                indices = [arith.addi(mosaic.warpgroup_thread(), i32(i)) for i in rounds]
                last = i32(total - 1)
                pointers = [
                    self._value(
                        scalar(here), peer, number, arith.addi(scalar(start), arith.minui(i, last))
                    )
                    for i in indices
                ]

                # All blocks poll the same words. To reduce the traffic, each thread polls only the
                # last of its words until it has arrived, and then all of them.
                if len(pointers) > 1:
                    poll(pointers[-1:])
                values = poll(pointers)
                for index, value in zip(indices, values, strict=True):
                    parts = [(index, value)]
                    if halves:
                        both = _low_half(value), arith.shrsi(value, i32(16))
                        parts = [(_plus(i32(i), (index, 2)), half) for i, half in enumerate(both)]
                    for at, word in parts:
                        with mosaic.when(_below(at, num_words)):
                            pointer = _plus(to, (at, 4))
                            mosaic.asm("st.shared.b32 [$0], $1;", "r,r,~{memory}", pointer, word)

        layouts = [REFERENCE, *[SCALAR] * 4, REFERENCE, *[SCALAR] * self.num_ranks]
        rank, start = (jnp.asarray(value, jnp.int32) for value in (rank, start))
        operands = [call.table, call.here, call.rank, rank, start, words, *call.peers]
        mosaic.inline(emit, operands, layouts)

    # The following methods compute addresses in the GPUs' heaps.

    def _heap(self, number: Value) -> Value:
        return _at(i64(self.base), 0, (number, memory_map.STRIDE))

    def _signal(self, owner: Value, sender: Value, kind: int) -> Value:
        """Returns the address of a signal in GPU `owner`'s heap.

        GPU `sender` sends the signal to the block of this block's index on GPU `owner`. `kind` is
        the signal's kind, 0 or 1.
        """
        start = memory_map.SIGNALS + 8 * memory_map.MAX_GPUS * memory_map.MAX_BLOCKS * kind
        return _at(self._heap(owner), start, (mosaic.block(), 8 * memory_map.MAX_GPUS), (sender, 8))

    def _value(self, owner: Value, sender: Value, number: Value, index: Value) -> Value:
        """Returns the address in GPU `owner`'s heap of a value that GPU `sender` sends.

        `index` is the index of the value among those that `sender` sends to `owner` in a call.
        `number` is the call's number; even and odd calls use different memory.
        """
        which = arith.andi(_narrow(number), i32(1))
        of_sender = _plus(sender, (which, memory_map.MAX_GPUS))
        return _at(
            self._heap(owner), memory_map.VALUES, (of_sender, 8 * memory_map.MAX_VALUES), (index, 8)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A kernel call that is being traced: the values that the methods of `Gpus` need.

    Attributes:
      mesh_index: [] int32, the row-major index of this rank's device in the mesh.
      rank: [] int32, this rank.
      here: [] int32, the number of this rank's GPU on the host.
      peers: the number of each rank's GPU on the host, [] int32 each.
      table: reference to shared memory with two arrays of 64-bit words. The first, [buffers, N],
        holds for each buffer and each of the N ranks the buffer's address at that rank minus its
        address at this rank. The second, [N], holds for each rank the sequence number of this call:
        how many calls that rank and this rank have made with each other, this one included.
      buffers: references to the buffers that peers read or write.
      name: the kernel's name, for messages.
      reads: whether peers read data that was written to the buffers before the call.
    """

    mesh_index: jax.Array
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
        """Returns the 64-bit word of a signal to or from `rank`.

        The high bits are the sequence number of this call with `rank` (see `table`), and the
        COUNT_BITS low bits are `count`. `table` is the memref of the attribute `table`.
        """
        number = _load_shared(_plus(self.numbers(table), (rank, 8)))
        return arith.ori(arith.shli(number, i64(memory_map.COUNT_BITS)), _widen(count))


def _below(value: Value, count: int) -> Value:
    return mosaic.below(value, arith.constant(value.type, count))


def _widen(value: Value) -> Value:
    return arith.extui(mosaic.integer_type(64), value)


def _low_half(value: Value) -> Value:
    """Emits the int32 that equals the lower 16 bits of an int32, taken as a signed number."""
    return arith.shrsi(arith.shli(value, i32(16)), i32(16))


def _narrow(value: Value) -> Value:
    return arith.trunci(mosaic.integer_type(32), value)


def _select(values: Sequence[Value], index: Value) -> Value:
    """Emits values[index], where `index` may differ between threads.

    If `index` is past the last value, the result is values[0].
    """
    value = values[0]
    for i, other in enumerate(values[1:], 1):
        value = arith.select(mosaic.equal(index, i32(i)), other, value)
    return value


def _at(base: Value, offset: int, *terms: tuple[Value, int]) -> Value:
    """Emits a 64-bit address: base + offset + the sum of index * size.

    `terms` are the pairs (index, size), with sizes in bytes: one pair for each axis of an array.
    """
    address = arith.addi(base, i64(offset))
    for index, size in terms:
        address = arith.addi(address, arith.muli(_widen(index), i64(size)))
    return address


def _plus(base: Value, *terms: tuple[Value, int]) -> Value:
    """Emits a 32-bit number, such as an address in shared memory: base + the sum of index * size.

    `terms` are the pairs (index, size).
    """
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
