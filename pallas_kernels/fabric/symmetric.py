"""Communication within kernels over symmetric memory, between ranks that have a GPU each.

`Gpus` implements `fabric.Fabric`; `memory_map` defines the memory. `enter` computes, for each peer,
the number of this call: how many calls the two ranks have made with each other, this one included.
Block 0 also sends each peer the addresses of this rank's buffers; `connect` waits for the peers'
addresses. After it, `peer` only computes an address, and Pallas' copies, loads and stores access a
peer's buffer.

A signal is a 64-bit word that only grows: its high bits are the number of the call, its low bits a
count. So no memory is zeroed between calls, and ranks synchronize in the time that one signal takes
over the link.

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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import memory_map, mosaic
from pallas_kernels.fabric.fabric import RanksOfMesh
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.fabric.mosaic import (
    Value,
    add,
    address_at,
    arith,
    below,
    entry_of,
    i32,
    i64,
    load64,
    mul,
    scalar,
    store64,
)

# A rank sends a buffer's address as a 64-bit word. From the highest bit on, the word holds an
# address of 49 bits without its last four, which are 0; the flag `_NOT_SHARED`; and a tag of
# _TAG_BITS bits, the low bits of the call's number.
_TAG_BITS = 18
# The flag says that a buffer lies outside the memory pool which the rank's process shares, so that
# a peer in another process cannot access the buffer.
_NOT_SHARED = 1 << _TAG_BITS
# `read_values` polls this many 32-bit values at a time: 8 for each thread of the warpgroup.
_VALUES_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class Gpus(RanksOfMesh):
    """The `fabric.Fabric` of ranks along some axes of a mesh, each with a GPU of one host."""

    mesh_index: Any = None  # [1] int32, of this rank's device; an operand of every kernel
    base: int = memory_map.BASE  # the address of GPU 0's heap

    def __post_init__(self) -> None:
        # A list, since this class is frozen, of at most one `_Call`: the kernel call that is being
        # traced. `enter` sets it.
        object.__setattr__(self, "_calls", [])

    def async_fence(self) -> None:
        mosaic.inline(lambda: mosaic.asm("fence.proxy.async;"), [])

    def delay_point(self, number: int) -> None:
        """Delays this rank if a test has set a delay; `enter` has done so for point 0."""
        if number > 0:
            self.hold_back(number, self.rank())

    def rank(self) -> jax.Array:
        return self._call.rank

    def here(self) -> jax.Array:
        return self._call.mesh_index

    @property
    def _call(self) -> _Call:
        return self._calls[-1]  # type: ignore[attr-defined]

    @property
    def operands(self) -> Sequence[jax.Array]:
        return (self.mesh_index,)

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
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

        `operands` are references to `self.operands`, and `scratch` to `scratch_types`. `buffers`
        are those that peers access, in one order on all ranks. `reads` is whether peers read data
        that this rank wrote to them before the call.
        """
        # More would reach past this GPU's arrays in its heap. Callers refuse it with a message.
        num_buffers, num_ranks = len(buffers), self.num_ranks
        assert num_blocks <= memory_map.MAX_BLOCKS, (name, num_blocks)
        assert num_buffers <= memory_map.MAX_BUFFERS, (name, num_buffers)
        assert num_ranks <= memory_map.MAX_GPUS, (name, num_ranks)
        mesh_index = operands[0][0]
        rank, index_of_rank_0 = self.rank_and_index_of_rank_0(mesh_index)
        call = _Call(
            mesh_index=mesh_index,
            rank=rank,
            gpu=self.gpu(mesh_index),
            gpus=[self.gpu(index_of_rank_0 + offset) for offset in self.offsets()],
            table=scratch["fabric_table"],
            buffers=list(buffers),
            name=name.removeprefix("ep_"),
            reads=reads,
        )
        self._calls[:] = [call]  # type: ignore[attr-defined]
        self.hold_back(0, rank)

        def emit(at: _Emitted, *refs: Any) -> None:
            thread, block = mosaic.warpgroup_thread(), mosaic.block()
            heap = self._heap(at.gpu)
            # Thread r reads the counter of calls with rank r. Numbers begin with 1, so that a word
            # of zeros belongs to no call.
            counter = self._call_counter(heap, entry_of(at.gpus, thread), block)
            with mosaic.when(below(thread, num_ranks)):
                number = add(load64(counter), 1)
                mosaic.store_shared64(at.number_address(thread), number)
            mosaic.barrier()
            is_block_0 = mosaic.equal(block, 0)
            thread_of_block = mosaic.thread()
            # Every call sends MAX_BUFFERS words with addresses, even if the kernel has fewer
            # buffers. Otherwise the word of an old call could remain in the peer's memory until
            # tags have wrapped around, and be taken for a word of the current call. The threads of
            # the first warpgroup are more than these words.
            sends = below(thread_of_block, memory_map.MAX_BUFFERS * num_ranks)
            with mosaic.when(arith.andi(is_block_0, sends)):
                self._send_addresses(at, heap, refs, thread)
            # All warpgroups of this block must have read the block's call counters, before the
            # first sets them.
            mosaic.block_barrier()
            in_first_warpgroup = below(thread_of_block, WARPGROUP)
            self._count_call(at, heap, thread, block, num_blocks, in_first_warpgroup)

        call.inline(emit, *buffers)

        def offset(table: Value, entry: Value) -> Value:
            return mosaic.load_shared64(add(mosaic.address(table, 32), mul(entry, 8)))

        mosaic.reach_peers(call.table, offset)

    def _count_call(
        self, at: _Emitted, heap: Value, thread: Value, block: Value, num_blocks: int, sets: Value
    ) -> None:
        """Emits stores of this call's numbers as counters, by threads whose `sets` (i1) is true.

        The next kernel may have more blocks than the `num_blocks` of this one, so each block sets
        the counters of all indices that equal its own index modulo num_blocks.
        """
        for r, gpu in enumerate(at.gpus):
            number = at.number(i32(r))
            for start in range(0, memory_map.MAX_BLOCKS, WARPGROUP * num_blocks):
                index = add(block, start, mul(thread, num_blocks))
                counter = self._call_counter(heap, gpu, index)
                exists = below(index, memory_map.MAX_BLOCKS)
                with mosaic.when(arith.andi(sets, exists)):
                    store64(counter, number)

    def _send_addresses(
        self, at: _Emitted, heap: Value, refs: Sequence[Value], thread: Value
    ) -> None:
        """Emits code by which thread i sends the address of refs[i // N] to rank i % N."""
        # Past the end of `refs`, it is that of refs[0]. `heap` is the address of this GPU's heap.
        buffer, rank = mosaic.divided(thread, self.num_ranks)
        tag = arith.andi(at.number(rank), i64(_NOT_SHARED - 1))
        pool_start = load64(address_at(heap, 8 * memory_map.POOL_START))
        # A kernel without buffers sends the start of the memory pool, which is shared. A peer's
        # block without work may still be in an earlier call, may read this word in place of that
        # call's, and would abort if the flag `_NOT_SHARED` were set.
        address = entry_of([mosaic.address(ref) for ref in refs] or [pool_start], buffer)
        pool_bytes = load64(address_at(heap, 8 * memory_map.POOL_BYTES))
        # The difference is unsigned, so that of an address before the pool is large, too.
        offset = arith.subi(address, pool_start)
        outside = arith.cmpi(arith.CmpIPredicate.uge, offset, pool_bytes)
        flag = arith.select(outside, i64(_NOT_SHARED), i64(0))
        word = arith.shli(arith.shrui(address, i64(4)), i64(_TAG_BITS + 1))
        word = arith.ori(arith.ori(word, flag), tag)
        there = address_at(
            self._heap(entry_of(at.gpus, rank)),
            memory_map.ADDRESSES,
            (at.gpu, 8 * memory_map.MAX_BUFFERS),
            (buffer, 8),
        )
        store64(there, word, release=at.call.reads)

    def connect(self) -> None:
        """Waits until every rank has sent its buffers' addresses; stores offsets for `peer`."""
        # With `reads`, this rank then also sees what ranks wrote to their buffers before the call.
        call, num_ranks = self._call, self.num_ranks
        if not call.buffers:
            return  # `peer` is never called.

        def emit(at: _Emitted, *refs: Any) -> None:
            thread, heap = mosaic.warpgroup_thread(), self._heap(at.gpu)
            with mosaic.when(below(thread, len(refs) * num_ranks)):
                self._store_offset(at, heap, refs, thread)
            if call.reads:
                mosaic.acquire()
                mosaic.asm("fence.proxy.async;", "~{memory}")
            mosaic.barrier()

        call.inline(emit, *call.buffers)

    def _store_offset(
        self, at: _Emitted, heap: Value, refs: Sequence[Value], thread: Value
    ) -> None:
        """Emits code by which thread i waits for the address of refs[i // N] at rank i % N."""
        # The thread stores in `at.offsets()` that address minus the address of refs[i // N] here.
        buffer, source = mosaic.divided(thread, self.num_ranks)
        gpu, number = entry_of(at.gpus, source), at.number(source)
        # Where this process maps the memory pool of `gpu`, minus where the pool's process has it.
        delta = load64(address_at(heap, 8 * memory_map.DELTA, (gpu, 8)))
        mask = i64(_NOT_SHARED - 1)
        pointer = address_at(
            heap, memory_map.ADDRESSES, (gpu, 8 * memory_map.MAX_BUFFERS), (buffer, 8)
        )

        def ask() -> tuple[Value, list[Value]]:
            word = load64(pointer)
            # If this block has no work, the peer may have sent the word of a later call already. So
            # accept a word whose tag equals this call's or is ahead of it, modulo the tags' range.
            ahead = arith.andi(arith.subi(word, number), mask)
            behind = arith.cmpi(arith.CmpIPredicate.ugt, ahead, i64(_NOT_SHARED // 2))
            return behind, [word]

        (word,) = mosaic.poll(
            ask,
            lambda _: mosaic.give_up(at.call.name, self.timeout_s, at.rank, source),
            timeout_s=self.timeout_s,
            types=[mosaic.integer_type(64)],
        )
        not_shared = mosaic.unequal(arith.andi(word, i64(_NOT_SHARED)), 0)
        # Within a process, addresses need no delta, and GPUs access all memory.
        in_other_process = mosaic.unequal(delta, 0)
        with mosaic.when(arith.andi(not_shared, in_other_process)):
            mosaic.refuse(at.call.name, at.rank, source)
        address = arith.shli(arith.shrui(word, i64(_TAG_BITS + 1)), i64(4))
        address_here = entry_of([mosaic.address(ref) for ref in refs], buffer)
        offset = arith.subi(add(address, delta), address_here)
        mosaic.store_shared64(add(at.offsets(), mul(thread, 8)), offset)

    def peer(self, ref: Any, rank: Any) -> Any:
        whole = getattr(ref, "ref", ref)  # the buffer itself, if `ref` is a slice of it
        found = [i for i, other in enumerate(self._call.buffers) if other is whole]
        if not found:
            raise ValueError(
                f"{self._call.name}: peers cannot access a buffer of shape {whole.shape} and dtype "
                f"{whole.dtype}; name it in `shared`."
            )
        (buffer,) = found
        # The index of an offset in `_Call.table`, which `enter` passes to `reach_peers`.
        entry = jnp.asarray(rank, jnp.int32) + buffer * self.num_ranks
        return mosaic.remote_ref(ref, entry)

    def signal(self, kind: int, count: Any, *, release: bool = True) -> None:
        def emit(at: _Emitted, count: Any) -> None:
            thread = mosaic.warpgroup_thread()
            receiver = entry_of(at.gpus, thread)
            # The threads that send the signal begin after all threads' writes.
            mosaic.barrier()
            with mosaic.when(below(thread, self.num_ranks)):
                word = at.signal(thread, scalar(count))
                store64(self._signal(receiver, at.gpu, kind), word, release=release)

        self._call.inline(emit, jnp.asarray(count, jnp.int32))

    def wait(self, kind: int, count: Any, what: str) -> None:
        def emit(at: _Emitted, count: Any) -> None:
            thread = mosaic.warpgroup_thread()
            sender = entry_of(at.gpus, thread)
            must_wait = mosaic.unequal(scalar(count), 0)
            with mosaic.when(arith.andi(must_wait, below(thread, self.num_ranks))):
                target = at.signal(thread, scalar(count))
                pointer = self._signal(at.gpu, sender, kind)

                def ask() -> tuple[Value, list[Value]]:
                    return below(load64(pointer), target), []

                mosaic.poll(
                    ask,
                    lambda _: mosaic.give_up(what, self.timeout_s, at.rank, thread),
                    timeout_s=self.timeout_s,
                )
            mosaic.acquire()
            mosaic.barrier()

        self._call.inline(emit, jnp.asarray(count, jnp.int32))

    def send_halves(self, words: Any, first: Any, count: int) -> None:
        last = words.shape[0] - 1

        def emit(at: _Emitted, first: Any, words: Any) -> None:
            numbers = [at.number(i32(r)) for r in range(self.num_ranks)]
            for start in range(0, count, WARPGROUP):
                index = add(mosaic.warpgroup_thread(), start)
                with mosaic.when(below(index, count)):
                    pair = add(scalar(first), index)
                    halves = []
                    for i in range(2):
                        # Past the last word, that word is repeated, and the receiver drops it.
                        index_of_half = arith.minui(add(mul(pair, 2), i), i32(last))
                        word = mosaic.element_at(words, index_of_half)
                        fits = mosaic.equal(word, mosaic.low_half(word))
                        word = arith.select(fits, word, i32(0xFFFFFFFF))  # else -1
                        halves.append(arith.andi(word, i32(0xFFFF)))
                    value = arith.ori(halves[0], arith.shli(halves[1], i32(16)))
                    self._send(at, numbers, pair, value)

        self._call.inline(emit, jnp.asarray(first, jnp.int32), words)

    def read_halves(self, rank: Any, words: Any, what: str) -> None:
        (total,) = words.shape
        self._read(rank, 0, words, total=-(-total // 2), what=what, halves=True)

    def send_values(self, words: Any, start: Any) -> None:
        # Even and odd calls use different memory at the receiver: when a sender uses it again, two
        # calls later, the receiver has read it, since a rank receives something from each peer in
        # every call.
        (count,) = words.shape
        assert count <= memory_map.MAX_VALUES, (self._call.name, count)

        def emit(at: _Emitted, start: Any, words: Any) -> None:
            word = mosaic.integer_type(32)
            indices = [add(mosaic.warpgroup_thread(), i) for i in range(0, count, WARPGROUP)]
            for index in indices:
                with mosaic.when(below(index, count)):
                    value = arith.bitcast(word, mosaic.element_at(words, index))
                    numbers = (at.number(i32(r)) for r in range(self.num_ranks))
                    self._send(at, numbers, add(scalar(start), index), value)

        self._call.inline(emit, jnp.asarray(start, jnp.int32), words)

    def _send(self, at: _Emitted, numbers: Iterable[Value], index: Value, value: Value) -> None:
        """Emits stores of a 32-bit `value` to all ranks, as value number `index` of this call."""
        value = mosaic.widen(value)
        # The high half of a word for rank r is numbers[r], the number of the call with r.
        for number, receiver in zip(numbers, at.gpus, strict=True):
            word = arith.ori(arith.shli(number, i64(32)), value)
            store64(self._value(receiver, at.gpu, number, index), word)

    def read_values(self, rank: Any, start: Any, words: Any, what: str) -> None:
        self._read(rank, start, words, total=words.shape[0], what=what)

    def _read(
        self, rank: Any, start: Any, words: Any, total: int, what: str, *, halves: bool = False
    ) -> None:
        """Waits for `total` values from `rank`; stores them, or their two `halves`, in `words`."""
        (num_words,) = words.shape

        def emit(at: _Emitted, rank: Any, start: Any, words: Any) -> None:
            source = scalar(rank)
            number = at.number(source)
            sender = entry_of(at.gpus, source)
            words_address = mosaic.address(words, 32)

            def poll(pointers: Sequence[Value]) -> list[Value]:
                return mosaic.poll(
                    lambda: _values_of_call(pointers, number),
                    lambda _: mosaic.give_up(what, self.timeout_s, at.rank, source),
                    timeout_s=self.timeout_s,
                    types=[mosaic.integer_type(32)] * len(pointers),
                )

            for first in range(0, total, _VALUES_AT_ONCE):
                count = min(_VALUES_AT_ONCE, total - first)
                rounds = range(first, first + count, WARPGROUP)
                indices = [add(mosaic.warpgroup_thread(), i) for i in rounds]
                # Threads past the last value read it too, and store nothing.
                last = i32(total - 1)
                pointers = [
                    self._value(at.gpu, sender, number, add(scalar(start), arith.minui(i, last)))
                    for i in indices
                ]

                # All blocks poll the same words. To reduce the traffic, each thread polls only the
                # last of its words until it has arrived, and then all of them.
                if len(pointers) > 1:
                    poll(pointers[-1:])
                values = poll(pointers)
                for index, value in zip(indices, values, strict=True):
                    parts = _halves(index, value) if halves else [(index, value)]
                    for word_index, word in parts:
                        with mosaic.when(below(word_index, num_words)):
                            pointer = add(words_address, mul(word_index, 4))
                            mosaic.asm("st.shared.b32 [$0], $1;", "r,r,~{memory}", pointer, word)

        rank, start = (jnp.asarray(value, jnp.int32) for value in (rank, start))
        self._call.inline(emit, rank, start, words)

    # Addresses in the GPUs' heaps. The arguments `gpu`, `peer`, `owner` and `sender` number GPUs.

    def _heap(self, gpu: Value) -> Value:
        return address_at(i64(self.base), 0, (gpu, memory_map.STRIDE))

    def _call_counter(self, heap: Value, peer: Value, block: Value) -> Value:
        of_peer = peer, 8 * memory_map.MAX_BLOCKS
        return address_at(heap, memory_map.CALLS, of_peer, (block, 8))

    def _signal(self, owner: Value, sender: Value, kind: int) -> Value:
        """Emits the address in `owner`'s heap of the signal of `sender`'s block of this index."""
        start = memory_map.SIGNALS + 8 * memory_map.MAX_GPUS * memory_map.MAX_BLOCKS * kind
        return address_at(
            self._heap(owner), start, (mosaic.block(), 8 * memory_map.MAX_GPUS), (sender, 8)
        )

    def _value(self, owner: Value, sender: Value, number: Value, index: Value) -> Value:
        """Emits the address in `owner`'s heap of value `index` from `sender` in call `number`."""
        is_odd = arith.andi(mosaic.narrow(number), i32(1))
        of_sender = add(sender, mul(is_odd, memory_map.MAX_GPUS))
        return address_at(
            self._heap(owner), memory_map.VALUES, (of_sender, 8 * memory_map.MAX_VALUES), (index, 8)
        )


def _values_of_call(pointers: Sequence[Value], number: Value) -> tuple[Value, list[Value]]:
    """Loads sent values: whether any is not yet of call `number` (i1), and their 32 bits."""
    values = [load64(pointer) for pointer in pointers]
    # The high word of a value is the number of the call that has sent it.
    not_arrived = [
        mosaic.unequal(mosaic.narrow(arith.shrui(value, i64(32))), mosaic.narrow(number))
        for value in values
    ]
    return functools.reduce(arith.ori, not_arrived), [mosaic.narrow(value) for value in values]


def _halves(index: Value, value: Value) -> list[tuple[Value, Value]]:
    """Emits the two (index, int32) of the pair of number `index`; see `Fabric.send_halves`."""
    both = mosaic.low_half(value), arith.shrsi(value, i32(16))
    return [(add(mul(index, 2), i), half) for i, half in enumerate(both)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A kernel call that is being traced: the values that the methods of `Gpus` need."""

    mesh_index: jax.Array
    rank: jax.Array
    gpu: jax.Array  # the number of this rank's GPU on the host
    gpus: list[jax.Array]  # the numbers of all ranks' GPUs
    # 64-bit words in shared memory. offsets [buffers, N]: a buffer's address at each rank minus its
    # address here. numbers [N]: how many calls each rank and this rank have made with each other.
    table: Any
    buffers: list[Any]
    name: str
    reads: bool

    def inline(self, emit: Callable[..., None], *operands: Any) -> None:
        """Inserts what `emit(at, *operands)` emits, where `at` has this call's values."""
        num_ranks = len(self.gpus)

        def run(table: Value, gpu: Any, rank: Any, *others: Any) -> None:
            gpus = list(map(scalar, others[:num_ranks]))
            at = _Emitted(self, table, scalar(gpu), scalar(rank), gpus)
            emit(at, *others[num_ranks:])

        mosaic.inline(run, [self.table, self.gpu, self.rank, *self.gpus, *operands])


class _Emitted(NamedTuple):
    """The values of a `_Call` in emitted code."""

    call: _Call
    table: Value
    gpu: Value
    rank: Value
    gpus: list[Value]

    def offsets(self) -> Value:
        """Emits the address in shared memory of the offsets in `_Call.table`."""
        return mosaic.address(self.table, 32)

    def number_address(self, rank: Value) -> Value:
        numbers = add(self.offsets(), 8 * len(self.call.buffers) * len(self.gpus))
        return add(numbers, mul(rank, 8))

    def number(self, rank: Value) -> Value:
        """Emits how many calls this rank has made with `rank`, this one included."""
        return mosaic.load_shared64(self.number_address(rank))

    def signal(self, rank: Value, count: Value) -> Value:
        """Emits the word of a signal to or from `rank`: number of the call, then `count`."""
        return arith.ori(
            arith.shli(self.number(rank), i64(memory_map.COUNT_BITS)), mosaic.widen(count)
        )
