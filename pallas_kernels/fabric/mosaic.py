"""Emits MLIR within a kernel, where Pallas does not express what is needed.

Python functions that `inline` runs while the kernel is lowered emit the code of one thread of a
warpgroup. Functions here that take or return an MLIR value (`Value`) or an array in registers
(`Array`) may only be called within such a function. No other module of kernels takes Mosaic's
arrays, layouts and launch context apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import requirements
from pallas_kernels.fabric.hardware import WARP, WARPGROUP

# A module that the installed JAX lacks is None here, and `compiler.kernel` raises
# NotImplementedError.
mgpu = requirements.module("jax.experimental.mosaic.gpu")
ir = requirements.module("jaxlib.mlir.ir")
arith = requirements.module("jaxlib.mlir.dialects.arith")
gpu = requirements.module("jaxlib.mlir.dialects.gpu")
llvm = requirements.module("jaxlib.mlir.dialects.llvm")
scf = requirements.module("jaxlib.mlir.dialects.scf")
vector = requirements.module("jaxlib.mlir.dialects.vector")

# An MLIR value.
Value = Any
# An array in the registers of a warpgroup while MLIR is emitted: Mosaic's FragmentedArray.
Array = Any

# Layouts of operands of `inline` that are references or scalars.
REFERENCE = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())
# The type of an int32 that `inline` returns.
INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def strided(shape: Sequence[int], elements: int) -> Any:
    """Returns the register layout in which neighbouring threads hold vectors of `elements`."""
    return plgpu.Layout.WG_STRIDED(tuple(shape), vec_size=elements)


def in_registers(shape: Sequence[int], dtype: Any, elements: int) -> Any:
    """Returns the type of a register array in the layout `strided`, to pass to `inline`."""
    return plgpu.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), layout=strided(shape, elements))


def inline(emit: Callable[..., Any], operands: Sequence[Any], returns: Any = None) -> Any:
    """Inserts MLIR code into the kernel that is being traced.

    Args:
      emit: emits the code of one thread when JAX lowers the kernel. Takes a memref for each
        reference and a FragmentedArray for each array in registers; returns arrays of the types in
        `returns`.
      operands: references, scalars, and pairs (array, layout), where the layout is one made by
        `strided`, `plgpu.Layout.WGMMA` or `plgpu.Layout.WGMMA.reduce(1)`, or (reference,
        `plgpu.RefType`).
      returns: the type of the result, a list of types, or None if there is no result.
    """

    def run(_context: Any, *values: Any) -> Any:
        results = emit(*values)
        return None if returns is None else results

    pairs = [
        each if isinstance(each, tuple) else (each, REFERENCE if each.shape else SCALAR)
        for each in operands
    ]
    layouts = tuple(layout for _, layout in pairs)
    insert = plgpu.inline_mgpu(arg_types=layouts, return_type=returns)(run)
    return insert(*(operand for operand, _ in pairs))


# ------------------------------------------------------------------------- types and constants


integer_type = ir.IntegerType.get_signless
float_type = ir.F32Type.get


def element_type(dtype: Any) -> Any:
    return mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))


def element_of(memref: Value) -> Any:
    return ir.MemRefType(memref.type).element_type


def vector_type(length: int, element: Any) -> Any:
    return ir.VectorType.get((length,), element)


def struct_type(members: Sequence[Any]) -> Any:
    return ir.Type.parse(f"!llvm.struct<({', '.join(map(str, members))})>")


def width_of(memref: Value) -> int:
    return ir.MemRefType(memref.type).shape[1]


def bytes_of(element: Any) -> int:
    return mgpu.utils.bitwidth(element) // 8


def vector_length_of(value: Value) -> int:
    return ir.VectorType(value.type).shape[0]


def i32(value: int) -> Value:
    """Emits a 32-bit constant from a Python integer from -2**31 to 2**32 - 1."""
    signed = value - 2**32 if value >= 2**31 else value
    return arith.constant(integer_type(32), signed)


def i64(value: int) -> Value:
    return arith.constant(integer_type(64), value)


def f32(value: float) -> Value:
    return arith.constant(float_type(), value)


# Here, a Python integer b stands for a constant of the type of a.


def add(a: Value, *others: Value | int) -> Value:
    for b in others:
        a = arith.addi(a, _like(a, b))
    return a


def mul(a: Value, b: Value | int) -> Value:
    return arith.muli(a, _like(a, b))


def divided(a: Value, b: Value | int) -> tuple[Value, Value]:
    """Emits the quotient and the rest of unsigned integers."""
    return arith.divui(a, _like(a, b)), arith.remui(a, _like(a, b))


def equal(a: Value, b: Value | int) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, _like(a, b))


def unequal(a: Value, b: Value | int) -> Value:
    return arith.cmpi(arith.CmpIPredicate.ne, a, _like(a, b))


def below(a: Value, b: Value | int) -> Value:
    """Emits the comparison a < b of unsigned integers, an i1."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, _like(a, b))


def _like(a: Value, b: Value | int) -> Value:
    if not isinstance(b, int):
        return b
    return i32(b) if a.type == integer_type(32) else arith.constant(a.type, b)


def within(number: Value, begin: Value, end: Value) -> Value:
    """Emits begin <= number < end for signed integers, as i1."""
    return arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, number, begin),
        arith.cmpi(arith.CmpIPredicate.slt, number, end),
    )


# ------------------------------------------------------------------------- threads and instructions


def warpgroup_thread() -> Value:
    """Emits the index of the thread in its warpgroup, i32 from 0 to WARPGROUP - 1."""
    return arith.remui(thread(), i32(WARPGROUP))


def thread() -> Value:
    """Emits the index of the thread in its block, i32."""
    # Inline PTX hides from LLVM that two calls give the same number. Otherwise LLVM could merge
    # two branches on the index and copy the code between them to both sides, with Mosaic's
    # barriers, which it does not recognize. Threads of a warp would wait at different barriers.
    return asm("mov.b32 $0, $1;", "=r,r", mgpu.utils.thread_idx(), returns=integer_type(32))


def block() -> Value:
    """Emits the index of the thread's block along the grid's first dimension, i32."""
    return arith.index_cast(integer_type(32), gpu.block_id(gpu.Dimension.x))


def barrier() -> None:
    """Emits a barrier of the threads of a warpgroup."""
    mgpu.utils.warpgroup_barrier()


def block_barrier() -> None:
    gpu.barrier()


@contextlib.contextmanager
def when(condition: Value) -> Iterator[None]:
    """Opens a context whose emitted code runs only in threads whose `condition` (i1) is true."""
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


@contextlib.contextmanager
def repeat(count: int) -> Iterator[Value]:
    """Opens a context whose emitted code runs `count` times; yields the iteration, i32."""
    with loop(i32(0), i32(count), 1) as turn:
        yield turn


@contextlib.contextmanager
def loop(start: Value, end: Value, step: int) -> Iterator[Value]:
    """Opens a context whose emitted code runs for start, start + step and so on, below `end`."""
    # i32 numbers, compared as signed ones, which may differ between threads.
    numbers = scf.ForOp(start, end, i32(step))
    with ir.InsertionPoint(numbers.body):
        yield numbers.induction_variable
        scf.yield_([])


def carried(
    count: int, function: Callable[[Value, list[Value]], list[Value]], values: Sequence[Value]
) -> list[Value]:
    """Emits a loop that replaces `values` by `function(i, values)` for i below `count`."""
    turns = scf.ForOp(i32(0), i32(count), i32(1), list(values))
    with ir.InsertionPoint(turns.body):
        scf.yield_(function(turns.induction_variable, list(turns.inner_iter_args)))
    return list(turns.results)


def unless(
    condition: Value, function: Callable[[], list[Value]], values: list[Value]
) -> list[Value]:
    """Emits a branch that skips the code of `function` in threads whose `condition` (i1) is true.

    Such a thread gets `values` instead, which have the types of the results of `function`.
    """
    return either(condition, lambda: values, function, [value.type for value in values])


def either(
    condition: Value,
    if_true: Callable[[], list[Value]],
    if_false: Callable[[], list[Value]],
    types: Sequence[Any],
) -> list[Value]:
    """Emits a branch on `condition` (i1) that returns the values of either function."""
    branch = scf.IfOp(condition, list(types), has_else=True)
    for block, function in ((branch.then_block, if_true), (branch.else_block, if_false)):
        with ir.InsertionPoint(block):
            scf.yield_(function())
    return list(branch.results)


def asm(text: str, constraints: str = "", *operands: Value, returns: Any = None) -> Value:
    """Emits inline PTX that the compiler neither drops nor reorders with other inline PTX.

    $0, $1 and so on stand for the result, if `returns` is its MLIR type, and the operands.
    `constraints` are LLVM's, comma-separated.
    """
    return llvm.inline_asm(returns, list(operands), text, constraints, has_side_effects=True)


def chosen_bytes(low: Value, high: Value, selector: Value) -> Value:
    """Emits `prmt`: a word of four of the 8 bytes of `low` (0 to 3) and `high` (4 to 7)."""
    # The last hexadecimal digit of `selector` is the index of the result's lowest byte.
    text = "prmt.b32 $0, $1, $2, $3;"
    return llvm.inline_asm(integer_type(32), [low, high, selector], text, "=r,r,r,r")


def opaque(words: Sequence[Value]) -> list[Value]:
    """Hides from the compiler that the results are the given 32-bit words; emits no instruction."""
    # The words are computed before, and code that uses the results stays behind, other inline PTX.
    # For example, LLVM does not know that tensor cores read registers until a wait for them.
    word = integer_type(32)
    # LLVM's constraint "i", for a number i, puts an operand in the register of result i.
    hidden = llvm.inline_asm(
        struct_type([word] * len(words)),
        list(words),
        "",
        ",".join(["=r"] * len(words) + [str(i) for i in range(len(words))]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, hidden, [i]) for i in range(len(words))]


def opaque_scalar(number: Any) -> Any:
    """Hides from the compiler what is known of an int32 in the kernel that is being traced."""
    return inline(lambda value: splat(opaque([scalar(value)])[0], is_signed=True), [number], INT32)


# ------------------------------------------------------------------------------------------- memory


def pointer(memref: Value) -> Value:
    return mgpu.utils.memref_ptr(memref)


def element_pointer(base: Value, index: Value, element: Any) -> Value:
    """Emits a pointer to element `index`, of MLIR type `element`, of an array at pointer `base`."""
    return mgpu.utils.getelementptr(base, [index], element)


def pointer_at(memref: Value, index: Value, element: Any = None) -> Value:
    """Emits a pointer to element `index` of a memref of `element`, in row-major order."""
    return element_pointer(pointer(memref), index, element or element_of(memref))


def shared_pointer(address: Value) -> Value:
    """Emits the pointer to an address in shared memory, an i32 that `address` returned."""
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)


def address(memref: Value, bits: int = 64) -> Value:
    """Emits a memref's address as an integer; of shared memory, 32 bits are enough."""
    return llvm.ptrtoint(integer_type(bits), pointer(memref))


def element_at(memref: Value, index: Value, element: Any = None) -> Value:
    """Emits a load from `pointer_at`; the index may differ between threads."""
    return llvm.load(element or element_of(memref), pointer_at(memref, index, element))


def load_numbers(pointer: Value, count: int, element: Any = None) -> list[Value]:
    """Emits a load of `count` adjacent numbers, by default words; they are aligned as a vector."""
    element = element or integer_type(32)
    of_all, alignment = vector_type(count, element), count * bytes_of(element)
    loaded = llvm.load(of_all, pointer, alignment=alignment)
    return [vector.extract(loaded, [], [i]) for i in range(count)]


def store_numbers(numbers: Sequence[Value], pointer: Value) -> None:
    """Emits a store of adjacent numbers; they are aligned as a vector."""
    element = numbers[0].type
    of_all = vector.from_elements(vector_type(len(numbers), element), list(numbers))
    llvm.store(of_all, pointer, alignment=len(numbers) * bytes_of(element))


def entry_of(values: Sequence[Value], index: Value) -> Value:
    """Emits values[index], or values[0] past the end; `index` may differ between threads."""
    value = values[0]
    for i, other in enumerate(values[1:], 1):
        value = arith.select(equal(index, i), other, value)
    return value


# --------------------------------------------------- words of shared memory and of any GPU's memory


def widen(value: Value) -> Value:
    return arith.extui(integer_type(64), value)


def narrow(value: Value) -> Value:
    return arith.trunci(integer_type(32), value)


def low_half(value: Value) -> Value:
    """Emits the lower 16 bits of an int32, as a signed number."""
    return arith.shrsi(arith.shli(value, i32(16)), i32(16))


def address_at(base: Value, offset: int, *terms: tuple[Value, int]) -> Value:
    """Emits the 64-bit address base + offset, plus index * size for each pair of `terms`."""
    address = add(base, offset)
    for index, size in terms:
        address = add(address, mul(widen(index), size))
    return address


def load_word(address: Value) -> Value:
    """Emits a relaxed, system-scope load of a 32-bit word from the memory of any GPU."""
    text = "ld.relaxed.sys.global.b32 $0, [$1];"
    return asm(text, "=r,l", address, returns=integer_type(32))


def store_word(address: Value, word: Value) -> None:
    asm("st.relaxed.sys.global.b32 [$0], $1;", "l,r", address, word)


def load64(address: Value) -> Value:
    text = "ld.relaxed.sys.global.b64 $0, [$1];"
    return asm(text, "=l,l,~{memory}", address, returns=integer_type(64))


def store64(address: Value, value: Value, *, release: bool = False) -> None:
    order = "release" if release else "relaxed"
    asm(f"st.{order}.sys.global.b64 [$0], $1;", "l,l,~{memory}", address, value)


def acquire() -> None:
    """Emits a fence: what peers wrote before words that this thread has read is visible after."""
    asm("fence.acquire.sys;", "~{memory}")


def load_shared64(address: Value) -> Value:
    text = "ld.shared.b64 $0, [$1];"
    return asm(text, "=l,r,~{memory}", address, returns=integer_type(64))


def store_shared64(address: Value, value: Value) -> None:
    asm("st.shared.b64 [$0], $1;", "r,l,~{memory}", address, value)


# ---------------------------------------------------------------------------------------- registers


def scalar(array: Array) -> Value:
    return array.registers.item()


def splat(value: Value, is_signed: bool | None = None) -> Array:
    """Returns an array of shape () of an MLIR value; see `array_of` for `is_signed`."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=is_signed)


def registers(array: Array) -> list[Value]:
    """Returns one thread's registers of an array, in the order of `array_of` and the like."""
    return list(array.registers.flat)


def placed_registers(array: Array) -> Iterator[tuple[Value, list[Value]]]:
    """Yields a thread's registers, each with the indices (i32) of its first element."""
    places = array.layout.thread_idxs(array.shape)
    for index, place in zip(np.ndindex(array.registers.shape), places, strict=True):
        yield array.registers[index], [arith.index_cast(integer_type(32), i) for i in place]


def array_of(
    values: Sequence[Value], shape: Sequence[int], elements: int, is_signed: bool | None = None
) -> Array:
    """Returns an array in the layout `strided`, made of one thread's MLIR vectors.

    `elements` is the length of a vector; `is_signed` is None for floats.
    """
    return mgpu.FragmentedArray(
        _registers=np.array(list(values), dtype=object),
        _layout=mgpu.WGStridedFragLayout(tuple(shape), elements),
        _is_signed=is_signed,
    )


def tensor_core_array(values: Sequence[Value], shape: Sequence[int], element: Any) -> Array:
    """Returns a float array in the layout `plgpu.Layout.WGMMA`, made of one thread's MLIR vectors.

    Each is of two neighbouring elements of a row. Their order: for each 64 rows, for each 8
    columns, for the thread's two of the warp's 16 rows. Thread t of a warp has rows t / 4 and
    t / 4 + 8. `element` is the elements' MLIR type.
    """
    return _array_in(mgpu.WGMMA_LAYOUT, values, shape, element)


def tensor_core_rows(values: Sequence[Value], num_rows: int, element: Any) -> Array:
    """Returns a float array in the layout `plgpu.Layout.WGMMA.reduce(1)`, a number for each row.

    `values` are those of two of the warp's 16 rows, for each 64 rows; see `tensor_core_array`.
    """
    of_one = vector_type(1, element)
    vectors = [vector.from_elements(of_one, [value]) for value in values]
    return _array_in(mgpu.WGMMA_ROW_LAYOUT, vectors, (num_rows,), element)


def _array_in(layout: Any, values: Sequence[Value], shape: Sequence[int], element: Any) -> Array:
    # Registers are arranged as those of `like`, an array of zeros in the same layout.
    zero = arith.constant(element, ir.FloatAttr.get(element, 0.0))
    like = mgpu.FragmentedArray.splat(zero, tuple(shape), layout)
    registers = np.array(list(values), dtype=object).reshape(like.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def tensor_core_row() -> Value:
    """Emits a thread's first row among 64 in the layout WGMMA; its second is 8 later."""
    of_warp = arith.shrui(arith.andi(warpgroup_thread(), i32(WARP - 1)), i32(2))
    return add(mul(arith.divui(warpgroup_thread(), i32(WARP)), 16), of_warp)


def elementwise(function: Callable[..., Value], *arrays: Array) -> Array:
    """Applies a function of MLIR values elementwise to float arrays of one shape and layout."""
    out = np.empty_like(arrays[0].registers)
    for index in np.ndindex(out.shape):
        vectors = [array.registers[index] for array in arrays]
        result = vectors[0]  # whose elements are all replaced
        for i in range(vector_length_of(result)):
            element = function(*[vector.extract(register, [], [i]) for register in vectors])
            result = vector.insert(element, result, [], [i])
        out[index] = result
    return mgpu.FragmentedArray(_registers=out, _layout=arrays[0].layout, _is_signed=None)


def warp_max(word: Value) -> Value:
    """Emits, in every thread of a warp, the maximum of all threads' unsigned 32-bit `word`."""
    text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def shuffle(word: Value, distance: int) -> Value:
    """Emits a butterfly shuffle: the 32-bit `word` of the thread of index XOR `distance`."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def shuffle_up(word: Value, distance: int) -> Value:
    """Emits a shuffle: the 32-bit `word` of the thread `distance` before; its own without one."""
    text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def warp_total(word: Value) -> Value:
    """Emits, in every thread of a warp, the sum of all threads' 32-bit `word`."""
    text = "redux.sync.add.s32 $0, $1, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def warp_sum(value: Value, threads: int) -> Value:
    """Emits, in every thread, the float32 sum over its group of `threads` adjacent threads."""
    return mgpu.utils.warp_tree_reduce(value, arith.addf, threads)


# -------------------------------------------------------------------------------- waiting for peers

# A polling loop reads the slow clock, to detect a timeout, only once in this many polls: a power of
# two, so that a mask selects them.
_POLLS_PER_CLOCK = 1024


def poll(
    ask: Callable[[], tuple[Value, list[Value]]],
    late: Callable[[Sequence[Value]], None],
    *,
    timeout_s: float,
    types: Sequence[Any] = (),
) -> list[Value]:
    """Emits a loop in which each thread polls memory until it has what it waits for, or times out.

    `ask` emits one poll; it returns whether the thread must poll again (i1), and the values that it
    read, of MLIR types `types`. `late` emits the code of a thread that has timed out, given the
    last values. Returns the last values.
    """
    i1, word = integer_type(1), integer_type(32)
    limit = i64(int(timeout_s * 1e9))
    start = global_timer()

    def in_time(polls: Value) -> Value:
        """Emits whether the thread may poll again, i1."""
        mask = i32(_POLLS_PER_CLOCK - 1)
        reads_clock = equal(arith.andi(polls, mask), mask)  # once in _POLLS_PER_CLOCK polls

        def compare() -> list[Value]:
            return [below(arith.subi(global_timer(), start), limit)]

        return either(reads_clock, compare, lambda: [arith.constant(i1, 1)], [i1])[0]

    # The loop carries the number of polls. Its results are that number, whether the thread must
    # still poll, and the last values.
    result_types = [word, i1, *types]
    polling = scf.WhileOp(result_types, [i32(0)])
    with ir.InsertionPoint.at_block_begin(polling.before.blocks.append(word)):
        (polls,) = polling.before.blocks[0].arguments
        pending, values = ask()
        more = arith.andi(pending, in_time(polls))
        scf.condition(more, [add(polls, 1), pending, *values])
    with ir.InsertionPoint.at_block_begin(polling.after.blocks.append(*result_types)):
        scf.yield_([polling.after.blocks[0].arguments[0]])
    _, pending, *values = polling.results
    with when(pending):
        late(values)
    return values


def give_up(what: str, timeout_s: float, rank: Value, peer: Value) -> None:
    """Emits a message and a trap: `rank` has waited for `peer` too long, in the wait `what`."""
    waited = f"waited over {timeout_s:g} s for"
    _trap(f"{what}: rank %d {waited} rank %d (block %d); giving up", rank, peer)


def refuse(what: str, rank: Value, peer: Value) -> None:
    """Emits a message and a trap: in kernel `what`, `rank` cannot access a buffer of `peer`."""
    _trap(
        f"{what}: rank %d cannot reach a buffer of rank %d (block %d), which is outside of the "
        "memory pool that its process shares: a constant of the program, or of another allocator",
        rank,
        peer,
    )


def _trap(text: str, rank: Value, peer: Value) -> None:
    gpu.printf(f"jax_ep: {text}.\n", rank, peer, block())
    asm("trap;")


def global_timer() -> Value:
    """Emits the GPU's clock in nanoseconds, i64."""
    return asm("mov.u64 $0, %globaltimer;", "=l", returns=integer_type(64))


# ---------------------------------------------------------------------------------- memory of peers


def remote_ref(ref: Any, entry: jax.Array) -> Any:
    """Returns the memory of another rank at the address of `ref` plus an offset; see `reach_peers`.

    `entry`, an int32, is the offset's index in the table of `reach_peers`. Without a mesh, this
    rank is the only one, and the result is `ref`.
    """
    axes = jax.sharding.get_abstract_mesh().axis_names
    if not axes:
        return ref
    # `plgpu.remote_ref` expects mesh coordinates. From these, Mosaic computes the device number
    # `entry`, and passes it to the code of `reach_peers`.
    return plgpu.remote_ref(ref, (*[jnp.int32(0)] * (len(axes) - 1), entry))


def reach_peers(table: Any, offset: Callable[[Value, Value], Value]) -> None:
    """Defines the memory to which `remote_ref(ref, entry)` refers in the kernel being traced.

    `offset(table, entry)` emits code that loads from `table`, a reference, the peer's address minus
    this rank's, in 64 bits.
    """

    # Mosaic gets a peer's address from its launch context, which asks XLA's collective metadata or
    # NVSHMEM. JAX up to 0.12 has no public way to give it other addresses.
    def run(context: Any, table: Value) -> None:
        def to_remote(ref: Value, peer: Value, *, on_host: bool = False) -> Value:
            """Returns `ref` at a peer; as `peer`, Mosaic passes the `entry` of `remote_ref`."""
            # Mosaic asks on the host where a copy needs a TMA descriptor, as one of tiles does.
            if on_host:
                raise NotImplementedError("peers are reached only by copies of contiguous rows")
            here = ir.MemRefType(ref.type)
            strides, _ = here.get_strides_and_offset()
            # The layout has offset 0, since the pointer already includes the memref's offset.
            layout = ir.StridedLayoutAttr.get(0, strides)
            there = ir.MemRefType.get(here.shape, here.element_type, layout, here.memory_space)
            place = add(address(ref), offset(table, peer))
            return mgpu.utils.ptr_as_memref(llvm.inttoptr(pointer(ref).type, place), there)

        context.to_remote = to_remote

    plgpu.inline_mgpu(arg_types=(REFERENCE,))(run)(table)
