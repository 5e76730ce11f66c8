"""Wraps every private or unstable part of JAX and Mosaic that kernels use.

Pallas expresses most of a kernel. The rest is emitted as MLIR, by Python functions that `inline`
runs while the kernel is lowered. Such a function emits the code of one thread of a warpgroup. It
uses Python interfaces that JAX does not keep stable: MLIR's dialects, the registers of Mosaic's
arrays, thread numbers, and PTX. Functions of this module that take or return an MLIR value
(`Value`) or an array in registers (`Array`) may only be called within a function that `inline`
runs.

If the installed JAX lacks one of the required names, this module and the kernels can still be
imported. `unavailable_reason` then says what is missing, and a kernel that uses `inline` or
`remote_ref` raises NotImplementedError when it is traced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.hardware import WARP, WARPGROUP

# Maps a module of JAX to those of its names that this module and the kernels use.
_REQUIRED = {
    "jax.experimental.mosaic.gpu": (
        *("FragmentedArray.splat", "WGMMA_LAYOUT", "WGMMA_ROW_LAYOUT", "WGStridedFragLayout"),
    ),
    "jax.experimental.mosaic.gpu.launch_context": (
        *("LaunchContext.to_remote", "Scratch._find_alloc_load_and_device_ptr"),
        *("Scratch.finalize_size",),
    ),
    "jax.experimental.mosaic.gpu.utils": (
        "bitwidth",
        "dtype_to_ir_type",
        "getelementptr",
        "memref_ptr",
        "ptr_as_memref",
        "thread_idx",
        "warp_tree_reduce",
        "warpgroup_barrier",
    ),
    "jax.experimental.pallas": (
        *("cdiv", "ds", "multiple_of", "next_power_of_2", "run_scoped", "when"),
    ),
    "jax.experimental.pallas.mosaic_gpu": (
        *("ACC", "Barrier", "CompilerParams", "Layout.TILED", "Layout.WGMMA"),
        *("Layout.WGMMA_TRANSPOSED", "Layout.WG_SPLAT", "Layout.WG_STRIDED"),
        *("LoweringSemantics.Lane", "OOBFillMode.PROMISE_IN_BOUNDS", "RefType", "SMEM"),
        *("ShapeDtypeStruct", "SwizzleTransform", "Tiling", "TilingTransform", "barrier_arrive"),
        *("barrier_wait", "broadcasted_iota", "commit_smem", "commit_smem_to_gmem_group"),
        *("copy_gmem_to_smem", "copy_smem_to_gmem", "inline_mgpu", "kernel", "layout_cast"),
        *("load", "remote_ref", "set_max_registers", "wait_smem_to_gmem", "wgmma", "wgmma_wait"),
    ),
    "jaxlib.mlir.dialects.arith": (
        *("CmpIPredicate", "addf", "addi", "andi", "bitcast", "cmpi", "constant", "divui", "extf"),
        *("extui", "index_cast", "maximumf", "maxsi", "maxui", "minsi", "minui", "mulf", "muli"),
        *("ori", "remui", "select", "shli", "shrsi", "shrui", "subi", "truncf", "trunci", "xori"),
    ),
    "jaxlib.mlir.dialects.gpu": ("Dimension", "barrier", "block_id", "printf"),
    "jaxlib.mlir.dialects.llvm": (
        *("PointerType", "addrspacecast", "bitcast", "extractelement", "extractvalue"),
        *("ArrayType", "inline_asm", "intr_fma", "inttoptr", "load", "ptrtoint", "store"),
    ),
    "jaxlib.mlir.dialects.scf": ("ForOp", "IfOp", "WhileOp", "condition", "yield_"),
    "jaxlib.mlir.dialects.vector": ("bitcast", "extract", "from_elements", "insert"),
    "jaxlib.mlir.ir": (
        *("F32Type", "FloatAttr", "InsertionPoint", "IntegerType", "MemRefType"),
        *("StridedLayoutAttr", "StringAttr", "Type", "TypeAttr", "VectorType"),
    ),
    "jaxlib.mlir.passmanager": ("PassManager",),
}


def _module(path: str) -> Any:
    """Imports and returns the module at `path`, or returns None if the installed JAX lacks it."""
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


def _attribute(owner: Any, path: str) -> Any:
    """Returns the attribute of `owner` at a dotted path such as "a.b", or None if there is none."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for name in path.split("."):
            owner = getattr(owner, name, None)
    return owner


@functools.cache
def unavailable_reason() -> str | None:
    """Returns why the kernels cannot run with the installed JAX, or None if they can.

    The reason is a sentence that lists the names of `_REQUIRED` which JAX lacks.
    """
    missing = []
    for path, names in _REQUIRED.items():
        module = _module(path)
        if module is None:
            missing.append(path)
        else:
            missing += [f"{path}.{name}" for name in names if _attribute(module, name) is None]
    return f"JAX {jax.__version__} lacks {', '.join(missing)}" if missing else None


def _refuse_if_unavailable() -> None:
    if reason := unavailable_reason():
        raise NotImplementedError(f"the kernels need Mosaic, and {reason}.")


# The modules of JAX by which functions emit MLIR. If the installed JAX lacks a module, it is None
# here, and `inline` raises NotImplementedError.
mgpu = _module("jax.experimental.mosaic.gpu")
ir = _module("jaxlib.mlir.ir")
passmanager = _module("jaxlib.mlir.passmanager")
arith = _module("jaxlib.mlir.dialects.arith")
gpu = _module("jaxlib.mlir.dialects.gpu")
llvm = _module("jaxlib.mlir.dialects.llvm")
scf = _module("jaxlib.mlir.dialects.scf")
vector = _module("jaxlib.mlir.dialects.vector")


def _ask_ptxas_once() -> None:
    """Makes Mosaic ask the assembler `ptxas` for its version only once in this process.

    Otherwise, Mosaic starts the program `ptxas` whenever a kernel converts a bool to an integer.
    Every branch converts one: a kernel then starts `ptxas` about 100 times, for 7 ms each time.
    """
    bindings = getattr(_module("jax._src.lib.mosaic_gpu"), "_mosaic_gpu_ext", None)
    name = "_get_ptxas_isa_version"
    ask = getattr(bindings, name, None)
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(bindings, name, functools.cache(ask))


_ask_ptxas_once()

# An MLIR value.
Value = Any
# An array in the registers of a warpgroup while MLIR is emitted: Mosaic's FragmentedArray.
Array = Any

# What to pass to `inline` as the layout of an operand that is a reference or a scalar. For an array
# in registers, `strided` returns the layout.
REFERENCE = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())


def strided(shape: Sequence[int], elements: int) -> Any:
    """Returns a register layout of an array of this shape, which is divided into short vectors.

    A vector has `elements` neighbouring elements. Neighbouring threads of the warpgroup hold
    neighbouring vectors.
    """
    return plgpu.Layout.WG_STRIDED(tuple(shape), vec_size=elements)


def in_registers(shape: Sequence[int], dtype: Any, elements: int) -> Any:
    """Returns the type of a register array in the layout `strided`, to pass to `inline`."""
    return plgpu.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), layout=strided(shape, elements))


def inline(
    emit: Callable[..., Any], operands: Sequence[Any], layouts: Sequence[Any], returns: Any = None
) -> Any:
    """Inserts MLIR code into the kernel that is being traced.

    Args:
      emit: emits the MLIR code of one thread; it runs when JAX lowers the kernel. It takes a memref
        for each operand that is a reference, and a FragmentedArray for each array in registers. It
        returns arrays of the types in `returns`.
      operands: references, and arrays in registers.
      layouts: the layout of each operand: `REFERENCE` or another `plgpu.RefType`, `SCALAR`, one
        made by `strided`, `plgpu.Layout.WGMMA`, or `plgpu.Layout.WGMMA.reduce(1)`.
      returns: the type of the result, a list of types, or None if there is no result.

    Returns:
      An array in registers, a list of them, or None, as `returns` says.

    Raises:
      NotImplementedError: this JAX lacks a name that kernels need; the message names it.
    """
    _refuse_if_unavailable()

    def run(_: Any, *values: Any) -> Any:
        results = emit(*values)
        return None if returns is None else results

    return plgpu.inline_mgpu(arg_types=tuple(layouts), return_type=returns)(run)(*operands)


# ------------------------------------------------------------------------------------------ kernels

# The MLIR passes that run on a kernel before Mosaic compiles it. Mosaic's compiler begins with
# MLIR's canonicalizer, which visits a block from top to bottom and takes seconds for loops that
# carry hundreds of registers. The passes `_SIMPLIFY` run it earlier, from bottom to top, which
# takes hundredths of a second and leaves Mosaic's own run nothing to change. The pass
# `_FORGET_PLACES` strips source locations, so that otherwise equal kernels are compiled once.
_SIMPLIFY = "cse", "canonicalize{top-down=false}"
_FORGET_PLACES = "strip-debuginfo"
# This attribute of a kernel's MLIR module names the files to which Mosaic dumps the module. By
# default it contains a counter, so the modules of equal kernels differ.
_DUMP_NAME = "mosaic_gpu.dump_basename"


def kernel(
    body: Callable[..., None],
    *,
    interpret: Any = None,
    auto_barriers: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function of arrays that runs `body` as a kernel, as `plgpu.kernel` does.

    The kernel's MLIR is simplified before Mosaic compiles it. The compiler then takes less than
    half of the time, and compiles a kernel that is part of several programs only once.

    Args:
      body: the kernel's body. It takes references to the inputs and outputs, and scratch by name.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.
      auto_barriers: whether Pallas adds barriers around accesses of shared memory.
      options: further arguments of `plgpu.kernel`.
    """

    def run(*refs: Any, **scratch: Any) -> None:
        if not interpret:
            _simplify_once_lowered()
        body(*refs, **scratch)

    parameters = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=not auto_barriers
    )
    return plgpu.kernel(run, compiler_params=parameters, interpret=interpret, **options)


# An attribute of a kernel's MLIR module. Its value has no meaning to Mosaic, but Mosaic compiles
# modules with different values separately.
_LABEL = "mosaic_gpu.label"
# The value that modules lowered from now on get for the attribute `_LABEL`. None sets no attribute.
_label: str | None = None
_labels = map(str, itertools.count())


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Opens a context in which every kernel is compiled again, to measure compile times.

    Outside it, Mosaic compiles a kernel once in a process, even if JAX's caches are cleared.
    """
    global _label
    before, _label = _label, next(_labels)
    try:
        yield
    finally:
        _label = before


def _simplify_once_lowered() -> None:
    """Arranges that the MLIR module of the kernel being traced is simplified once it is complete.

    The last step of lowering a kernel is Mosaic's method `Scratch.finalize_size`, which emits host
    code that makes the descriptors of TMA copies. This function replaces the method, for this
    kernel only, by one that then also simplifies the module.
    """

    def run(context: Any) -> None:
        scratch, finish = context.scratch, context.scratch.finalize_size

        def finish_and_simplify() -> None:
            found = scratch.next_offset and scratch._find_alloc_load_and_device_ptr()
            finish()
            if found:
                allocation, load, _ = found
                _pack_descriptors(allocation, load, scratch.next_offset)
            _simplify(context.module)

        scratch.finalize_size = finish_and_simplify

    plgpu.inline_mgpu()(run)()


def _pack_descriptors(allocation: Any, load: Any, num_bytes: int) -> None:
    """Changes the type of a kernel's TMA descriptors from an array of bytes to one of 64-bit words.

    Code on the host copies the descriptors, which are an argument of the kernel, element by
    element. LLVM's time to compile the copies grows faster than the number of elements. Words are
    an eighth as many elements as bytes, so the copies compile faster.

    Args:
      allocation: the MLIR operation that allocates the descriptors.
      load: the MLIR operation that loads the descriptors as the argument.
      num_bytes: the bytes of all descriptors.
    """
    words = llvm.ArrayType.get(integer_type(64), num_bytes // 8)
    allocation.elem_type = ir.TypeAttr.get(words)
    load.result.set_type(words)


def _simplify(module: Any) -> None:
    """Simplifies a kernel's MLIR module, and makes the modules of equal kernels equal.

    Mosaic then compiles equal kernels once. To make modules equal, this function removes source
    locations, and the counter in the name of the module's dump files. It keeps both if an
    environment variable MOSAIC_GPU_DUMP_* makes Mosaic dump modules to files.
    """
    passes, attributes = list(_SIMPLIFY), module.operation.attributes
    if _label is not None:
        attributes[_LABEL] = ir.StringAttr.get(_label, module.context)
    if not any(name.startswith("MOSAIC_GPU_DUMP_") for name in os.environ):
        passes.append(_FORGET_PLACES)
        attributes[_DUMP_NAME] = attributes["sym_name"]
    pipeline = passmanager.PassManager.parse(f"builtin.module({','.join(passes)})", module.context)
    # Skip the verification after each pass: Mosaic verifies the module later.
    pipeline.enable_verifier(False)
    pipeline.run(module.operation)


# ------------------------------------------------------------------------- types and constants


def integer_type(bits: int) -> Any:
    return ir.IntegerType.get_signless(bits)


def float_type() -> Any:
    """Returns the MLIR type of float32."""
    return ir.F32Type.get()


def element_type(dtype: Any) -> Any:
    return mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))


def element_of(memref: Value) -> Any:
    """Returns the MLIR type of a memref's elements."""
    return ir.MemRefType(memref.type).element_type


def vector_type(length: int, element: Any) -> Any:
    return ir.VectorType.get((length,), element)


def struct_type(members: Sequence[Any]) -> Any:
    return ir.Type.parse(f"!llvm.struct<({', '.join(map(str, members))})>")


def width_of(memref: Value) -> int:
    """Returns the number of columns of a memref of a 2D array."""
    return ir.MemRefType(memref.type).shape[1]


def bytes_of(element: Any) -> int:
    """Returns the number of bytes of an element of an MLIR type."""
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
    return arith.constant(float_type(), ir.FloatAttr.get(float_type(), value))


def equal(a: Value, b: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def below(a: Value, b: Value) -> Value:
    """Emits the comparison a < b of unsigned integers, an i1."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


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
    """Emits the index of the thread in its block, i32.

    The value passes through inline PTX, so that LLVM cannot know that two calls give the same
    number. If it knew that two branches depend on one thread index, it could merge the branches and
    copy the code between them to both sides, including Mosaic's barriers, which it does not
    recognize. Threads of a warp would then wait at different barriers forever.
    """
    return asm("mov.b32 $0, $1;", "=r,r", mgpu.utils.thread_idx(), returns=integer_type(32))


def block() -> Value:
    """Emits the index of the thread's block along the grid's first dimension, i32."""
    return arith.index_cast(integer_type(32), gpu.block_id(gpu.Dimension.x))


def barrier() -> None:
    """Emits a barrier of all threads of the warpgroup."""
    mgpu.utils.warpgroup_barrier()


def block_barrier() -> None:
    """Emits a barrier of all threads of the block."""
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
    """Opens a context whose emitted code runs `count` times; yields the number of the turn, i32."""
    with loop(i32(0), i32(count), 1) as turn:
        yield turn


@contextlib.contextmanager
def loop(start: Value, end: Value, step: int) -> Iterator[Value]:
    """Opens a context whose emitted code runs for start, start + step and so on, below `end`.

    `start` and `end` are i32, compared as signed numbers, and may differ between threads. Yields
    the number for which the code runs.
    """
    numbers = scf.ForOp(start, end, i32(step))
    with ir.InsertionPoint(numbers.body):
        yield numbers.induction_variable
        scf.yield_([])


def unless(
    condition: Value, function: Callable[[], list[Value]], values: list[Value]
) -> list[Value]:
    """Emits a branch: yields `values` if `condition` is true, else the results of `function`.

    Args:
      condition: i1, for each thread. If it is true, the thread's results are `values`. Else the
        thread runs the code that `function` emits.
      function: emits code that computes results of the types of `values`, and returns them.
      values: values that exist before the branch.

    Returns:
      The thread's results.
    """
    branch = scf.IfOp(condition, [value.type for value in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(values)
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(function())
    return list(branch.results)


def asm(text: str, constraints: str = "", *operands: Value, returns: Any = None) -> Value:
    """Emits inline PTX that the compiler neither drops nor reorders with other inline PTX.

    Args:
      text: the PTX; $0, $1 and so on stand for the result, if there is one, and the operands.
      constraints: LLVM's constraints, comma-separated, for the result and the operands.
      operands: MLIR values.
      returns: the MLIR type of the result, or None if there is no result.

    Returns:
      The result.
    """
    return llvm.inline_asm(returns, list(operands), text, constraints, has_side_effects=True)


def chosen_bytes(low: Value, high: Value, selector: Value) -> Value:
    """Emits the choice of four of the 8 bytes of two words, as a word.

    The last four hexadecimal digits of `selector` are the indices of the bytes, the last digit that
    of the result's lowest byte. Bytes 0 to 3 are those of `low`, and 4 to 7 those of `high`.
    """
    text = "prmt.b32 $0, $1, $2, $3;"
    return llvm.inline_asm(integer_type(32), [low, high, selector], text, "=r,r,r,r")


def opaque(words: Sequence[Value]) -> list[Value]:
    """Emits nothing, but hides from the compiler that the results are the given 32-bit words.

    So code that computes something from the results stays behind this point, and behind the inline
    PTX before it. Such code may overwrite registers that tensor cores have read before a wait in
    PTX, of which LLVM does not know.
    """
    word = integer_type(32)
    found = llvm.inline_asm(
        struct_type([word] * len(words)),
        list(words),
        "",
        ",".join(["=r"] * len(words) + [str(i) for i in range(len(words))]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(word, found, [i]) for i in range(len(words))]


# ------------------------------------------------------------------------------------------- memory


def pointer(memref: Value) -> Value:
    """Emits a pointer to the first element of a memref."""
    return mgpu.utils.memref_ptr(memref)


def element_pointer(base: Value, index: Value, element: Any) -> Value:
    """Emits a pointer to element `index`, of MLIR type `element`, of an array at pointer `base`."""
    return mgpu.utils.getelementptr(base, [index], element)


def pointer_at(memref: Value, index: Value) -> Value:
    """Returns a pointer to element `index` of a memref, counted in row-major order."""
    return element_pointer(pointer(memref), index, element_of(memref))


def shared_pointer(address: Value) -> Value:
    """Emits the pointer to an address in shared memory, an i32 that `address` returned."""
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)


def address(memref: Value, bits: int = 64) -> Value:
    """Emits the address of a memref's first element as an integer of `bits` bits."""
    return llvm.ptrtoint(integer_type(bits), pointer(memref))


def element_at(memref: Value, index: Value) -> Value:
    """Emits a load of element `index` of a 1D memref; the index may differ between threads."""
    return llvm.load(element_of(memref), pointer_at(memref, index))


# ---------------------------------------------------------------------------------------- registers


def scalar(array: Array) -> Value:
    """Returns the MLIR value that a scalar array, of shape (), holds in its only register."""
    return array.registers.item()


def splat(value: Value, is_signed: bool | None = None) -> Array:
    """Returns a scalar array that holds an MLIR value; see `array_of` for `is_signed`."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=is_signed)


def registers(array: Array) -> list[Value]:
    """Returns one thread's registers of an array, as MLIR vectors.

    `array_of` takes them in the same order for the layout `strided`, `tensor_core_array` for the
    layout `plgpu.Layout.WGMMA`, and `tensor_core_rows` for `plgpu.Layout.WGMMA.reduce(1)`.
    """
    return list(array.registers.flat)


def placed_registers(array: Array) -> Iterator[tuple[Value, list[Value]]]:
    """Yields each of a thread's registers of an array with the indices (i32) of its first element.

    A register is a vector of neighbouring elements of a row.
    """
    places = array.layout.thread_idxs(array.shape)
    for index, place in zip(np.ndindex(array.registers.shape), places, strict=True):
        yield array.registers[index], [arith.index_cast(integer_type(32), i) for i in place]


def array_of(
    values: Sequence[Value], shape: Sequence[int], elements: int, is_signed: bool | None = None
) -> Array:
    """Returns an array in the layout `strided`, made of the MLIR vectors that one thread holds.

    Args:
      values: the thread's vectors, in order.
      shape: the array's shape.
      elements: the length of a vector.
      is_signed: whether integers are signed, or None for floats.
    """
    return mgpu.FragmentedArray(
        _registers=np.array(list(values), dtype=object),
        _layout=mgpu.WGStridedFragLayout(tuple(shape), elements),
        _is_signed=is_signed,
    )


def tensor_core_array(values: Sequence[Value], shape: Sequence[int], kind: Any) -> Array:
    """Returns a float array in the layout `plgpu.Layout.WGMMA`, made of one thread's MLIR vectors.

    Args:
      values: the thread's vectors of two neighbouring elements of a row: for each 64 rows, for each
        8 columns, for two of the warp's 16 rows. Thread t of a warp has rows t / 4 and t / 4 + 8.
      shape: the array's shape, [rows, columns].
      kind: the MLIR type of an element.
    """
    zero = arith.constant(kind, ir.FloatAttr.get(kind, 0.0))
    like = mgpu.FragmentedArray.splat(zero, tuple(shape), mgpu.WGMMA_LAYOUT)
    return mgpu.FragmentedArray(
        _registers=np.array(list(values), dtype=object).reshape(like.registers.shape),
        _layout=mgpu.WGMMA_LAYOUT,
        _is_signed=None,
    )


def tensor_core_rows(values: Sequence[Value], num_rows: int, kind: Any) -> Array:
    """Returns a float array in the layout `plgpu.Layout.WGMMA.reduce(1)`, a number for each row.

    Args:
      values: the numbers of one thread: for each 64 rows, those of two of the warp's 16 rows.
        Thread t of a warp has rows t / 4 and t / 4 + 8.
      num_rows: the array's length.
      kind: the MLIR type of an element.
    """
    zero = arith.constant(kind, ir.FloatAttr.get(kind, 0.0))
    like = mgpu.FragmentedArray.splat(zero, (num_rows,), mgpu.WGMMA_ROW_LAYOUT)
    one = vector_type(1, kind)
    vectors = [vector.from_elements(one, [value]) for value in values]
    return mgpu.FragmentedArray(
        _registers=np.array(vectors, dtype=object).reshape(like.registers.shape),
        _layout=mgpu.WGMMA_ROW_LAYOUT,
        _is_signed=None,
    )


def tensor_core_row() -> Value:
    """Emits the first of a thread's two rows, among 64, in the layout `plgpu.Layout.WGMMA`.

    The other row is 8 after it.
    """
    of_warp = arith.shrui(arith.andi(warpgroup_thread(), i32(WARP - 1)), i32(2))
    return arith.addi(arith.muli(arith.divui(warpgroup_thread(), i32(WARP)), i32(16)), of_warp)


def elementwise(function: Callable[..., Value], *arrays: Array) -> Array:
    """Applies a function elementwise to float arrays that have the same shape and register layout.

    `function` takes one element of each array, as MLIR values, and emits the element of the result.
    """
    out = np.empty_like(arrays[0].registers)
    for index in np.ndindex(out.shape):
        vectors = [array.registers[index] for array in arrays]
        total = vectors[0]
        for i in range(vector_length_of(total)):
            element = function(*(vector.extract(register, [], [i]) for register in vectors))
            total = vector.insert(element, total, [], [i])
        out[index] = total
    return mgpu.FragmentedArray(_registers=out, _layout=arrays[0].layout, _is_signed=None)


def warp_max(word: Value) -> Value:
    """Emits the maximum of `word` over the threads of a warp, as unsigned 32-bit integers.

    Every thread gets the maximum. All threads of the warp must execute this code.
    """
    text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def shuffle(word: Value, distance: int) -> Value:
    """Emits a butterfly shuffle: each thread gets the 32-bit `word` of another thread of its warp.

    The other thread's index in the warp is this thread's index XOR `distance`, a power of two.
    """
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def shuffle_up(word: Value, distance: int) -> Value:
    """Emits a shuffle: each thread gets the 32-bit `word` of the thread `distance` before it.

    The first `distance` threads of a warp get their own word.
    """
    text = f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def warp_total(word: Value) -> Value:
    """Emits the sum of `word` over the threads of a warp, as 32-bit integers.

    Every thread gets the sum. All threads of the warp must execute this code.
    """
    text = "redux.sync.add.s32 $0, $1, 0xffffffff;"
    return asm(text, "=r,r", word, returns=integer_type(32))


def warp_sum(value: Value, threads: int) -> Value:
    """Emits the float32 sum of `value` over adjacent threads of a warp.

    The warp is divided into groups of `threads` threads. Every thread gets the sum of its group.
    """
    return mgpu.utils.warp_tree_reduce(value, arith.addf, threads)


# ---------------------------------------------------------------------------------- memory of peers


def remote_ref(ref: Any, entry: jax.Array) -> Any:
    """Returns a reference to the memory of another rank that corresponds to this rank's `ref`.

    That memory begins at the address of `ref` plus an offset. The kernel has given `reach_peers` a
    table of offsets, and `entry`, an int32, is an index in this table. Without a mesh there is only
    one rank, and the result is `ref`.

    `plgpu.remote_ref` expects a device's mesh coordinates. This function passes `entry` as the
    coordinate along the last axis, and 0 along the others. Mosaic computes a device number from
    them, which equals `entry`, and passes it to the code of `reach_peers`.
    """
    _refuse_if_unavailable()
    axes = jax.sharding.get_abstract_mesh().axis_names
    if not axes:
        return ref
    return plgpu.remote_ref(ref, (*[jnp.int32(0)] * (len(axes) - 1), entry))


def reach_peers(table: Any, offset: Callable[[Value, Value], Value]) -> None:
    """Defines the memory to which `remote_ref(ref, entry)` refers in the kernel being traced.

    That memory begins at the address of `ref` plus an offset, which the kernel reads from a table
    at the index `entry`. So the kernel can choose the peer while it runs.

    Mosaic gets the address of a peer's buffer from its launch context, which by default asks XLA's
    collective metadata or NVSHMEM. JAX up to 0.12 has no public way to give Mosaic other addresses,
    so this function replaces the context's method `to_remote`.

    Args:
      table: a reference to the memory that holds the offsets.
      offset: called as `offset(memref, entry)` with the memref of `table`, emits code that loads
        the offset with the index `entry`. Returns the offset in bytes, a 64-bit value.
    """

    def run(context: Any, table: Value) -> None:
        def to_remote(ref: Value, peer: Value, *, on_host: bool = False) -> Value:
            if on_host:
                raise NotImplementedError("peers are reached only by copies of contiguous rows")
            kind = ir.MemRefType(ref.type)
            strides, _ = kind.get_strides_and_offset()
            # The layout has offset 0, since the pointer already includes the memref's offset.
            layout = ir.StridedLayoutAttr.get(0, strides)
            there = ir.MemRefType.get(kind.shape, kind.element_type, layout, kind.memory_space)
            place = arith.addi(address(ref), offset(table, peer))
            return mgpu.utils.ptr_as_memref(llvm.inttoptr(pointer(ref).type, place), there)

        context.to_remote = to_remote

    plgpu.inline_mgpu(arg_types=(REFERENCE,))(run)(table)
