"""Memory of the low-latency protocol: how a warpgroup sends, polls and counts by 32-bit words.

Every GPU's heap has counters of its calls, slots that each hold a tile of a peer, and for each
slot a note from each of the sender's 128 threads. `EMPTY` is the sentinel: a word that has
not arrived. A payload word that equals the sentinel is sent as `_INSTEAD`. Where a receiver needs
exact bits, the sender's thread also writes a note that says which of its words were replaced.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic, ptx
from pallas_kernels.fabric.layout import EMPTY, SLOT_BYTES, TILE_BYTES
from pallas_kernels.fabric.mosaic import arith, ir, llvm, mgpu, scf, vector
from pallas_kernels.fabric.plan import VECTOR_BYTES, vector_length

_INSTEAD = 0xFFFFFFFE

_NOTES_BYTES = SLOT_BYTES - TILE_BYTES
_WORDS = VECTOR_BYTES // 4
_SCALAR = mosaic.SCALAR


@dataclasses.dataclass(frozen=True)
class Regions:
    """The memory of the low-latency protocol in the heaps of the GPUs.

    Attributes:
      base: the address of that memory in GPU 0's heap.
      stride: bytes from one GPU's heap to the next one's.
      num_devices: how many GPUs have a heap.
      num_counters: counters of each GPU, 32 bits each.
      num_slots: slots of each GPU, one tile each.
    """

    base: int
    stride: int
    num_devices: int
    num_counters: int
    num_slots: int

    def post(self, device: jax.Array, slot: jax.Array, tile: jax.Array, *, exact: bool) -> None:
        """Sends a tile to a slot of a GPU, which must be empty.

        Without `exact`, a NaN may arrive as another NaN. The receiver must pass the same `exact`.
        """

        def emit(ctx: Any, device: Any, slot: Any, array: Any) -> None:
            del ctx
            i32 = ir.IntegerType.get_signless(32)
            packed = vector.bitcast(ir.VectorType.get((_WORDS,), i32), array.registers.item())
            words = [vector.extract(packed, [], [i]) for i in range(_WORDS)]
            where = device.registers.item(), slot.registers.item()
            empty = [_is(EMPTY, word) for word in words]
            if exact:
                bits = [
                    arith.select(is_empty, mosaic.i32(1 << i), mosaic.i32(0))
                    for i, is_empty in enumerate(empty)
                ]
                llvm.inline_asm(
                    None,
                    [
                        self._note(*where),
                        functools.reduce(arith.ori, bits),
                        _any([*empty, *(_is(_INSTEAD, word) for word in words)]),
                    ],
                    "@$2 st.relaxed.sys.global.b32 [$0], $1;",
                    "l,r,b",
                    has_side_effects=True,
                )
            words = [
                arith.select(is_empty, mosaic.i32(_INSTEAD), word)
                for is_empty, word in zip(empty, words, strict=True)
            ]
            _store(self._slot(*where), words)

        layout = _layout(tile.shape, tile.dtype)
        plgpu.inline_mgpu(arg_types=(_SCALAR, _SCALAR, layout))(emit)(device, slot, tile)

    def collect(
        self,
        device: jax.Array,
        slots: Sequence[jax.Array],
        shape: tuple[int, ...],
        dtype: Any,
        *,
        rank: jax.Array,
        peers: Sequence[jax.Array],
        timeout_s: float,
        what: str,
        exact: bool,
        wanted: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """Receives the tiles in slots of this GPU, and leaves the slots empty.

        `peers` has the sender for each slot. `wanted`, if given, says which slots a tile comes to;
        it does not wait for the others. After `timeout_s` seconds the kernel traps, with a
        message that names `what`, this rank, and a peer whose tile has not arrived.
        """
        count = len(slots)

        def emit(ctx: Any, device: Any, rank: Any, *scalars: Any) -> Any:
            del ctx
            device, rank = device.registers.item(), rank.registers.item()
            scalars = tuple(scalar.registers.item() for scalar in scalars)
            pointers = [self._slot(device, slot) for slot in scalars[:count]]
            comes = scalars[2 * count :]

            def is_missing(j: int, of_slot: Sequence[ir.Value]) -> ir.Value:
                missing = _any([_is(EMPTY, word) for word in of_slot])
                return arith.andi(missing, comes[j]) if comes else missing

            def ask() -> tuple[ir.Value, list[ir.Value]]:
                words = [word for pointer in pointers for word in _load(pointer)]
                if not comes:
                    return _any([_is(EMPTY, word) for word in words]), words
                missing = [is_missing(j, of_slot) for j, of_slot in enumerate(_by_slot(words))]
                return _any(missing), words

            def late(words: Sequence[ir.Value]) -> None:
                peer = scalars[count]
                for j, of_slot in enumerate(_by_slot(words)):
                    missing = is_missing(j, of_slot)
                    peer = arith.select(missing, scalars[count + j], peer)
                ptx.give_up(what, timeout_s, rank, peer)

            def as_sent(j: int, words: Sequence[ir.Value]) -> list[ir.Value]:
                """Emits a thread's words of slot j as they were before sentinels were replaced.

                If a word is `_INSTEAD`, waits for the sender's note, which says whether it was
                the sentinel.
                """
                i32 = ir.IntegerType.get_signless(32)
                noted = _any([_is(_INSTEAD, word) for word in words])
                found = scf.IfOp(noted, [i32] * _WORDS, has_else=True)
                with ir.InsertionPoint(found.then_block):
                    pointer = self._note(device, scalars[j])

                    def ask_for_note() -> tuple[ir.Value, list[ir.Value]]:
                        note = ptx.load_word(pointer)
                        return _is(EMPTY, note), [note]

                    (note,) = ptx.poll(
                        ask_for_note,
                        lambda _: ptx.give_up(what, timeout_s, rank, scalars[count + j]),
                        timeout_s=timeout_s,
                        types=[mosaic.integer_type(32)],
                    )
                    _store_word(pointer, mosaic.i32(EMPTY))
                    bits = [arith.andi(note, mosaic.i32(1 << i)) for i in range(_WORDS)]
                    scf.yield_(
                        [
                            arith.select(_is(0, bit), word, mosaic.i32(EMPTY))
                            for bit, word in zip(bits, words, strict=True)
                        ]
                    )
                with ir.InsertionPoint(found.else_block):
                    scf.yield_(list(words))
                return list(found.results)

            words = ptx.poll(
                ask, late, timeout_s=timeout_s, types=[mosaic.integer_type(32)] * _WORDS * count
            )
            for pointer in pointers:
                _store(pointer, [mosaic.i32(EMPTY)] * _WORDS)
            return [
                _tile(as_sent(j, of_slot) if exact else of_slot, shape, dtype)
                for j, of_slot in enumerate(_by_slot(words))
            ]

        tile = mosaic.in_registers(shape, dtype, vector_length(dtype))
        scalars = device, rank, *slots, *peers, *(wanted or ())
        arg_types = (_SCALAR,) * len(scalars)
        return plgpu.inline_mgpu(arg_types=arg_types, return_type=[tile] * count)(emit)(*scalars)

    def read(self, device: jax.Array, counters: Sequence[jax.Array]) -> list[jax.Array]:
        """Reads counters of this GPU."""

        def emit(ctx: Any, device: Any, *counters: Any) -> Any:
            del ctx
            values = []
            for counter in counters:
                address = self._counter(device.registers.item(), counter.registers.item())
                value = ptx.load_word(address)
                values.append(mgpu.FragmentedArray.splat(value, (), is_signed=True))
            return values

        scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
        count = len(counters)
        arg_types = (_SCALAR,) * (1 + count)
        return plgpu.inline_mgpu(arg_types=arg_types, return_type=[scalar] * count)(emit)(
            device, *counters
        )

    def write(
        self, device: jax.Array, counters: Sequence[jax.Array], values: Sequence[jax.Array]
    ) -> None:
        """Sets counters of this GPU, after a barrier of all threads of the warpgroup."""
        count = len(counters)

        def emit(ctx: Any, device: Any, *scalars: Any) -> None:
            del ctx
            scalars = tuple(scalar.registers.item() for scalar in scalars)
            mosaic.barrier()
            first = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, mosaic.lane(), mosaic.i32(0)))
            with ir.InsertionPoint(first.then_block):
                for counter, value in zip(scalars[:count], scalars[count:], strict=True):
                    _store_word(self._counter(device.registers.item(), counter), value)
                scf.yield_([])

        arg_types = (_SCALAR,) * (1 + 2 * count)
        plgpu.inline_mgpu(arg_types=arg_types)(emit)(device, *counters, *values)

    def _region(self, device: ir.Value) -> ir.Value:
        return arith.addi(_times(device, self.stride), mosaic.i64(self.base))

    def _counter(self, device: ir.Value, counter: ir.Value) -> ir.Value:
        return arith.addi(self._region(device), _times(counter, 4))

    def _slot(self, device: ir.Value, slot: ir.Value) -> ir.Value:
        """Emits the address of this thread's 16 bytes of a slot."""
        start = arith.addi(self._region(device), mosaic.i64(4 * self.num_counters))
        part = _times(mosaic.lane(), VECTOR_BYTES)
        return arith.addi(start, arith.addi(_times(slot, TILE_BYTES), part))

    def _note(self, device: ir.Value, slot: ir.Value) -> ir.Value:
        """Emits the address of this thread's note for a slot, a 32-bit word."""
        start = arith.addi(
            self._region(device), mosaic.i64(4 * self.num_counters + TILE_BYTES * self.num_slots)
        )
        return arith.addi(start, arith.addi(_times(slot, _NOTES_BYTES), _times(mosaic.lane(), 4)))


def _by_slot(words: Sequence[ir.Value]) -> list[Sequence[ir.Value]]:
    """Splits a flat list of words into one list for each slot."""
    return [words[first : first + _WORDS] for first in range(0, len(words), _WORDS)]


def _layout(shape: tuple[int, ...], dtype: Any) -> Any:
    return mosaic.strided(shape, vector_length(dtype))


def _times(value: ir.Value, size: int) -> ir.Value:
    return arith.muli(arith.extui(ir.IntegerType.get_signless(64), value), mosaic.i64(size))


def _is(value: int, word: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, word, mosaic.i32(value))


def _any(conditions: Sequence[ir.Value]) -> ir.Value:
    return functools.reduce(arith.ori, conditions)


def _store_word(pointer: ir.Value, word: ir.Value) -> None:
    llvm.inline_asm(
        None, [pointer, word], "st.relaxed.sys.global.b32 [$0], $1;", "l,r", has_side_effects=True
    )


def _load(pointer: ir.Value) -> list[ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    words = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * _WORDS)})>"),
        [pointer],
        "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        has_side_effects=True,
    )
    return [llvm.extractvalue(i32, words, [i]) for i in range(_WORDS)]


def _store(pointer: ir.Value, words: Sequence[ir.Value]) -> None:
    llvm.inline_asm(
        None,
        [pointer, *words],
        "st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};",
        "l,r,r,r,r",
        has_side_effects=True,
    )


def _tile(words: Sequence[ir.Value], shape: tuple[int, ...], dtype: Any) -> Any:
    i32, element = ir.IntegerType.get_signless(32), mosaic.element_type(dtype)
    packed = llvm.mlir_undef(ir.VectorType.get((_WORDS,), i32))
    for i, word in enumerate(words):
        packed = llvm.insertelement(packed, word, mosaic.i32(i))
    of_thread = ir.VectorType.get((vector_length(dtype),), element)
    return mosaic.array_of([vector.bitcast(of_thread, packed)], shape, vector_length(dtype))
