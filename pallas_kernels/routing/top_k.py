"""The k largest of every row, without sorting the row: one warp for a row, in registers.

A lane holds neighbouring columns of its row as (key, order) pairs of unsigned 32-bit words. `key`
grows with the value in the total order of IEEE 754, which is that of `lax.top_k`: -NaN < -inf <
-0 < 0 < inf < NaN. `order` shrinks with the column, so of equal values the first is the largest
pair. Each of k steps takes the largest pair of the row, by two reductions over the warp, and
empties it in the lane that holds it.

Without scores of its own to gather, the warp makes the softmax of its row first. Weights follow
from what the lanes of the choices hold. Arithmetic is that of XLA's kernels but for the order of
sums, which is that of the lanes, whatever the number of rows.

With groups, the lanes of a group first make its score, the warp chooses the best groups in the same
way, and what lies outside of them counts as -inf.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import LANES, WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.routing.plan import Groups, Weighing, unavailable_reason

_ROWS = LANES // WARP  # rows of a block
_SIGN = 0x80000000
_ADD = Elementwise(lambda a, b: a + b, 2)
_EXP = Elementwise(lambda value, largest: jnp.exp(value - largest), 2)
_DIVIDE = Elementwise(lambda a, b: a / b, 2)
_KEY_OF_MINUS_INFINITY = 0x007FFFFF


class Chosen(NamedTuple):
    """The choices of each row. T rows, E columns.

    Attributes:
      columns: [T, k] int32, in the order of `lax.top_k`.
      scores: [T, k] float32, what the gathered array, or the softmax, holds there.
      weights: [T, k] float32, what the scores weigh.
      softmax: [T, E] float32, of each row; None where an array was given to gather from.
    """

    columns: Any
    scores: Any
    weights: Any
    softmax: Any = None


def top_k(
    values: jax.Array,
    k: int,
    weighing: Weighing,
    *,
    gathered: jax.Array | None = None,
    groups: Groups | None = None,
    scores: jax.Array | None = None,
    interpret: Any = None,
) -> Chosen:
    """Chooses the k largest values of each row.

    Args:
      values: [T, E] float32, T > 0.
      k: how many to choose.
      weighing: what is made of the scores of the chosen.
      gathered: [T, E] float32, where these scores are; None: the softmax of the values.
      groups: the groups of columns to choose from, or None.
      scores: [T, E] float32, what the groups are compared by; None: the values.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.
    """
    rows, columns = values.shape
    if reason := unavailable_reason(columns, k, groups):
        raise ValueError(f"the kernel cannot run: {reason}.")
    out_type = [
        jax.ShapeDtypeStruct((rows, k), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)
    ]
    if gathered is None:
        out_type.append(jax.ShapeDtypeStruct((rows, columns), jnp.float32))
    operands = {"values": values, "gathered": gathered, "scores": scores}
    given = {name: array for name, array in operands.items() if array is not None}
    kernel = _TopK(rows, columns, k, weighing, groups, tuple(given), bool(interpret))
    return Chosen(
        *plgpu.kernel(
            kernel,
            out_type=out_type,
            grid=(pl.cdiv(rows, _ROWS),),
            grid_names=("block",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=interpret,
            kernel_name="top_k",
        )(*given.values())
    )


class _Pair(NamedTuple):
    """The key and the order of a value, or of the largest of several; (0, 0) is none."""

    key: Any
    order: Any


@dataclasses.dataclass(frozen=True)
class _TopK:
    rows: int
    columns: int
    k: int
    weighing: Weighing
    groups: Groups | None
    given: tuple[str, ...]  # the operands' names
    interpreted: bool

    @property
    def width(self) -> int:
        """The columns of a row that one lane holds."""
        return pl.cdiv(self.columns, WARP)

    def __call__(self, *refs: Any) -> None:
        block = lax.axis_index("block")
        if not self.interpreted:
            layouts = [mosaic.SCALAR, *[mosaic.REFERENCE] * len(refs)]
            mosaic.inline(self.emit, [block, *refs], layouts)
            return
        for warp in range(_ROWS):
            row = block * _ROWS + warp
            lanes = _InterpretedLanes(self.columns, self.width)
            pl.when(row < self.rows)(functools.partial(self.one_row, lanes, row, refs))

    def emit(self, block: Any, *refs: Value) -> None:
        row = arith.addi(
            arith.muli(mosaic.scalar(block), mosaic.i32(_ROWS)),
            arith.divui(mosaic.lane(), mosaic.i32(WARP)),
        )
        with mosaic.when(mosaic.below(row, mosaic.i32(self.rows))):
            self.one_row(_Lanes(self.columns, self.width), row, refs)

    def one_row(self, lanes: Any, row: Any, refs: Sequence[Any]) -> None:
        """Makes a row's choices. Words of `lanes` hold the bits of what they stand for."""
        operands = dict(zip(self.given, refs, strict=False))
        out = Chosen(*refs[len(operands) :])
        values = lanes.load(operands["values"], row)
        of_groups = lanes.load(operands["scores"], row) if "scores" in operands else values
        chosen = self.choose(lanes, values, of_groups)
        columns = lanes.complement(chosen.order)
        if "gathered" in operands:
            scores = lanes.gather(operands["gathered"], row, columns)
        else:
            *softmax, scores = self.softmax(lanes, values, lanes.bits(chosen.key))
            lanes.store_row(softmax, out.softmax, row)
        lanes.store_chosen(columns, out.columns, row, self.k)
        lanes.store_chosen(scores, out.scores, row, self.k)
        lanes.store_chosen(self.weigh(lanes, scores), out.weights, row, self.k)

    def weigh(self, lanes: Any, scores: Any) -> Any:
        """Returns the weights of what the first k lanes hold."""
        weighing = self.weighing
        if weighing.normalize:
            is_choice = lanes.greater(lanes.word(self.k), lanes.lane)
            total = lanes.select(is_choice, scores, lanes.word(0))
            total = _sum_of_lanes(lanes, total, pl.next_power_of_2(self.k))
            divide = Elementwise(lambda x, total: x / (total + np.float32(weighing.epsilon)), 2)
            scores = lanes.apply(divide, scores, total)
        return lanes.apply(Elementwise(lambda x: x * np.float32(weighing.scale), 1), scores)

    def softmax(self, lanes: Any, values: Sequence[Any], *others: Any) -> list[Any]:
        """Returns the softmax of the row, for a lane's values and for others of the row."""
        keys = [pair.key for pair in lanes.pairs([lanes.key(value) for value in values])]
        while len(keys) > 1:
            first, second, *rest = keys
            keys = [*rest, lanes.select(lanes.greater(first, second), first, second)]
        largest = lanes.bits(lanes.warp_max(keys[0]))
        terms = [lanes.apply(_EXP, value, largest) for value in (*values, *others)]
        total = functools.reduce(
            functools.partial(lanes.apply, _ADD), lanes.within_row(terms[: self.width])
        )
        total = _sum_of_lanes(lanes, total, WARP)
        return [lanes.apply(_DIVIDE, term, total) for term in terms]

    def choose(self, lanes: Any, values: Sequence[Any], scores: Sequence[Any]) -> _Pair:
        """Returns, in lane i < k, the i-th largest of a row, and elsewhere any of its columns.

        `values` is what a lane holds of the row, and `scores` of the scores of its groups.
        """
        pairs = lanes.pairs([lanes.key(value) for value in values])
        if self.groups is not None:
            kept = self.kept(lanes, [lanes.key(score) for score in scores])
            out = lanes.word(_KEY_OF_MINUS_INFINITY)
            pairs = [_Pair(lanes.select(kept, p.key, out), p.order) for p in pairs]
        chosen = _Pair(lanes.word(0), lanes.complement(lanes.word(0)))
        for step in range(self.k):
            best = _warp_best(lanes, _best(lanes, pairs))
            pairs = [_without(lanes, pair, best) for pair in pairs]
            mine = lanes.equal(lanes.lane, lanes.word(step))
            chosen = _Pair(*(lanes.select(mine, *each) for each in zip(best, chosen, strict=True)))
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
        if self.groups.best == 2:
            total = lanes.apply(_ADD, lanes.word(0), lanes.bits(first))
            first = lanes.key(lanes.apply(_ADD, total, lanes.bits(second)))
        own = _Pair(first, lanes.complement(lanes.divided(lanes.lane, lanes_of_group)))
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


def _sum_of_lanes(lanes: Any, word: Any, number: int) -> Any:
    """Returns the float32 sum of groups of `number` lanes, a power of two, in each of them."""
    distance = number // 2
    while distance:
        word = lanes.apply(_ADD, word, lanes.exchange(word, distance))
        distance //= 2
    return word


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

    def bits(self, key: Value) -> Value:
        """Returns the bits whose key this is."""
        below_zero = self.complement(arith.shrsi(key, mosaic.i32(31)))
        return arith.xori(key, arith.ori(below_zero, mosaic.i32(_SIGN)))

    def within_row(self, words: Sequence[Value]) -> list[Value]:
        """Returns a lane's words, 0 past the last column."""
        if self.columns % WARP == 0:
            return list(words)
        first, last = arith.muli(self.lane, mosaic.i32(self.width)), mosaic.i32(self.columns)
        columns = [arith.addi(first, mosaic.i32(i)) for i in range(self.width)]
        return [
            arith.select(mosaic.below(column, last), word, mosaic.i32(0))
            for column, word in zip(columns, words, strict=True)
        ]

    def apply(self, function: Elementwise, *words: Value) -> Value:
        """Applies a function of float32 to the numbers whose bits the words are."""
        floats = [arith.bitcast(mosaic.float_type(), word) for word in words]
        return arith.bitcast(mosaic.integer_type(32), function.emit(*floats))

    def gather(self, ref: Value, row: Value, column: Value) -> Value:
        place = arith.addi(arith.muli(row, mosaic.i32(self.columns)), column)
        i32 = mosaic.integer_type(32)
        return llvm.load(i32, mosaic.element_pointer(mosaic.pointer(ref), place, i32))

    def store_chosen(self, word: Value, ref: Value, row: Value, k: int) -> None:
        """Stores the words of the first k lanes to a row of k."""
        with mosaic.when(mosaic.below(self.lane, mosaic.i32(k))):
            place = arith.addi(arith.muli(row, mosaic.i32(k)), self.lane)
            llvm.store(word, mosaic.element_pointer(mosaic.pointer(ref), place, word.type))

    def store_row(self, words: Sequence[Value], ref: Value, row: Value) -> None:
        """Stores what each lane holds to a row, where `load` finds it."""
        i32, base = mosaic.integer_type(32), mosaic.pointer(ref)
        first = arith.muli(self.lane, mosaic.i32(self.width))
        start = arith.addi(arith.muli(row, mosaic.i32(self.columns)), first)
        if self.columns % WARP == 0:
            length = math.gcd(self.width, 4)
            of_vector = mosaic.vector_type(length, i32)
            for i in range(0, self.width, length):
                pointer = mosaic.element_pointer(base, arith.addi(start, mosaic.i32(i)), i32)
                values = vector.from_elements(of_vector, list(words[i : i + length]))
                llvm.store(values, pointer, alignment=4 * length)
            return
        for i, word in enumerate(words):
            column = arith.addi(first, mosaic.i32(i))
            with mosaic.when(mosaic.below(column, mosaic.i32(self.columns))):
                place = arith.addi(start, mosaic.i32(i))
                llvm.store(word, mosaic.element_pointer(base, place, i32))

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
    """Computes what `_Lanes` emits, in Pallas' interpreter; words are arrays [WARP] of uint32."""

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

    def bits(self, key: Any) -> Any:
        return jnp.where(key >= jnp.uint32(_SIGN), key ^ jnp.uint32(_SIGN), ~key)

    def within_row(self, words: Sequence[Any]) -> list[Any]:
        columns = [self.lane * self.width + i for i in range(self.width)]
        return [
            jnp.where(column < self.columns, word, 0)
            for column, word in zip(columns, words, strict=True)
        ]

    def apply(self, function: Elementwise, *words: Any) -> Any:
        floats = [lax.bitcast_convert_type(word, jnp.float32) for word in words]
        return lax.bitcast_convert_type(function.function(*floats), jnp.uint32)

    def gather(self, ref: Any, row: Any, column: Any) -> Any:
        return lax.bitcast_convert_type(ref[row], jnp.uint32)[column]

    def store_chosen(self, word: Any, ref: Any, row: Any, k: int) -> None:
        ref[row] = lax.bitcast_convert_type(word[:k], ref.dtype)

    def store_row(self, words: Sequence[Any], ref: Any, row: Any) -> None:
        values = jnp.stack(words, axis=1).reshape(-1)[: self.columns]
        ref[row] = lax.bitcast_convert_type(values, ref.dtype)

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
