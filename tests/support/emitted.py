"""Runs the code that kernels emit for one thread on a CPU, in NumPy, to test it without a GPU.

Some kernels emit their code operation by operation, which Pallas' interpreter cannot run. Here
these operations compute at once, for all threads of a thread block together. A value is an array
[threads, turns], or one that broadcasts to it; in `mosaic.repeat` and `mosaic.loop`, all turns are
computed together. So a turn must not read what another turn writes.

Loads and stores must be aligned and within their array. Two warps must not access the same word of
shared memory, one of them by a store, without a barrier in between, and two threads must not store
different numbers to one place at the same time. Warps must exchange words, and a block must meet,
as a whole. Else AssertionError is raised. Results begin as poison.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.exchange import quantized_rows
from pallas_kernels.fabric import elementwise, float8
from pallas_kernels.matmul import float8_gate_gradient, gate_gradient, quantize, quantized_tiles
from pallas_kernels.matmul.row_blocks import BLOCK
from pallas_kernels.routing import logits, top_k

_KERNELS = float8_gate_gradient, gate_gradient, quantize
_MODULES = elementwise, float8, quantized_tiles, quantized_rows, logits, top_k, *_KERNELS
_WARP, _WARPGROUP = 32, 128
_POISON = 0xCD
_FLOAT8 = {"e4m3": np.dtype(jnp.float8_e4m3fn), "e5m2": np.dtype(jnp.float8_e5m2)}


class VectorType(NamedTuple):
    length: int
    element: Any

    @property
    def itemsize(self) -> int:
        return self.length * self.element.itemsize


class Vector(list):
    """A vector of each thread: an array for each of its elements."""

    @property
    def type(self) -> VectorType:
        return VectorType(len(self), self[0].dtype)


class Pointer(NamedTuple):
    """A pointer of each thread: an array, and offsets in it in bytes."""

    memory: Memory
    offset: Any


class Memory:
    """An array in memory, as bytes. In shared memory, it knows which warps have accessed a word."""

    def __init__(self, array: np.ndarray, is_shared: bool = False):
        self.dtype, self.shape = array.dtype, array.shape
        self.bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.is_shared = is_shared
        self.forget()

    def forget(self) -> None:
        """Forgets who has accessed which word, at a barrier of the thread block."""
        size = len(self.bytes) // 4 if self.is_shared else 0
        # A bit for each warp.
        self.readers = np.zeros(size, np.uint32)
        self.writers = np.zeros(size, np.uint32)

    def note(self, words: np.ndarray, warps: np.ndarray, is_store: bool) -> None:
        """Notes an access of `words` by `warps`; refuses it if another warp has been there."""
        bits = np.uint32(1) << warps
        for earlier in (self.writers, self.readers) if is_store else (self.writers,):
            assert not np.any(earlier[words] & ~bits), "no barrier between two warps"
        np.bitwise_or.at(self.writers if is_store else self.readers, words, bits)


class Emulator:
    """Emulates `compiler`, `mosaic`, `arith`, `llvm` and `vector` for a thread block."""

    def __init__(self, num_threads: int):
        self.thread = np.arange(num_threads, dtype=np.uint32)[:, None]
        self.active: Any = np.ones((1, 1), bool)
        self.shared: list[Memory] = []
        self.mosaic = types.SimpleNamespace(
            i32=lambda value: np.full((1, 1), value & 0xFFFFFFFF, np.uint32),
            i64=lambda value: np.full((1, 1), value, np.uint64),
            f32=lambda value: np.full((1, 1), value, np.float32),
            integer_type=lambda bits: np.dtype(f"uint{bits}"),
            float_type=lambda: np.dtype(np.float32),
            element_type=np.dtype,
            element_of=lambda memory: memory.dtype,
            vector_type=VectorType,
            vector_length_of=len,
            array_of=lambda vectors, shape, elements: vectors,
            in_registers=lambda shape, dtype, elements: None,
            add=lambda *numbers: functools.reduce(np.add, numbers),
            mul=np.multiply,
            divided=np.divmod,
            widen=lambda value: value.astype(np.uint64),
            equal=np.equal,
            unequal=np.not_equal,
            below=np.less,
            thread=lambda: self.thread,
            warpgroup_thread=lambda: self.thread % np.uint32(_WARPGROUP),
            scalar=lambda array: array,
            inline=lambda emit, operands, returns=None: emit(*map(_array_of, operands)),
            pointer=lambda memory: Pointer(memory, np.zeros((1, 1), np.int64)),
            element_pointer=_element_pointer,
            pointer_at=_pointer_at,
            element_at=lambda memory, index, element=None: self.load(
                element or memory.dtype, _pointer_at(memory, index, element)
            ),
            load_numbers=self.load_numbers,
            store_numbers=lambda numbers, pointer: self.store(
                Vector(numbers), pointer, alignment=len(numbers) * 4
            ),
            when=self.when,
            repeat=self.repeat,
            loop=self.loop,
            asm=lambda text, _, *operands, returns=None: _ptx(text, operands),
            chosen_bytes=lambda *words: _ptx("prmt.b32 $0, $1, $2, $3;", words),
            warp_max=self.warp_max,
            warp_sum=self.warp_sum,
            shuffle=self.shuffle,
            block_barrier=self.block_barrier,
        )
        self.compiler = types.SimpleNamespace(kernel=self.kernel)
        self.arith = types.SimpleNamespace(
            **{name: ufunc for ufunc, names in _ARITHMETIC.items() for name in names},
            constant=lambda dtype, value: np.full((1, 1), value, dtype),
            select=np.where,
            CmpIPredicate=types.SimpleNamespace(
                sge=lambda a, b: a.view(np.int32) >= b.view(np.int32), ult=np.less
            ),
            cmpi=lambda compare, a, b: compare(a, b),
            shrsi=lambda x, by: (x.view(np.int32) >> by.view(np.int32)).view(np.uint32),
            bitcast=lambda dtype, x: np.ascontiguousarray(x).view(dtype),
            extui=lambda dtype, x: x.astype(dtype),
            extf=lambda dtype, x: x.astype(dtype),
            trunci=lambda dtype, x: x.astype(dtype),
            truncf=lambda kind, x: Vector(element.astype(kind.element) for element in x),
        )
        self.llvm = types.SimpleNamespace(
            load=self.load,
            store=self.store,
            intr_fma=_fma,
            inline_asm=lambda _, operands, text, *__, **___: _ptx(text, operands),
            bitcast=lambda kind, x: _halves(x, kind.element),
            extractelement=lambda vector, index: vector[int(index.flat[0])],
            PointerType=types.SimpleNamespace(get=lambda *_: None),
            addrspacecast=lambda kind, pointer: pointer,
        )
        self.vector = types.SimpleNamespace(
            from_elements=lambda kind, elements: Vector(elements),
            extract=lambda vector, _, index: vector[index[0]],
        )

    @contextlib.contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        before, self.active = self.active, self.active & condition
        yield
        self.active = before

    @contextlib.contextmanager
    def repeat(self, count: int) -> Iterator[Any]:
        yield np.arange(count, dtype=np.uint32)[None]

    @contextlib.contextmanager
    def loop(self, start: Any, end: Any, step: int) -> Iterator[Any]:
        most = max(0, -(-(int(np.max(end)) - int(np.min(start))) // step))
        turn = start + np.arange(most, dtype=np.uint32)[None] * np.uint32(step)
        with self.when(turn < end):
            yield turn

    def kernel(
        self,
        body: Callable[..., None],
        *,
        out_type: Any,
        num_blocks: int,
        scratch_types: Any = None,
        **_: Any,
    ) -> Callable[..., Any]:
        """Runs a kernel's thread blocks one after the other, as `compiler.kernel` does together."""

        def run(*operands: Any) -> Any:
            refs = [Memory(np.asarray(operand)) for operand in operands]
            outs = [_poisoned(out) for out in jax.tree.leaves(out_type)]
            for block in range(num_blocks):
                scratch = {
                    name: Memory(np.full(of.shape, np.nan, of.dtype), is_shared=True)
                    for name, of in (scratch_types or {}).items()
                }
                self.shared = list(scratch.values())
                index = functools.partial(lambda block, _: scalar(block), block)
                with unittest.mock.patch.object(jax.lax, "axis_index", index):
                    body(*refs, *outs, **scratch)
            results = [out.bytes.view(out.dtype).reshape(out.shape) for out in outs]
            return jax.tree.unflatten(jax.tree.structure(out_type), results)

        return run

    def block_barrier(self) -> None:
        assert np.all(self.active), "a barrier that not all threads reach"
        for memory in self.shared:
            memory.forget()

    def warp_max(self, word: Any) -> Any:
        self._check_whole_warps()
        of_warps = self._of_all(word).reshape(-1, _WARP, np.shape(word)[1])
        return np.repeat(of_warps.max(1), _WARP, axis=0)

    def warp_sum(self, value: Any, threads: int) -> Any:
        self._check_whole_warps()
        value = self._of_all(value)
        distance = threads // 2
        while distance:
            value = value + value[self.thread[:, 0] ^ distance]
            distance //= 2
        return value

    def shuffle(self, word: Any, distance: int) -> Any:
        self._check_whole_warps()
        return self._of_all(word)[self.thread[:, 0] ^ distance]

    def load(self, kind: Any, pointer: Pointer, alignment: int = 0) -> Any:
        length, dtype = kind if isinstance(kind, VectorType) else (1, kind)
        at, active = self._places(pointer, length * dtype.itemsize, alignment or dtype.itemsize)
        memory = pointer.memory
        if memory.is_shared:
            for i in range(length):
                words = (at[active] + i * dtype.itemsize) // 4
                memory.note(words, self._warps(active), is_store=False)
        found = []
        for i in range(length):
            places = (at + i * dtype.itemsize)[..., None] + np.arange(dtype.itemsize)
            loaded = memory.bytes[np.where(active[..., None], places, 0)]
            found.append(loaded.view(dtype)[..., 0])
        return found if isinstance(kind, VectorType) else found[0]

    def load_numbers(self, pointer: Pointer, count: int, element: Any = None) -> Any:
        kind = VectorType(count, element or np.dtype(np.uint32))
        return self.load(kind, pointer, alignment=kind.itemsize)

    def store(self, value: Any, pointer: Pointer, alignment: int = 0) -> None:
        elements = value if isinstance(value, list) else [value]
        size = elements[0].dtype.itemsize
        at, active = self._places(pointer, len(elements) * size, alignment or size)
        memory = pointer.memory
        for i, element in enumerate(elements):
            if memory.is_shared:
                words = (at[active] + i * size) // 4
                memory.note(words, self._warps(active), is_store=True)
            element = np.ascontiguousarray(np.broadcast_to(element, at.shape))
            as_bytes = element[..., None].view(np.uint8)
            places = (at + i * size)[..., None] + np.arange(size)
            memory.bytes[places[active]] = as_bytes[active]
            is_kept = memory.bytes[places[active]] == as_bytes[active]
            assert np.all(is_kept), "two threads store different numbers to one place"

    def _places(self, pointer: Pointer, size: int, alignment: int) -> tuple[Any, Any]:
        """Returns the offsets of all threads and turns, and which of these are active."""
        offset, active = np.broadcast_arrays(pointer.offset, self.active & (self.thread >= 0))
        offset = np.broadcast_to(offset, np.broadcast_shapes(offset.shape, self.thread.shape))
        used = offset[active]
        assert np.all(used % alignment == 0), "an access is not aligned"
        assert np.all((used >= 0) & (used + size <= len(pointer.memory.bytes))), "out of bounds"
        return offset, active

    def _warps(self, active: Any) -> Any:
        return np.broadcast_to(self.thread // np.uint32(_WARP), active.shape)[active]

    def _check_whole_warps(self) -> None:
        active = self._of_all(self.active).reshape(-1, _WARP, self.active.shape[1])
        assert np.all(active == active[:, :1]), "a warp exchanges words without all of its threads"

    def _of_all(self, word: Any) -> Any:
        return np.broadcast_to(word, np.broadcast_shapes(np.shape(word), self.thread.shape))


def _array_of(operand: Any) -> Any:
    """Returns an operand of `mosaic.inline` without its layout."""
    return operand[0] if isinstance(operand, tuple) else operand


_ARITHMETIC: dict[Any, tuple[str, ...]] = {
    np.add: ("addi", "addf"),
    np.subtract: ("subi",),
    np.multiply: ("muli", "mulf"),
    np.floor_divide: ("divui",),
    np.remainder: ("remui",),
    np.bitwise_and: ("andi",),
    np.bitwise_or: ("ori",),
    np.bitwise_xor: ("xori",),
    np.left_shift: ("shli",),
    np.right_shift: ("shrui",),
    np.maximum: ("maxui", "maximumf"),
    np.minimum: ("minui",),
}


def _poisoned(out: Any) -> Memory:
    size = out.size * jnp.dtype(out.dtype).itemsize
    return Memory(np.full(size, _POISON, np.uint8).view(out.dtype).reshape(out.shape))


def _element_pointer(pointer: Pointer, index: Any, element: Any) -> Pointer:
    return Pointer(pointer.memory, pointer.offset + index.astype(np.int64) * element.itemsize)


def _pointer_at(memory: Memory, index: Any, element: Any = None) -> Pointer:
    start = Pointer(memory, np.zeros((1, 1), np.int64))
    return _element_pointer(start, index, element or memory.dtype)


def _halves(word: Any, dtype: Any) -> list[Any]:
    """Returns the two numbers of 16 bits of a word, the low half first."""
    return [(word >> np.uint32(shift)).astype(np.uint16).view(dtype) for shift in (0, 16)]


def _word(low: Any, high: Any) -> Any:
    """Packs two numbers of 16 bits in a word."""
    low, high = (each.view(np.uint16).astype(np.uint32) for each in np.broadcast_arrays(low, high))
    return low | high << np.uint32(16)


def _ptx(text: str, operands: Sequence[Any]) -> Any:
    """Computes an instruction of inline PTX, or a few of them."""
    with np.errstate(all="ignore"):
        for pattern, function in _PTX.items():
            if match := re.search(pattern, text):
                return function(*operands, *match.groups())
        return _on_float32(text, operands)


def _on_float32(text: str, operands: Sequence[Any]) -> Any:
    """Runs instructions on float32 one by one; approximate ones are computed exactly."""
    registers = {f"${i}": operand for i, operand in enumerate(operands, 1)}

    def read(name: str) -> Any:
        if name.startswith("0f"):
            return np.uint32(int(name.removeprefix("0f"), 16)).view(np.float32)
        return np.uint32(int(name)) if name.isdigit() else registers[name]

    for line in map(str.strip, text.strip("{} ").split(";")):
        if line and not line.startswith(".reg"):
            name, result, *names = re.split(r"[ ,]+", line)
            found = _FLOAT32[name](*map(read, names))
            registers[result] = found.astype(np.float32) if name.startswith("set.") else found
    return registers["$0"]


def _fma(a: Any, b: Any, c: Any) -> Any:
    return (a.astype(np.float64) * b + c).astype(np.float32)


_FLOAT32: dict[str, Callable[..., Any]] = {
    "add.rn.f32": np.add,
    "sub.rn.f32": np.subtract,
    "mul.rn.f32": np.multiply,
    "max.NaN.f32": np.maximum,
    "min.NaN.f32": np.minimum,
    "neg.f32": np.negative,
    "abs.f32": np.abs,
    "fma.rn.f32": _fma,
    # This instruction rounds down. Kernels use it only for results so large that neighbouring
    # float32 numbers differ by 1, so `floor` rounds in the same way.
    "fma.rm.f32": lambda a, b, c: np.floor(a.astype(np.float64) * b + c).astype(np.float32),
    **dict.fromkeys(
        ("rcp.rn.f32", "rcp.approx.f32", "rcp.approx.ftz.f32"), lambda a: np.float32(1) / a
    ),
    "div.full.f32": np.divide,
    "ex2.approx.ftz.f32": np.exp2,
    "cvt.sat.f32.f32": lambda a: np.clip(a, np.float32(0), np.float32(1)),
    "mov.f32": lambda a: a,
    "mov.b32": lambda a: a.view(np.uint32 if a.dtype == np.float32 else np.float32),
    "shl.b32": np.left_shift,
    "setp.ge.f32": np.greater_equal,
    "setp.le.f32": np.less_equal,
    "setp.lt.f32": np.less,
    "setp.ne.f32": np.not_equal,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "set.eq.f32.f32": np.equal,
    "set.ge.f32.f32": np.greater_equal,
    "set.gt.f32.f32": np.greater,
    "set.le.f32.f32": np.less_equal,
    "set.lt.f32.f32": np.less,
}


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Applies a function of float arrays to the numbers of words of a PTX type."""

    def of_words(*operands: Any) -> Any:
        *words, kind = operands
        if kind == "f32":
            found = function(*(word.view(np.float32) for word in words))
            return found.astype(np.float32).view(np.uint32)
        dtype = np.dtype({"bf16x2": jnp.bfloat16, "f16x2": jnp.float16}[kind])
        both = zip(*(_halves(word, dtype) for word in words), strict=True)
        return _word(*(function(*numbers).astype(dtype) for numbers in both))

    return of_words


def _larger_magnitude(a: Any, b: Any) -> Any:
    largest = np.fmax(np.abs(a), np.abs(b)).astype(a.dtype)
    return np.where(np.signbit(a) ^ np.signbit(b), -largest, largest)


def _float8_word(*operands: Any) -> Any:
    *numbers, kind = operands
    dtype = _FLOAT8[kind]
    largest = float(jnp.finfo(dtype).max)
    word = np.uint32(0)
    for i, number in enumerate(numbers):
        rounded = np.clip(number, -largest, largest).astype(dtype).view(np.uint8)
        rounded = np.where(np.isnan(number), np.uint8(0x7F), rounded)
        word = word | rounded.astype(np.uint32) << np.uint32(8 * i)
    return word


def _chosen_bytes(low: Any, high: Any, selector: Any) -> Any:
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    word = np.uint32(0)
    for i in range(4):
        byte = selector.astype(np.uint64) >> np.uint64(4 * i) & np.uint64(7)
        chosen = both >> byte * np.uint64(8) & np.uint64(0xFF)
        word = word | chosen.astype(np.uint32) << np.uint32(8 * i)
    return word


def _widened(pair: Any, kind: str) -> Any:
    both = ((pair >> np.uint16(shift)).astype(np.uint8).view(_FLOAT8[kind]) for shift in (0, 8))
    return _word(*(each.astype(np.float16) for each in both))


# Maps patterns of inline PTX to functions of the operands, and of the pattern's groups.
_PTX: dict[str, Callable[..., Any]] = {
    r"^prmt\.b32 ": _chosen_bytes,
    r"^fma\.rn\.(\w+) \$0, \$1, \$2, \$1;": _of_numbers(
        lambda a, b: a.astype(np.float64) * b.astype(np.float64) + a.astype(np.float64)
    ),
    r"^max\.xorsign\.abs\.(\w+) ": _of_numbers(_larger_magnitude),
    r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32 low, \$2, \$1": _float8_word,
    r"^cvt\.rn\.f16x2\.(e4m3|e5m2)x2 ": _widened,
    r"^cvt\.rn\.bf16x2\.f32 \$0, \$2, \$1;": lambda low, high: _word(
        low.astype(jnp.bfloat16), high.astype(jnp.bfloat16)
    ),
}


def _on_tiles(
    name: str,
    operands: Sequence[jax.Array],
    blocks: jax.Array | None,
    out_type: Sequence[jax.ShapeDtypeStruct],
    emit: Callable[..., None],
    *,
    width: int,
    num_warps: int,
    num_shared: int = 0,
    into: Sequence[jax.Array] = (),
) -> list[np.ndarray]:
    """Runs a kernel like `quantized_tiles.on_tiles`, with the code that `emit` emits."""
    ins = [Memory(np.asarray(operand)) for operand in operands]
    outs = [*(Memory(np.array(each)) for each in into), *map(_poisoned, out_type)]
    if blocks is None:
        firsts = range(0, operands[0].shape[0], BLOCK)
        table = [(first, BLOCK) for first in firsts]
    else:
        table = np.asarray(blocks).tolist()
    # The last block is first. So what a block stores past its last row is not repaired by the next.
    for block, (first, count) in reversed([*enumerate(table)]):
        for column in range(width // BLOCK if count else 0):
            emulator = Emulator(num_warps * _WARP)
            shared = np.full(num_shared, np.nan, np.float32)
            emulator.shared = [Memory(shared, is_shared=True)] if num_shared else []
            numbers = (np.full((1, 1), n, np.uint32) for n in (block, column, first, count))
            with _emulated(emulator), np.errstate(all="ignore"):
                emit([*ins, *outs, *emulator.shared], quantized_tiles.Tile(*numbers))
    return [
        memory.bytes.view(out.dtype).reshape(out.shape)
        for memory, out in zip(outs, (*into, *out_type), strict=True)
    ]


@contextlib.contextmanager
def _emulated(emulator: Emulator) -> Iterator[None]:
    before = []
    for module in _MODULES:
        for name in ("compiler", "mosaic", "arith", "llvm", "vector"):
            if name in vars(module):
                before.append((module, name, getattr(module, name)))
                setattr(module, name, getattr(emulator, name))
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def run_kernel(function: Callable[[], Any], num_threads: int = _WARPGROUP) -> Any:
    """Runs `function`, which emits code or calls `compiler.kernel`, in NumPy."""
    with _emulated(Emulator(num_threads)), np.errstate(all="ignore"):
        return function()


def run_warpgroup(function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a function that emits code by `mosaic.inline`, in the threads of a warpgroup.

    References among the arguments are `Memory`, and scalars what `scalar` returns.
    """
    emulator = Emulator(_WARPGROUP)
    emulator.shared = [each for each in arguments if getattr(each, "is_shared", False)]
    with _emulated(emulator), np.errstate(all="ignore"):
        return function(*arguments)


def scalar(number: int) -> np.ndarray:
    return np.full((1, 1), number & 0xFFFFFFFF, np.uint32)


def emulate(monkeypatch: Any) -> None:
    """Makes kernels of tiles run on the CPU, by the code that they emit, until the test ends."""
    for module in _KERNELS:
        monkeypatch.setattr(module, "on_tiles", _on_tiles)
