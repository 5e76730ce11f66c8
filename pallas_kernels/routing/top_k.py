"""The k largest of every row, without sorting the row: one warp for a row, in registers.

A lane holds neighbouring columns of its row as (key, order) pairs of unsigned 32-bit words. `key`
grows with the value in the total order of IEEE 754, which is that of `lax.top_k`: -NaN < -inf <
-0 < 0 < inf < NaN. `order` shrinks with the column, so of equal values the first is the largest
pair. Each of k steps takes the largest pair of the row, by two reductions over the warp, and
empties it in the lane that holds it.

With groups, the lanes of a group first make its score, the warp chooses the best groups in the same
way, and what lies outside of them counts as -inf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.fabric.plan import LANES
from pallas_kernels.routing.plan import WARP, Groups, unavailable_reason

_ROWS = LANES // WARP  # rows of a block
_SIGN = 0x80000000
_KEY_OF_MINUS_INFINITY = 0x007FFFFF


def top_k(
    values: jax.Array,
    gathered: jax.Array,
    k: int,
    *,
    groups: Groups | None = None,
    scores: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the columns of each row's k largest values, and what another array holds there.

    Columns are [T, k] int32, in the order of `lax.top_k`; what is gathered is [T, k] float32.

    Args:
      values: [T, E] float32, T > 0.
      gathered: [T, E] float32.
      k: how many to choose.
      groups: the groups of columns to choose from, or None.
      scores: [T, E] float32, what the groups are compared by; None: the values.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.
    """
    rows, columns = values.shape
    if reason := unavailable_reason(columns, k, groups):
        raise ValueError(f"the kernel cannot run: {reason}.")
    kernel = _TopK(rows, columns, k, groups, bool(interpret))
    shape = rows, k
    columns_chosen, of_chosen = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(pl.cdiv(rows, _ROWS),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name="top_k",
    )(gathered, values, *([] if scores is None else [scores]))
    return columns_chosen, of_chosen


class _Pair(NamedTuple):
    """The key and the order of a value, or of the largest of several; (0, 0) is none."""

    key: Any
    order: Any


@dataclasses.dataclass(frozen=True)
class _TopK:
    rows: int
    columns: int
    k: int
    groups: Groups | None
    interpreted: bool

    @property
    def width(self) -> int:
        """Columns of a lane."""
        return pl.cdiv(self.columns, WARP)

    def __call__(self, gathered: Any, *refs: Any) -> None:
        *operands, out, gathered_out = refs
        block = lax.axis_index("block")
        if self.interpreted:
            for warp in range(_ROWS):
                row = block * _ROWS + warp

                @pl.when(row < self.rows)
                def _(row=row):
                    lanes = _InterpretedLanes(self.columns, self.width)
                    chosen = self.choose(lanes, *(lanes.load(ref, row) for ref in operands))
                    chosen = chosen[: self.k].astype(jnp.int32)
                    out[row] = chosen
                    gathered_out[row] = gathered[row][chosen]

            return

        def emit(context: Any, block: Any, out: Value, to: Value, of: Value, *refs: Value) -> None:
            del context
            lanes = _Lanes(self.columns, self.width)
            row = arith.addi(
                arith.muli(mosaic.scalar(block), mosaic.i32(_ROWS)),
                arith.divui(mosaic.lane(), mosaic.i32(WARP)),
            )
            with mosaic.when(mosaic.below(row, mosaic.i32(self.rows))):
                chosen = self.choose(lanes, *(lanes.load(ref, row) for ref in refs))
                with mosaic.when(mosaic.below(lanes.lane, mosaic.i32(self.k))):
                    place = arith.addi(arith.muli(row, mosaic.i32(self.k)), lanes.lane)
                    source = arith.addi(arith.muli(row, mosaic.i32(self.columns)), chosen)
                    _store(chosen, out, place)
                    _store(mosaic.element_at(of, source), to, place)

        refs = (out, gathered_out, gathered, *operands)
        mosaic.inline(emit, [block, *refs], [mosaic.SCALAR, *[mosaic.REFERENCE] * len(refs)])

    def choose(self, lanes: Any, values: Sequence[Any], scores: Sequence[Any] | None = None) -> Any:
        """Returns, in lane i, the column of a row's i-th largest value, of what each lane holds."""
        pairs = lanes.pairs([lanes.key(value) for value in values])
        if self.groups is not None:
            keys = [lanes.key(value) for value in (values if scores is None else scores)]
            kept = self.kept(lanes, keys)
            out = lanes.word(_KEY_OF_MINUS_INFINITY)
            pairs = [_Pair(lanes.select(kept, p.key, out), p.order) for p in pairs]
        chosen = lanes.word(0)
        for step in range(self.k):
            best = _warp_best(lanes, _best(lanes, pairs))
            pairs = [_without(lanes, pair, best) for pair in pairs]
            mine = lanes.equal(lanes.lane, lanes.word(step))
            chosen = lanes.select(mine, lanes.complement(best.order), chosen)
        return chosen

    def kept(self, lanes: Any, keys: Sequence[Any]) -> Any:
        """Returns whether each lane's group is among the best."""
        assert self.groups is not None
        lanes_of_group = WARP // self.groups.number
        first, second = keys[0], None
        for key in keys[1:]:
            first, second = _two_largest(lanes, first, second, key, None)
        distance = 1
        while distance < lanes_of_group:
            others = [
                None if key is None else lanes.exchange(key, distance) for key in (first, second)
            ]
            first, second = _two_largest(lanes, first, second, *others)
            distance *= 2
        # XLA drops a sum of one score, and starts a sum of two at zero.
        score = first if self.groups.best == 1 else lanes.key_of_sum(first, second)
        own = _Pair(score, lanes.complement(lanes.divided(lanes.lane, lanes_of_group)))
        kept = None
        for _ in range(self.groups.kept):
            best = _warp_best(lanes, own)
            is_best = lanes.equal(own.order, best.order)
            kept = is_best if kept is None else lanes.either(kept, is_best)
            own = _without(lanes, own, best)
        return kept


def _best(lanes: Any, pairs: Sequence[_Pair]) -> _Pair:
    """Returns the largest pair of a lane."""
    pairs = list(pairs)
    while len(pairs) > 1:
        odd = pairs[len(pairs) // 2 * 2 :]
        pairs = [_larger(lanes, a, b) for a, b in zip(pairs[::2], pairs[1::2], strict=False)] + odd
    return pairs[0]


def _larger(lanes: Any, a: _Pair, b: _Pair) -> _Pair:
    ahead = lanes.both(lanes.equal(a.key, b.key), lanes.greater(a.order, b.order))
    is_a = lanes.either(lanes.greater(a.key, b.key), ahead)
    return _Pair(lanes.select(is_a, a.key, b.key), lanes.select(is_a, a.order, b.order))


def _warp_best(lanes: Any, own: _Pair) -> _Pair:
    """Returns the largest pair of the warp, in every lane."""
    key = lanes.warp_max(own.key)
    is_best = lanes.equal(own.key, key)
    return _Pair(key, lanes.warp_max(lanes.select(is_best, own.order, lanes.word(0))))


def _without(lanes: Any, pair: _Pair, taken: _Pair) -> _Pair:
    """Returns a pair, or none if it is the one that is taken; orders are distinct."""
    gone, none = lanes.equal(pair.order, taken.order), lanes.word(0)
    return _Pair(lanes.select(gone, none, pair.key), lanes.select(gone, none, pair.order))


def _two_largest(lanes: Any, a: Any, a_second: Any, b: Any, b_second: Any) -> tuple[Any, Any]:
    """Returns the two largest of up to four keys, of which a >= a_second and b >= b_second."""
    a_is_larger = lanes.greater(a, b)
    first, second = lanes.select(a_is_larger, a, b), lanes.select(a_is_larger, b, a)
    for other in (a_second, b_second):
        if other is not None:
            second = lanes.select(lanes.greater(other, second), other, second)
    return first, second


def _store(value: Value, ref: Value, place: Value) -> None:
    llvm.store(value, mosaic.element_pointer(mosaic.pointer(ref), place, value.type))


class _Lanes:
    """Emits what `_TopK` computes, for one thread; words are unsigned, 32 bits."""

    def __init__(self, columns: int, width: int) -> None:
        self.columns, self.width = columns, width
        self.lane = arith.remui(mosaic.lane(), mosaic.i32(WARP))

    def load(self, ref: Value, row: Value) -> list[Value]:
        """Returns the bits of this lane's columns of a row; past the last column, of that one."""
        i32 = mosaic.integer_type(32)
        first = arith.muli(self.lane, mosaic.i32(self.width))
        start = arith.muli(row, mosaic.i32(self.columns))
        base = mosaic.pointer(ref)
        if self.columns % WARP == 0:
            length = math.gcd(self.width, 4)
            of_vector = mosaic.vector_type(length, i32)
            start = arith.addi(start, first)
            bits = []
            for i in range(0, self.width, length):
                pointer = mosaic.element_pointer(base, arith.addi(start, mosaic.i32(i)), i32)
                loaded = llvm.load(of_vector, pointer, alignment=4 * length)
                bits += [vector.extract(loaded, [], [j]) for j in range(length)]
            return bits
        last = mosaic.i32(self.columns - 1)
        columns = [arith.minui(arith.addi(first, mosaic.i32(i)), last) for i in range(self.width)]
        places = [arith.addi(start, column) for column in columns]
        return [llvm.load(i32, mosaic.element_pointer(base, place, i32)) for place in places]

    def key(self, bits: Value) -> Value:
        spread = arith.shrsi(bits, mosaic.i32(31))
        return arith.xori(bits, arith.ori(spread, mosaic.i32(_SIGN)))

    def pairs(self, keys: Sequence[Value]) -> list[_Pair]:
        first = arith.muli(self.lane, mosaic.i32(self.width))
        pairs = []
        for i, key in enumerate(keys):
            column = arith.addi(first, mosaic.i32(i))
            order = self.complement(column)
            if self.columns % WARP:
                is_column, none = mosaic.below(column, mosaic.i32(self.columns)), self.word(0)
                key, order = (arith.select(is_column, word, none) for word in (key, order))
            pairs.append(_Pair(key, order))
        return pairs

    def key_of_sum(self, *keys: Value) -> Value:
        """Returns the key of 0 plus the float32 of each key, in order."""
        total = mosaic.f32(0.0)
        for key in keys:
            below_zero = self.complement(arith.shrsi(key, mosaic.i32(31)))
            bits = arith.xori(key, arith.ori(below_zero, mosaic.i32(_SIGN)))
            total = arith.addf(total, arith.bitcast(mosaic.float_type(), bits))
        return self.key(arith.bitcast(mosaic.integer_type(32), total))

    def warp_max(self, word: Value) -> Value:
        text = "redux.sync.max.u32 $0, $1, 0xffffffff;"
        return mosaic.asm(text, "=r,r", word, returns=mosaic.integer_type(32))

    def exchange(self, word: Value, distance: int) -> Value:
        """Returns the word of the lane whose number differs by `distance`, a power of two."""
        text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
        return mosaic.asm(text, "=r,r", word, returns=mosaic.integer_type(32))

    def word(self, value: int) -> Value:
        return mosaic.i32(value)

    def complement(self, word: Value) -> Value:
        return arith.xori(word, mosaic.i32(0xFFFFFFFF))

    def divided(self, word: Value, divisor: int) -> Value:
        return arith.divui(word, mosaic.i32(divisor))

    def greater(self, a: Value, b: Value) -> Value:
        return mosaic.below(b, a)

    def equal(self, a: Value, b: Value) -> Value:
        return mosaic.equal(a, b)

    def both(self, a: Value, b: Value) -> Value:
        return arith.andi(a, b)

    def either(self, a: Value, b: Value) -> Value:
        return arith.ori(a, b)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return arith.select(condition, a, b)


class _InterpretedLanes(_Lanes):
    """The same for a whole warp in Pallas' interpreter: a word is an array [WARP] of uint32."""

    def __init__(self, columns: int, width: int) -> None:
        self.columns, self.width = columns, width
        self.lane = jnp.arange(WARP, dtype=jnp.uint32)

    def load(self, ref: Any, row: Any) -> list[Any]:
        values = jnp.pad(ref[row], (0, WARP * self.width - self.columns), mode="edge")
        bits = lax.bitcast_convert_type(values, jnp.uint32).reshape(WARP, self.width)
        return [bits[:, i] for i in range(self.width)]

    def key(self, bits: Any) -> Any:
        return jnp.where(bits >= jnp.uint32(_SIGN), ~bits, bits | jnp.uint32(_SIGN))

    def pairs(self, keys: Sequence[Any]) -> list[_Pair]:
        pairs = []
        for i, key in enumerate(keys):
            column = self.lane * self.width + i
            is_column = column < self.columns
            pairs.append(_Pair(jnp.where(is_column, key, 0), jnp.where(is_column, ~column, 0)))
        return pairs

    def key_of_sum(self, *keys: Any) -> Any:
        total = jnp.zeros(WARP, jnp.float32)
        for key in keys:
            bits = jnp.where(key >= jnp.uint32(_SIGN), key ^ jnp.uint32(_SIGN), ~key)
            total += lax.bitcast_convert_type(bits, jnp.float32)
        return self.key(lax.bitcast_convert_type(total, jnp.uint32))

    def warp_max(self, word: Any) -> Any:
        return jnp.broadcast_to(jnp.max(word), word.shape)

    def exchange(self, word: Any, distance: int) -> Any:
        return word[self.lane ^ jnp.uint32(distance)]

    def word(self, value: int) -> Any:
        return jnp.full(WARP, value, jnp.uint32)

    def complement(self, word: Any) -> Any:
        return ~word

    def divided(self, word: Any, divisor: int) -> Any:
        return word // jnp.uint32(divisor)

    def greater(self, a: Any, b: Any) -> Any:
        return a > b

    def equal(self, a: Any, b: Any) -> Any:
        return a == b

    def both(self, a: Any, b: Any) -> Any:
        return a & b

    def either(self, a: Any, b: Any) -> Any:
        return a | b

    def select(self, condition: Any, a: Any, b: Any) -> Any:
        return jnp.where(condition, a, b)
