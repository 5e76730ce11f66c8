"""The few instructions that Pallas has no fast name for, for a whole warpgroup at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value, arith, gpu, ir, llvm, scf

_POLLS_PER_CLOCK = 1024  # a power of two


def barrier() -> None:
    """Makes all threads of the warpgroup wait for each other."""
    mosaic.inline(lambda context: mosaic.barrier(), [], [])


def signal(semaphores: Sequence[Any], *, release: bool = True) -> None:
    """Adds one to each semaphore; a release makes visible what the warpgroup wrote before.

    One thread signals each semaphore: a release at system scope takes a microsecond, so they go at
    once. A relaxed signal orders only the warpgroup's earlier reads.
    """

    def emit(context: Any, *refs: Value) -> None:
        del context
        pointer = _pointer_of_lane(refs)
        mosaic.barrier()
        order = "release" if release else "relaxed"
        mosaic.asm(
            f"@$1 red.{order}.sys.global.add.u32 [$0], 1;",
            "l,b,~{memory}",
            pointer,
            mosaic.below(mosaic.lane(), mosaic.i32(len(refs))),
        )

    mosaic.inline(emit, semaphores, [mosaic.REFERENCE] * len(semaphores))


def wait(
    semaphores: Sequence[Any],
    count: Any,
    *,
    timeout_s: float,
    what: str,
    axes: Sequence[tuple[int, int]] = (),
) -> None:
    """Waits until each semaphore has reached `count`; traps, with a message, after `timeout_s`.

    Thread i waits for semaphore i, so that the waits overlap; i stands for a rank in the message.
    The rank that waited is computed only then: `axes` are those that ranks are counted along, each
    by its stride among the devices and its size; none where there is one rank.
    """

    def emit(context: Any, target: Any, *refs: Value) -> None:
        waiter, pointer = mosaic.lane(), _pointer_of_lane(refs)
        target = mosaic.scalar(target)
        waits = mosaic.below(waiter, mosaic.i32(len(refs)))

        def behind() -> tuple[Value, list[Value]]:
            seen = load_word(pointer)
            return arith.andi(waits, arith.cmpi(arith.CmpIPredicate.slt, seen, target)), []

        poll(
            behind,
            lambda _: give_up(what, timeout_s, _rank(context, axes), waiter),
            timeout_s=timeout_s,
        )
        mosaic.asm("fence.acquire.sys;")
        mosaic.barrier()

    layouts = [mosaic.SCALAR, *[mosaic.REFERENCE] * len(semaphores)]
    mosaic.inline(emit, [jnp.asarray(count, jnp.int32), *semaphores], layouts)


def poll(
    ask: Callable[[], tuple[Value, list[Value]]],
    late: Callable[[Sequence[Value]], None],
    *,
    timeout_s: float,
    num_values: int = 0,
) -> list[Value]:
    """Asks until there is nothing to wait for, thread by thread; what came with the last answer.

    Args:
      ask: emits a question: whether to wait on (i1), and `num_values` 32-bit values.
      late: emits what to do, given those, when `timeout_s` has passed.
    """
    i1, i32, i64 = (mosaic.integer_type(bits) for bits in (1, 32, 64))
    limit = arith.constant(i64, int(timeout_s * 1e9))
    start = _global_timer()

    def in_time(polls: Value) -> Value:
        """Asks the clock now and then: it is slow to answer."""
        often = mosaic.i32(_POLLS_PER_CLOCK - 1)
        now = mosaic.equal(arith.andi(polls, often), often)
        clock = scf.IfOp(now, [i1], has_else=True)
        with ir.InsertionPoint(clock.then_block):
            waited = arith.subi(_global_timer(), start)
            scf.yield_([mosaic.below(waited, limit)])
        with ir.InsertionPoint(clock.else_block):
            scf.yield_([arith.constant(i1, 1)])
        return clock.results[0]

    types = [i32, i1, *[i32] * num_values]
    loop = scf.WhileOp(types, [arith.constant(i32, 0)])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append(i32)):
        (polls,) = loop.before.blocks[0].arguments
        pending, values = ask()
        more = arith.andi(pending, in_time(polls))
        scf.condition(more, [arith.addi(polls, mosaic.i32(1)), pending, *values])
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append(*types)):
        scf.yield_([loop.after.blocks[0].arguments[0]])
    _, pending, *values = loop.results
    with mosaic.when(pending):
        late(values)
    return values


def load_word(pointer: Value) -> Value:
    """32 bits as they are in any GPU's memory by now."""
    text = "ld.relaxed.sys.global.b32 $0, [$1];"
    return mosaic.asm(text, "=r,l", pointer, returns=mosaic.integer_type(32))


def give_up(what: str, timeout_s: float, rank: Value, peer: Value) -> None:
    """Prints who waited for whom, and traps."""
    gpu.printf(
        f"jax_ep: {what}: rank %d waited over {timeout_s:g} s for rank %d (block %d); giving up.\n",
        rank,
        peer,
        arith.index_cast(mosaic.integer_type(32), gpu.block_id(gpu.Dimension.x)),
    )
    mosaic.asm("trap;")


def pause(nanoseconds: Any) -> None:
    """Makes the warpgroup sleep: for tests in which ranks are out of step."""

    def emit(context: Any, duration: Any) -> None:
        del context
        i64 = mosaic.integer_type(64)
        end = arith.addi(_global_timer(), arith.extui(i64, mosaic.scalar(duration)))
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            scf.condition(mosaic.below(_global_timer(), end), [])
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
            scf.yield_([])
        mosaic.barrier()

    mosaic.inline(emit, [jnp.asarray(nanoseconds, jnp.int32)], [mosaic.SCALAR])


def touch(refs: Sequence[Any]) -> None:
    """Computes the refs' addresses now: a peer's is read from memory, and then in the cache."""

    def emit(context: Any, *refs: Value) -> None:
        del context
        addresses = [mosaic.address(ref) for ref in refs]
        # The assembler drops what nobody uses: here all of them decide on something impossible.
        mosaic.asm(
            "{ .reg .pred p; setp.eq.u64 p, $0, 0; @p trap; }",
            "l",
            functools.reduce(arith.ori, addresses),
        )

    mosaic.inline(emit, refs, [mosaic.REFERENCE] * len(refs))


def count(bins: Any, values: Any, num_bins: int) -> None:
    """bins[v] += 1, in shared memory, for each of a vector of values below `num_bins`."""

    def emit(context: Any, bins: Value, values: Any) -> None:
        del context
        base = mosaic.address(bins, 32)
        for of_thread in mosaic.registers(values):
            value = llvm.extractelement(of_thread, mosaic.i32(0))
            address = arith.addi(base, arith.muli(value, mosaic.i32(4)))
            counted = mosaic.below(value, mosaic.i32(num_bins))
            mosaic.asm("@$1 red.shared.add.u32 [$0], 1;", "r,b", address, counted)

    layouts = [mosaic.REFERENCE, mosaic.strided(values.shape, 1)]
    mosaic.inline(emit, [bins, values], layouts)


def async_fence() -> None:
    """Makes what this thread has seen written visible to its bulk copies."""
    mosaic.inline(lambda context: mosaic.asm("fence.proxy.async;"), [], [])


def _rank(context: Any, axes: Sequence[tuple[int, int]]) -> Value:
    """This device's rank, along axes of (stride among the devices, size), the last one fastest."""
    rank = mosaic.i32(0)
    if axes:  # a kernel that asks for its device is a collective one
        device = mosaic.device_id(context)
    for stride, size in axes:
        along = arith.divui(device, mosaic.i32(stride))
        along = arith.remui(along, mosaic.i32(size))
        rank = arith.addi(arith.muli(rank, mosaic.i32(size)), along)
    return rank


def _pointer_of_lane(refs: Sequence[Value]) -> Value:
    """The address of the i-th reference in thread i, and of the first one in threads beyond."""
    thread = mosaic.lane()
    pointer = mosaic.pointer(refs[0])
    for i, ref in enumerate(refs[1:], 1):
        here = mosaic.equal(thread, mosaic.i32(i))
        pointer = arith.select(here, mosaic.pointer(ref), pointer)
    return pointer


def _global_timer() -> Value:
    return mosaic.asm("mov.u64 $0, %globaltimer;", "=l", returns=mosaic.integer_type(64))
