"""Wraps every private or unstable part of JAX and Mosaic that kernels use.

Pallas expresses most of a kernel. The rest is emitted as MLIR, by Python functions that `inline`
runs while the kernel is lowered. Such a function emits the code of one thread of a warpgroup. It
uses Python interfaces that JAX does not keep stable: MLIR's dialects, the registers of Mosaic's
arrays, thread numbers, and PTX. The functions of this module whose docstring starts with "Emits"
may only be called within a function that `inline` runs.

If the installed JAX lacks one of the required names, this module and the kernels can still be
imported. `unavailable_reason` then says what is missing, and a kernel that uses `inline` or
`remote_ref` raises NotImplementedError when it is traced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.hardware import LANES, WARP

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


# ------------------------------------------------------------------------- threads and instructions


def lane() -> Value:
    """Emits the index of the thread in its warpgroup, i32 from 0 to LANES - 1."""
    return arith.remui(thread(), i32(LANES))


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


def shared_pointer(address: Value) -> Value:
    """Emits the pointer to an address in shared memory, an i32 that `address` returned."""
    return llvm.inttoptr(ir.Type.parse("!llvm.ptr<3>"), address)


def address(memref: Value, bits: int = 64) -> Value:
    """Emits the address of a memref's first element as an integer of `bits` bits."""
    return llvm.ptrtoint(integer_type(bits), pointer(memref))


def element_at(memref: Value, index: Value) -> Value:
    """Emits a load of element `index` of a 1D memref; the index may differ between threads."""
    element = element_of(memref)
    return llvm.load(element, element_pointer(pointer(memref), index, element))


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
    of_warp = arith.shrui(arith.andi(lane(), i32(WARP - 1)), i32(2))
    return arith.addi(arith.muli(arith.divui(lane(), i32(WARP)), i32(16)), of_warp)


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


# ---------------------------------------------------------------------------- stores from registers


def store_rows(
    out: Any,
    values: jax.Array,
    top: jax.Array,
    left: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    layout: Any,
) -> None:
    """Stores rows [begin, end) of a tile of 16-bit floats from registers to global memory.

    No other row is written. Each thread stores its elements directly, without a detour through
    shared memory.

    Args:
      out: a reference to the 2D output.
      values: [rows, columns] in registers.
      top: the row of `out` for row 0 of `values`.
      left: the column of `out` for column 0 of `values`. The address of out[top, left] must be a
        multiple of the size of a thread's vectors.
      begin: the first row of `values` to store.
      end: the row after the last one to store.
      layout: the register layout of `values`. In it, each vector that a thread holds consists of
        neighbouring elements of a row.
    """

    def emit(out: Value, values: Array, *scalars: Array) -> None:
        top, left, begin, end = (scalar(number) for number in scalars)
        kind = ir.MemRefType(out.type)
        i32 = integer_type(32)
        width = i64(kind.shape[1])

        def wide(number: Value) -> Value:
            return arith.extui(integer_type(64), number)

        for index, place in zip(
            np.ndindex(values.registers.shape), values.layout.thread_idxs(values.shape), strict=True
        ):
            row, column = (arith.index_cast(i32, number) for number in place)
            inside = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, begin),
                arith.cmpi(arith.CmpIPredicate.slt, row, end),
            )
            first = arith.muli(wide(arith.addi(top, row)), width)
            offset = arith.addi(first, wide(arith.addi(left, column)))
            register = values.registers[index]
            count = vector_length_of(register) // 2
            words = vector.bitcast(vector_type(count, i32), register)
            places = ", ".join(f"${i + 2}" for i in range(count))
            asm(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0; "
                f"@p st.global{'' if count == 1 else f'.v{count}'}.b32 [$0], {{{places}}}; }}",
                "l" + ",r" * (1 + count),
                llvm.ptrtoint(
                    integer_type(64), element_pointer(pointer(out), offset, kind.element_type)
                ),
                arith.extui(i32, inside),
                *(vector.extract(words, [], [i]) for i in range(count)),
            )

    numbers = [top, left, begin, end]
    layouts = [REFERENCE, layout, *[SCALAR] * len(numbers)]
    inline(emit, [out, values, *numbers], layouts)


# Maps a float8 dtype to its name in PTX.
_FLOAT8 = {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2"}


def store_rows_through(
    room: Any,
    out: Any,
    values: jax.Array,
    top: jax.Array,
    left: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    interpreted: bool,
) -> None:
    """Stores rows [begin, end) of an array from registers to global memory, through shared memory.

    No other row is written. In registers, each thread has pieces of several rows. Each warp puts
    its 16 rows into shared memory, and reads them such that 8 threads store 128 bytes of a row. The
    warps need not wait for each other. All threads of a warp must reach the call, even if `begin`
    and `end` exclude some of the warp's rows.

    Args:
      room: a reference to [64, columns] in shared memory, of `out`'s dtype. A row has 128 bytes.
      out: a reference to the 2D output in global memory.
      values: [64, columns] in the layout `plgpu.Layout.WGMMA`, of `out`'s dtype, or float32 if
        `out` is float8.
      top: the row of `out` for row 0 of `values`.
      left: the column of `out` for column 0 of `values`. The address of every stored row,
        out[top + i, left], must be a multiple of 16; so must the bytes of a row of `out`.
      begin: the first row of `values` to store.
      end: the row after the last one to store.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
    """
    num_rows, columns = values.shape
    size = jnp.dtype(out.dtype).itemsize
    assert num_rows == 64 and columns * size == 128, (values.shape, out.dtype)
    if interpreted:
        room[...] = values.astype(room.dtype)
        whole = (begin <= 0) & (end >= num_rows)

        @pl.when(whole)
        def _():
            out[pl.ds(top, num_rows), pl.ds(left, columns)] = room[...]

        def one_row(row, _):
            @pl.when((row >= begin) & (row < end))
            def _():
                out[top + row, pl.ds(left, columns)] = room[row]

        pl.when(~whole)(lambda: lax.fori_loop(0, num_rows, one_row, None))
        return
    out_dtype = out.dtype

    def emit(room: Value, out: Value, values: Array, *scalars: Array) -> None:
        top, left, begin, end = (scalar(number) for number in scalars)
        byte, word, wide = (integer_type(bits) for bits in (8, 32, 64))
        line = vector_type(4, word)

        def in_room(row: Value, column: Value) -> Value:
            # The row's units of 16 bytes are swizzled, so that the threads of a warp access
            # different banks of shared memory.
            unit = arith.xori(arith.shrui(column, i32(4)), arith.andi(row, i32(7)))
            offset = arith.ori(arith.shli(unit, i32(4)), arith.andi(column, i32(15)))
            offset = arith.addi(arith.muli(row, i32(128)), offset)
            return element_pointer(pointer(room), offset, byte)

        for index, place in zip(
            np.ndindex(values.registers.shape), values.layout.thread_idxs(values.shape), strict=True
        ):
            row, column = (arith.index_cast(word, number) for number in place)
            pair = values.registers[index]
            if size == 1:
                numbers = [vector.extract(pair, [], [i]) for i in range(2)]
                text = f"cvt.rn.satfinite.{_FLOAT8[jnp.dtype(out_dtype)]}x2.f32 $0, $2, $1;"
                pair = asm(text, "=h,f,f", *numbers, returns=integer_type(16))
            at = in_room(row, arith.muli(column, i32(size)))
            llvm.store(pair, at, alignment=2 * size)
        asm("bar.warp.sync 0xffffffff;", "~{memory}")

        # A warp copies four rows at a time, and a thread 16 bytes of one of them. All copies are
        # loaded before the first is stored, and no branch is in between, so that a warp waits once.
        number = lane()
        first = arith.shli(arith.shrui(number, i32(5)), i32(4))
        first = arith.addi(first, arith.andi(arith.shrui(number, i32(3)), i32(3)))
        column = arith.shli(arith.andi(number, i32(7)), i32(4))
        stride = ir.MemRefType(out.type).shape[1] * size
        offset = arith.muli(arith.extui(wide, arith.addi(top, first)), i64(stride))
        left_bytes = arith.addi(arith.muli(left, i32(size)), column)
        start = arith.addi(offset, arith.extui(wide, left_bytes))
        start = llvm.ptrtoint(wide, element_pointer(pointer(out), start, byte))
        rows = [arith.addi(first, i32(i)) for i in range(0, 16, 4)]
        lines = [llvm.load(line, in_room(row, column), alignment=16) for row in rows]
        for i, (row, loaded) in enumerate(zip(rows, lines, strict=True)):
            inside = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, row, begin),
                arith.cmpi(arith.CmpIPredicate.slt, row, end),
            )
            asm(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0;"
                " @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }",
                "l,r,r,r,r,r",
                arith.addi(start, i64(4 * i * stride)),
                arith.extui(word, inside),
                *(vector.extract(loaded, [], [j]) for j in range(4)),
            )
        asm("bar.warp.sync 0xffffffff;", "~{memory}")

    numbers = [top, left, begin, end]
    layouts = [REFERENCE, REFERENCE, plgpu.Layout.WGMMA, *[SCALAR] * len(numbers)]
    inline(emit, [room, out, values, *numbers], layouts)


def store_column(
    out: Any,
    values: jax.Array,
    top: jax.Array,
    column: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    to_row: bool = False,
    interpreted: bool,
) -> None:
    """Stores elements [begin, end) of a float32 vector in registers to a column of an array.

    For begin <= i < end, values[i] is stored to out[top + i, column]. Nothing else is written.

    Args:
      out: a reference to the 2D float32 output.
      values: [rows] float32 in registers, in the layout of a row reduction of WGMMA accumulators,
        `plgpu.Layout.WGMMA.reduce(1)`.
      top: the row of `out` for element 0 of `values`.
      column: the column of `out`.
      begin: the first element to store.
      end: the element after the last one to store.
      to_row: whether `out` is the transpose of such an array, so that the elements are stored to
        row `column`, from column `top` on.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
    """
    if interpreted:

        def store(i: Any, _: Any) -> None:
            @pl.when((i >= begin) & (i < end))
            def _() -> None:
                out[(column, top + i) if to_row else (top + i, column)] = values[i]

        jax.lax.fori_loop(0, values.shape[0], store, None)
        return

    def emit(out: Value, values: Array, *scalars: Array) -> None:
        top, column, begin, end = (scalar(number) for number in scalars)
        kind = ir.MemRefType(out.type)
        # Each element is held by four neighbouring threads. The first of them stores it.
        is_first = equal(arith.andi(lane(), i32(3)), i32(0))
        for index, place in zip(
            np.ndindex(values.registers.shape), values.layout.thread_idxs(values.shape), strict=True
        ):
            row = arith.index_cast(integer_type(32), place[0])
            inside = arith.andi(
                is_first,
                arith.andi(
                    arith.cmpi(arith.CmpIPredicate.sge, row, begin),
                    arith.cmpi(arith.CmpIPredicate.slt, row, end),
                ),
            )
            first, second = arith.addi(top, row), column
            if to_row:
                first, second = second, first
            offset = arith.addi(arith.muli(first, i32(kind.shape[1])), second)
            with when(inside):
                llvm.store(
                    vector.extract(values.registers[index], [], [0]),
                    element_pointer(pointer(out), offset, kind.element_type),
                )

    numbers = [top, column, begin, end]
    layouts = [REFERENCE, plgpu.Layout.WGMMA.reduce(1), *[SCALAR] * len(numbers)]
    inline(emit, [out, values, *numbers], layouts)


def load_column(ref: Any, first: jax.Array, count: int, last: int) -> jax.Array:
    """Loads floats from global memory, a number for each row of an array of the tensor cores.

    Args:
      ref: [N], a reference to global memory that the kernel does not write.
      first: the index of the first number.
      count: the number of numbers, a multiple of 64.
      last: the largest index; numbers past it are those at this index.

    Returns:
      [count] float32, in the layout `plgpu.Layout.WGMMA.reduce(1)`.
    """

    def emit(ref: Value, first: Array) -> Array:
        kind, own, values = element_of(ref), tensor_core_row(), []
        for tile in range(0, count, 64):
            for half in (0, 8):
                index = arith.addi(arith.addi(scalar(first), own), i32(tile + half))
                place = element_pointer(pointer(ref), arith.minui(index, i32(last)), kind)
                value = llvm.load(kind, place)
                is_wide = kind == float_type()
                values.append(value if is_wide else arith.extf(float_type(), value))
        return tensor_core_rows(values, count, float_type())

    result = plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1))
    return inline(emit, [ref, first], [REFERENCE, SCALAR], result)


def store_transposed(ref: Any, values: jax.Array) -> None:
    """Stores the transpose of an array [columns, rows] in registers to shared memory.

    The array has 16-bit floats, in the layout `plgpu.Layout.WGMMA` of tensor core accumulators.
    `ref` is [rows, columns], with a 128-byte swizzle.
    """
    ref.transpose((1, 0))[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)


def zero_rows_outside(
    ref: Any, begin: jax.Array, end: jax.Array, transforms: Sequence[Any]
) -> None:
    """Zeroes all rows of a tile in shared memory but the rows [begin, end).

    `ref` is the tile, [rows, columns] of 16-bit floats. `transforms` are its Mosaic transforms: it
    is stored as blocks of 8 rows of 128 bytes, with a 128-byte swizzle. The swizzle only permutes
    pieces of 16 bytes within a row of a block. The function zeroes whole rows, so it can ignore the
    swizzle.
    """
    rows, columns = ref.shape
    # A block is 8 rows by 64 columns (128 bytes). Each 8 rows of `ref` are stored as `blocks`
    # blocks, from left to right. A row of `ref` is cut into pieces of 16 bytes: 8 in each of these
    # blocks, `pieces` in total.
    blocks = columns // 64
    pieces = 8 * blocks
    begin = jnp.clip(begin, 0, rows)
    end = jnp.clip(end, begin, rows)

    def emit(ref: Value, first: Array, *scalars: Array) -> None:
        begin, end, count = (scalar(number) for number in scalars)
        index = arith.addi(scalar(first), lane())
        row = arith.divui(index, i32(pieces))
        piece = arith.remui(index, i32(pieces))
        before = below(row, begin)
        row = arith.select(before, row, arith.addi(row, arith.subi(end, begin)))
        block = arith.addi(
            arith.muli(arith.divui(row, i32(8)), i32(blocks)), arith.divui(piece, i32(8))
        )
        offset = arith.addi(
            arith.muli(block, i32(1024)),
            arith.addi(
                arith.muli(arith.remui(row, i32(8)), i32(128)),
                arith.muli(arith.remui(piece, i32(8)), i32(16)),
            ),
        )
        asm(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.v4.b32 [$0], {$2, $2, $2, $2}; }",
            "r,r,r",
            arith.addi(address(ref, 32), offset),
            arith.extui(integer_type(32), below(index, count)),
            i32(0),
        )

    count = (rows - (end - begin)) * pieces

    def step(i: jax.Array, _: None) -> None:
        numbers = [i * LANES, begin, end, count]
        layouts = [plgpu.RefType(tuple(transforms)), *[SCALAR] * len(numbers)]
        inline(emit, [ref, *numbers], layouts)

    lax.fori_loop(0, lax.div(count + (LANES - 1), jnp.int32(LANES)), step, None)


def write_registers(room: Any, values: jax.Array) -> None:
    """Writes each thread's registers of an array to shared memory, for `read_registers`.

    Waits until all threads of the warpgroup have done so.

    The array is [64, columns] of 16-bit floats in the layout `plgpu.Layout.WGMMA`. `room` is a
    reference to shared memory of the same shape and dtype, in which elements get another order.
    """

    def emit(room: Value, values: Array) -> None:
        word = integer_type(32)
        words = [
            vector.extract(vector.bitcast(vector_type(1, word), pair), [], [0])
            for pair in registers(values)
        ]
        for first, count, place in _own_words(room, len(words)):
            several = vector.from_elements(vector_type(count, word), words[first : first + count])
            llvm.store(several, place, alignment=4 * count)
        asm("", "~{memory}")
        barrier()

    inline(emit, [room, values], [REFERENCE, plgpu.Layout.WGMMA])


def read_registers(room: Any) -> jax.Array:
    """Returns the array that another warpgroup has written to `room` by `write_registers`.

    Waits until all threads of the warpgroup have read it. A thread reads the places to which it
    would write, so the warpgroup may then write to `room`.
    """
    shape, dtype = room.shape, jnp.dtype(room.dtype)

    def emit(room: Value) -> Array:
        word, kind = integer_type(32), element_of(room)
        words: list[Value] = []
        asm("", "~{memory}")
        for _, count, place in _own_words(room, shape[0] * shape[1] // (2 * LANES)):
            several = llvm.load(vector_type(count, word), place, alignment=4 * count)
            words += [vector.extract(several, [], [i]) for i in range(count)]
        # The words must have arrived before the barrier.
        words = opaque(words)
        barrier()
        of_two, one = vector_type(2, kind), vector_type(1, word)
        pairs = [vector.bitcast(of_two, vector.from_elements(one, [each])) for each in words]
        return tensor_core_array(pairs, shape, kind)

    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)
    return inline(emit, [room], [REFERENCE], result)


def _own_words(room: Value, num_words: int) -> Iterator[tuple[int, int, Value]]:
    """Emits pointers to a thread's `num_words` words in shared memory, for up to 4 words each.

    Neighbouring threads have neighbouring places, so that a warp accesses all banks.

    Yields:
      (first, count, pointer): `pointer` is the place of the words `first` to `first` + `count` - 1.
    """
    count = math.gcd(num_words, 4)
    for first in range(0, num_words, count):
        own = arith.addi(arith.muli(lane(), i32(count)), i32(first * LANES))
        yield first, count, element_pointer(pointer(room), own, integer_type(32))


# ----------------------------------------------------------------------------------- tensor cores


def add_warp_product(
    left: Sequence[Value], right: Sequence[Value], sums: Sequence[Value], dtype: Any
) -> list[Value]:
    """Multiplies 16 rows by 8 columns, 16 numbers each, and adds the products to sums.

    All threads of a warp execute the instruction, which is complete when it returns. A thread's
    places are in PTX ISA, "Matrix fragments for mma.m16n8k16".

    Args:
      left: a thread's four words of the rows, with two numbers in each.
      right: a thread's two words of the columns, with two numbers in each.
      sums: a thread's four sums, float32.
      dtype: the dtype of the numbers, bfloat16 or float16.
    """
    f32, kind = float_type(), {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}
    of_dtype = kind[jnp.dtype(dtype)]
    found = llvm.inline_asm(
        struct_type([f32] * 4),
        [*left, *right, *sums],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{of_dtype}.{of_dtype}.f32 {{$0, $1, $2, $3}}, "
        "{$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
    )
    return [llvm.extractvalue(f32, found, [i]) for i in range(4)]


def add_float8_products(
    totals: Sequence[jax.Array],
    left: Any,
    right: Any,
    stage: jax.Array,
    row: Any,
    first: Any,
    count: Any,
    row_scales: jax.Array | None,
    block_scales: Sequence[Any],
    *,
    interpreted: bool,
) -> tuple[jax.Array, ...]:
    """Multiplies 64 rows of a float8 tile by other tiles, and adds the scaled products to totals.

    A *block* is the transpose of 128 rows of `right`. The rows are multiplied by one block after
    the other. The tensor cores compute a product, this function waits until it is complete, and
    each thread then multiplies its elements of the product by their scales and adds them.

    All of this is one piece of PTX, in which all products use the same registers. If LLVM saw the
    products as values, ptxas would assign registers of its own to each, and spill the totals.

    Args:
      totals: for each block, [64, 128] float32, in the layout `plgpu.Layout.WGMMA`.
      left: [stages, rows, 128] float8 in shared memory, in swizzled tiles of 8 rows of 128 bytes.
      right: [stages, 128 * blocks, 128] float8 in shared memory, swizzled like `left`.
      stage: the index of the stage to multiply.
      row: the first of the 64 rows of left[stage], a multiple of 8.
      first: the index of the first block of right[stage] to multiply.
      count: the number of blocks to multiply, from 1 to the number of `totals`.
      row_scales: [64] float32, the scales of the rows, in the layout
        `plgpu.Layout.WGMMA.reduce(1)`; None if they are 1.
      block_scales: for each of the totals, the scale of the block that is multiplied for it.
      interpreted: whether Pallas' GPU interpreter runs the kernel.

    Returns:
      The new totals. totals[i] grew by left[stage, row : row + 64] @ block[first + i] times the
      scales of rows and block, if i < count.
    """
    columns = 128
    if interpreted:
        rows = left[stage, pl.ds(row, 64)].astype(jnp.float32)
        of_rows = 1.0 if row_scales is None else row_scales[:, None]
        sums = []
        for i, (total, scale) in enumerate(zip(totals, block_scales, strict=True)):
            block = jnp.minimum(first + i, right.shape[1] // columns - 1)
            matrix = right[stage, pl.ds(block * columns, columns)].astype(jnp.float32)
            product = jnp.dot(rows, matrix.T)
            sums.append(jnp.where(i < count, product * (of_rows * scale) + total, total))
        return tuple(sums)

    kinds = [_FLOAT8[jnp.dtype(ref.dtype)] for ref in (left, right)]
    # The numbers of registers in which a thread holds one product, and all totals.
    per_product, num = 64 * columns // LANES, len(totals)
    num_totals = num * per_product

    def emit(left_ref: Value, right_ref: Value, *arrays: Array) -> list[Array]:
        offsets, count, arrays = arrays[:2], scalar(arrays[2]), arrays[3:]
        sums, of_blocks = arrays[:num], [scalar(scale) for scale in arrays[num : 2 * num]]
        wide = integer_type(64)
        # A thread holds elements of two rows.
        of_rows = [None, None]
        if row_scales is not None:
            of_rows = [vector.extract(each, [], [0]) for each in registers(arrays[2 * num])]

        def descriptor(ref: Value, offset: Array) -> Value:
            place = arith.addi(arith.trunci(integer_type(32), address(ref)), scalar(offset))
            start = arith.shrui(arith.andi(place, i32(0x3FFFF)), i32(4))
            # The descriptor by which PTX's instruction wgmma finds an operand in shared memory. It
            # says that tiles of 8 rows are 1024 bytes apart, with a 128-byte swizzle.
            return arith.ori(arith.extui(wide, start), i64(1 << 62 | 64 << 32 | 1 << 16))

        factors = [
            scale if of_row is None else arith.mulf(of_row, scale)
            for scale in of_blocks
            for of_row in of_rows
        ]
        operands = [descriptor(left_ref, offsets[0]), descriptor(right_ref, offsets[1])]
        operands += [count, *factors]
        # In the text, $0, $1 and so on are the new totals, then the old ones, then the operands.
        of_operand = [f"${2 * num_totals + i}" for i in range(len(operands))]
        names = "{" + ",".join(f"c{i}" for i in range(per_product)) + "}"
        text = [
            "{",
            f".reg .f32 c<{per_product}>; .reg .b64 a, b; .reg .pred nothing, more, past;",
            "setp.ne.b32 nothing, 0, 0; setp.eq.b32 more, 0, 0;",
        ]
        for block in range(num):
            if block:
                text.append(f"setp.le.s32 past, {of_operand[2]}, {block}; @past bra.uni done;")
            text.append(f"mov.b64 a, {of_operand[0]};")
            # Tiles of 128 rows of 128 bytes follow each other. A descriptor counts 16 bytes.
            text.append(f"add.s64 b, {of_operand[1]}, {block * columns * 128 // 16};")
            text.append("wgmma.fence.sync.aligned;")
            # An element of the product is a sum over 128 columns. An instruction sums over 32 of
            # them, so 4 instructions are needed. The first one adds to nothing.
            for i in range(4):
                text.append(
                    f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.{kinds[0]}.{kinds[1]} "
                    f"{names}, a, b, {'more' if i else 'nothing'}, 1, 1;"
                )
                if i < 3:
                    text.append("add.s64 a, a, 2; add.s64 b, b, 2;")
            text.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
            for i in range(per_product):
                total = f"${block * per_product + i}"
                # Of four neighbouring numbers, two belong to each of the thread's two rows.
                factor = of_operand[3 + 2 * block + i // 2 % 2]
                text.append(f"fma.rn.f32 {total}, c{i}, {factor}, {total};")
        text.append("done: }")
        inputs = [
            vector.extract(register, [], [i])
            for total in sums
            for register in registers(total)
            for i in range(2)
        ]
        constraints = (
            *["=f"] * num_totals,
            *map(str, range(num_totals)),
            *["l", "l", "r"],
            *["f"] * len(factors),
        )
        added = llvm.inline_asm(
            struct_type([float_type()] * num_totals),
            [*inputs, *operands],
            " ".join(text),
            ",".join(constraints),
            asm_dialect=0,
            has_side_effects=True,
        )
        values = [llvm.extractvalue(float_type(), added, [i]) for i in range(num_totals)]
        pairs = [
            vector.from_elements(vector_type(2, float_type()), values[i : i + 2])
            for i in range(0, num_totals, 2)
        ]
        num_pairs = per_product // 2
        return [
            tensor_core_array(pairs[i : i + num_pairs], (64, columns), float_type())
            for i in range(0, num * num_pairs, num_pairs)
        ]

    offsets = [
        jnp.int32(stage * (ref.shape[1] * 128) + begin * 128)
        for ref, begin in ((left, row), (right, first * columns))
    ]
    tile = plgpu.RefType((plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128)))
    layout = plgpu.Layout.WGMMA
    operands = [left, right, *offsets, jnp.int32(count), *totals, *block_scales]
    layouts = [tile, tile, *[SCALAR] * 3, *[layout] * num, *[SCALAR] * num]
    if row_scales is not None:
        operands.append(row_scales)
        layouts.append(layout.reduce(1))
    result = plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=layout)
    return tuple(inline(emit, operands, layouts, [result] * num))
