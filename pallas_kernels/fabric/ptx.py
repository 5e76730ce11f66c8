"""Emits PTX where Pallas lacks an operation or is slow: barriers, polling, counting, fences.

All threads of a warpgroup execute the emitted code together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value, arith, gpu, ir, llvm, scf

# A polling loop reads the clock, to detect a timeout, only once in this many polls. The number must
# be a power of two.
_POLLS_PER_CLOCK = 1024


def barrier() -> None:
    """Waits until all threads of the warpgroup have reached this barrier."""
    mosaic.inline(lambda: mosaic.barrier(), [], [])


def poll(
    ask: Callable[[], tuple[Value, list[Value]]],
    late: Callable[[Sequence[Value]], None],
    *,
    timeout_s: float,
    types: Sequence[Any] = (),
) -> list[Value]:
    """Emits a loop in which each thread polls memory until it has what it waits for, or times out.

    Args:
      ask: emits one poll of a thread. Returns whether the thread must poll again (i1), and the
        values that it read.
      late: emits the code of a thread that has timed out. It takes the values of the last poll.
      timeout_s: the timeout in seconds.
      types: MLIR types of the values that `ask` returns.

    Returns:
      The values of the last poll.
    """
    i1, i32, i64 = (mosaic.integer_type(bits) for bits in (1, 32, 64))
    limit = arith.constant(i64, int(timeout_s * 1e9))
    start = _global_timer()

    def in_time(polls: Value) -> Value:
        """Emits whether the thread may go on polling after `polls` polls, i1.

        Reading the clock is slow, so only one in `_POLLS_PER_CLOCK` polls reads it. After the other
        polls the result is true.
        """
        often = mosaic.i32(_POLLS_PER_CLOCK - 1)
        now = mosaic.equal(arith.andi(polls, often), often)
        clock = scf.IfOp(now, [i1], has_else=True)
        with ir.InsertionPoint(clock.then_block):
            waited = arith.subi(_global_timer(), start)
            scf.yield_([mosaic.below(waited, limit)])
        with ir.InsertionPoint(clock.else_block):
            scf.yield_([arith.constant(i1, 1)])
        return clock.results[0]

    results = [i32, i1, *types]
    loop = scf.WhileOp(results, [arith.constant(i32, 0)])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append(i32)):
        (polls,) = loop.before.blocks[0].arguments
        pending, values = ask()
        more = arith.andi(pending, in_time(polls))
        scf.condition(more, [arith.addi(polls, mosaic.i32(1)), pending, *values])
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append(*results)):
        scf.yield_([loop.after.blocks[0].arguments[0]])
    _, pending, *values = loop.results
    with mosaic.when(pending):
        late(values)
    return values


def load_word(pointer: Value) -> Value:
    """Emits a relaxed, system-scope load of a 32-bit word from the memory of any GPU."""
    text = "ld.relaxed.sys.global.b32 $0, [$1];"
    return mosaic.asm(text, "=r,l", pointer, returns=mosaic.integer_type(32))


def give_up(what: str, timeout_s: float, rank: Value, peer: Value) -> None:
    """Emits code that aborts the program because `rank` has waited too long for `peer`.

    It prints a message, in which `what` names the wait, and traps.
    """
    waited = f"waited over {timeout_s:g} s for"
    _trap(f"{what}: rank %d {waited} rank %d (block %d); giving up", rank, peer)


def refuse(what: str, rank: Value, peer: Value) -> None:
    """Emits code that aborts the program because `rank` cannot access a buffer of `peer`.

    It prints a message, in which `what` is the kernel's name, and traps.
    """
    _trap(
        f"{what}: rank %d cannot reach a buffer of rank %d (block %d), which is outside of the "
        "memory pool that its process shares: a constant of the program, or of another allocator",
        rank,
        peer,
    )


def _trap(text: str, rank: Value, peer: Value) -> None:
    gpu.printf(f"jax_ep: {text}.\n", rank, peer, mosaic.block())
    mosaic.asm("trap;")


def pause(nanoseconds: Any) -> None:
    """Delays the warpgroup by `nanoseconds`. Tests use it to delay ranks by different times."""

    def emit(duration: Any) -> None:
        i64 = mosaic.integer_type(64)
        end = arith.addi(_global_timer(), arith.extui(i64, mosaic.scalar(duration)))
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            scf.condition(mosaic.below(_global_timer(), end), [])
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
            scf.yield_([])
        mosaic.barrier()

    mosaic.inline(emit, [jnp.asarray(nanoseconds, jnp.int32)], [mosaic.SCALAR])


def count(bins: Any, values: Any, num_bins: int) -> None:
    """Counts equal values: for each v in `values` adds 1 to bins[v], if 0 <= v < num_bins.

    `values` is [n] int32 in registers, and `bins` is int32 in shared memory.
    """

    def emit(bins: Value, values: Any) -> None:
        base = mosaic.address(bins, 32)
        for of_thread in mosaic.registers(values):
            value = llvm.extractelement(of_thread, mosaic.i32(0))
            address = arith.addi(base, arith.muli(value, mosaic.i32(4)))
            counted = mosaic.below(value, mosaic.i32(num_bins))
            mosaic.asm("@$1 red.shared.add.u32 [$0], 1;", "r,b", address, counted)

    layouts = [mosaic.REFERENCE, mosaic.strided(values.shape, 1)]
    mosaic.inline(emit, [bins, values], layouts)


def async_fence() -> None:
    """Emits a proxy fence, which orders this thread's next bulk copies (TMA) after earlier writes.

    Without the fence, a bulk copy may not see writes that the thread itself has already seen.
    """
    mosaic.inline(lambda: mosaic.asm("fence.proxy.async;"), [], [])


def _global_timer() -> Value:
    return mosaic.asm("mov.u64 $0, %globaltimer;", "=l", returns=mosaic.integer_type(64))
