"""The few instructions that Pallas has no fast name for, for a whole warpgroup at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

from pallas_kernels.fabric.plan import LANES

_POLLS_PER_CLOCK = 1024  # a power of two


def barrier() -> None:
    """All threads of the warpgroup come here before any goes on."""
    plgpu.inline_mgpu()(lambda ctx: mgpu.utils.warpgroup_barrier())()


def signal(semaphores: Sequence[Any], *, release: bool = True) -> None:
    """Adds one to each semaphore; whatever the warpgroup wrote before is visible to who sees it.

    One thread per semaphore: a release at system scope takes a microsecond, so they go at once.
    Without one, who sees the signal knows only that what this warpgroup has used is read.
    """

    def emit(ctx: Any, *refs: ir.Value) -> None:
        del ctx
        pointer = _pointer_of_lane(refs)
        mgpu.utils.warpgroup_barrier()
        llvm.inline_asm(
            None,
            [pointer, _below(lane(), len(refs))],
            f"@$1 red.{'release' if release else 'relaxed'}.sys.global.add.u32 [$0], 1;",
            "l,b,~{memory}",
            has_side_effects=True,
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(semaphores))(emit)(*semaphores)


def wait(
    semaphores: Sequence[Any],
    count: Any,
    *,
    timeout_s: float,
    what: str,
    axes: Sequence[tuple[int, int]] = (),
) -> None:
    """Waits until each semaphore has reached `count`; traps, with a message, after `timeout_s`.

    Semaphore i is awaited by thread i, so that the waits overlap; i stands for a rank in the
    message. Which rank waited is found out only then: `axes` are those that ranks are counted
    along, each by its stride among the devices and its size; none where there is one rank.
    """

    def emit(ctx: Any, target: Any, *refs: ir.Value) -> None:
        waiter, pointer = lane(), _pointer_of_lane(refs)
        target = target.registers.item()
        waits = _below(waiter, len(refs))

        def behind() -> tuple[ir.Value, list[ir.Value]]:
            seen = load_word(pointer)
            return arith.andi(waits, arith.cmpi(arith.CmpIPredicate.slt, seen, target)), []

        poll(
            behind,
            lambda _: give_up(what, timeout_s, _rank(ctx, axes), waiter),
            timeout_s=timeout_s,
        )
        llvm.inline_asm(None, [], "fence.acquire.sys;", "", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    splat = plgpu.Layout.WG_SPLAT(())
    plgpu.inline_mgpu(arg_types=(splat, *(plgpu.RefType(),) * len(semaphores)))(emit)(
        jnp.asarray(count, jnp.int32), *semaphores
    )


def poll(
    ask: Callable[[], tuple[ir.Value, list[ir.Value]]],
    late: Callable[[Sequence[ir.Value]], None],
    *,
    timeout_s: float,
    num_values: int = 0,
) -> list[ir.Value]:
    """Asks until there is nothing to wait for, thread by thread; what came with the last answer.

    Args:
      ask: emits a question: whether to wait on (i1), and `num_values` 32-bit values.
      late: emits what to do, given those, when `timeout_s` has passed.
    """
    i1, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (1, 32, 64))
    limit = arith.constant(i64, int(timeout_s * 1e9))
    start = _global_timer()

    def in_time(polls: ir.Value) -> ir.Value:
        """Asks the clock now and then: it is slow to answer."""
        often = arith.constant(i32, _POLLS_PER_CLOCK - 1)
        now = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(polls, often), often)
        clock = scf.IfOp(now, [i1], has_else=True)
        with ir.InsertionPoint(clock.then_block):
            waited = arith.subi(_global_timer(), start)
            scf.yield_([arith.cmpi(arith.CmpIPredicate.ult, waited, limit)])
        with ir.InsertionPoint(clock.else_block):
            scf.yield_([arith.constant(i1, 1)])
        return clock.results[0]

    types = [i32, i1, *[i32] * num_values]
    loop = scf.WhileOp(types, [arith.constant(i32, 0)])
    with ir.InsertionPoint.at_block_begin(loop.before.blocks.append(i32)):
        (polls,) = loop.before.blocks[0].arguments
        pending, values = ask()
        more = arith.andi(pending, in_time(polls))
        scf.condition(more, [arith.addi(polls, arith.constant(i32, 1)), pending, *values])
    with ir.InsertionPoint.at_block_begin(loop.after.blocks.append(*types)):
        scf.yield_([loop.after.blocks[0].arguments[0]])
    _, pending, *values = loop.results
    out_of_time = scf.IfOp(pending)
    with ir.InsertionPoint(out_of_time.then_block):
        late(values)
        scf.yield_([])
    return values


def load_word(pointer: ir.Value) -> ir.Value:
    """32 bits as they are in any GPU's memory by now."""
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(
        i32, [pointer], "ld.relaxed.sys.global.b32 $0, [$1];", "=r,l", has_side_effects=True
    )


def give_up(what: str, timeout_s: float, rank: ir.Value, peer: ir.Value) -> None:
    """Says who waited for whom, and traps."""
    i32 = ir.IntegerType.get_signless(32)
    gpu.printf(
        f"jax_ep: {what}: rank %d waited over {timeout_s:g} s for rank %d (block %d); giving up.\n",
        rank,
        peer,
        arith.index_cast(i32, gpu.block_id(gpu.Dimension.x)),
    )
    llvm.inline_asm(None, [], "trap;", "", has_side_effects=True)


def pause(nanoseconds: Any) -> None:
    """Makes the warpgroup sleep: for tests of what happens when ranks are out of step."""

    def emit(ctx: Any, duration: Any) -> None:
        del ctx
        i64 = ir.IntegerType.get_signless(64)
        end = arith.addi(_global_timer(), arith.extui(i64, duration.registers.item()))
        loop = scf.WhileOp([], [])
        with ir.InsertionPoint.at_block_begin(loop.before.blocks.append()):
            scf.condition(arith.cmpi(arith.CmpIPredicate.ult, _global_timer(), end), [])
        with ir.InsertionPoint.at_block_begin(loop.after.blocks.append()):
            scf.yield_([])
        mgpu.utils.warpgroup_barrier()

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))(emit)(
        jnp.asarray(nanoseconds, jnp.int32)
    )


def touch(refs: Sequence[Any]) -> None:
    """Works out the refs' addresses now: a peer's is read from memory, and then in the cache."""

    def emit(ctx: Any, *refs: ir.Value) -> None:
        del ctx
        i64 = ir.IntegerType.get_signless(64)
        addresses = [llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)) for ref in refs]
        # The assembler drops what nobody uses: here all of them decide on something impossible.
        llvm.inline_asm(
            None,
            [functools.reduce(arith.ori, addresses)],
            "{ .reg .pred p; setp.eq.u64 p, $0, 0; @p trap; }",
            "l",
            has_side_effects=True,
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(emit)(*refs)


def count(bins: Any, values: Any, num_bins: int) -> None:
    """bins[v] += 1, in shared memory, for each of a vector of values below `num_bins`."""

    def emit(ctx: Any, bins: ir.Value, values: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        base = llvm.ptrtoint(i32, mgpu.utils.memref_ptr(bins))
        for vector in values.registers.flat:
            value = llvm.extractelement(vector, arith.constant(i32, 0))
            address = arith.addi(base, arith.muli(value, arith.constant(i32, 4)))
            counted = arith.cmpi(arith.CmpIPredicate.ult, value, arith.constant(i32, num_bins))
            llvm.inline_asm(
                None,
                [address, counted],
                "@$1 red.shared.add.u32 [$0], 1;",
                "r,b",
                has_side_effects=True,
            )

    vectors = plgpu.Layout.WG_STRIDED(values.shape, vec_size=1)
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), vectors))(emit)(bins, values)


def async_fence() -> None:
    """What this thread has seen written, its bulk copies see too."""

    def emit(ctx: Any) -> None:
        del ctx
        llvm.inline_asm(None, [], "fence.proxy.async;", "", has_side_effects=True)

    plgpu.inline_mgpu()(emit)()


def lane() -> ir.Value:
    """The thread's number in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.remui(mgpu.utils.thread_idx(), arith.constant(i32, LANES))


def _below(value: ir.Value, count: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, value, arith.constant(value.type, count))


def _rank(ctx: Any, axes: Sequence[tuple[int, int]]) -> ir.Value:
    """This device's, along axes of (stride among the devices, size), the last one fastest."""
    i32 = ir.IntegerType.get_signless(32)
    rank = arith.constant(i32, 0)
    if axes:  # a kernel that asks for its device is a collective one
        device = ctx.device_id()
    for stride, size in axes:
        along = arith.divui(device, arith.constant(i32, stride))
        along = arith.remui(along, arith.constant(i32, size))
        rank = arith.addi(arith.muli(rank, arith.constant(i32, size)), along)
    return rank


def _pointer_of_lane(refs: Sequence[ir.Value]) -> ir.Value:
    thread = lane()
    pointer = mgpu.utils.memref_ptr(refs[0])
    for i, ref in enumerate(refs[1:], 1):
        here = arith.cmpi(arith.CmpIPredicate.eq, thread, arith.constant(thread.type, i))
        pointer = arith.select(here, mgpu.utils.memref_ptr(ref), pointer)
    return pointer


def _global_timer() -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return llvm.inline_asm(i64, [], "mov.u64 $0, %globaltimer;", "=l", has_side_effects=True)
