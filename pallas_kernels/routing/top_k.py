"""Top-k routing kernel: chooses the k best columns (experts) of every row (token) without sorting.

One warp handles one row. Each lane of the warp holds some neighbouring columns of the row in
registers, each as a pair of unsigned 32-bit words: an integer *key* of the float32 number by which
columns are compared, and the complement of the column's index. Keys have the total order of IEEE
754, which `lax.top_k` also uses: -NaN < -inf < -0 < 0 < inf < NaN. So the best column has the
largest pair, and of columns with equal keys the one with the lowest index has. Each of k steps
finds the largest pair of the row, by one warp reduction per word, and then sets it to 0.

In group-limited routing, each row chooses columns only from its best groups of columns. The warp
chooses the best groups in the same way as columns, and columns of other groups count as -inf.

On request, the warp also computes the row's softmax. The results have the bits of XLA's kernels,
except for sums over a row, which are added in the order of the lanes. This order does not depend on
the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fabric import compiler, mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import WARP, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.routing.plan import LEAST_SUM, Groups, Weighing

# The number of rows that a thread block handles: one for each warp.
_ROWS = WARPGROUP // WARP
_SIGN = 0x80000000
_ADD = Elementwise(lambda a, b: a + b, 2)
_MAX = Elementwise(lambda a, b: jnp.maximum(a, b), 2)
_EXP = Elementwise(lambda value, largest: jnp.exp(value - largest), 2)
_DIVIDE = Elementwise(lambda a, b: a / b, 2)
_MULTIPLY = Elementwise(lambda a, b: a * b, 2)
# sigmoid(x) = exp(_EXPONENT(x)) * _FACTOR(x), and the factor is at least 1/2.
_EXPONENT = Elementwise(lambda logit: jnp.minimum(logit, np.float32(0)), 1)
_FACTOR = Elementwise(lambda logit: jax.nn.sigmoid(jnp.abs(logit)), 1)
_SIGMOID = Elementwise(jax.nn.sigmoid, 1)
# The bits of -inf are 0xFF800000; `_key` flips the bits of negative numbers.
_KEY_OF_MINUS_INFINITY = 0x007FFFFF


class Chosen(NamedTuple):
    """The chosen columns (experts) of each of T rows (tokens), and their weights."""

    columns: Any  # [T, k] int32, best first
    # [T, k] float32, the numbers from which the weights are computed: logits, softmax
    # probabilities, or `top_k`'s argument `gathered` at the columns.
    chosen: Any
    weights: Any  # [T, k] float32
    softmax: Any = None  # [T, E] float32, of the logits, if `top_k` was asked for it


def top_k(
    logits: jax.Array,
    k: int,
    weighing: Weighing,
    *,
    compared: jax.Array | None = None,
    sigmoid: bool = False,
    bias: jax.Array | None = None,
    gathered: jax.Array | None = None,
    groups: Groups | None = None,
    softmax: bool = False,
) -> Chosen:
    """Chooses the k best columns (experts) of each row (token), and computes their weights.

    Args:
      logits: [T, E] float32, T > 0.
      k: the number of columns to choose in each row.
      weighing: how weights are computed.
      compared: [T, E] float32, the numbers by which columns and groups are compared, or None for
        the logits.
      sigmoid: whether the sigmoids of these numbers are compared instead.
      bias: [1, E] or [T, E] float32 added to the compared numbers, or None.
      gathered: [T, E] float32, the numbers from which weights are computed; see `Weighing`. If
        None, the numbers are the softmax if `softmax` is set and `weighing` does not normalize,
        else the logits.
      groups: the groups of columns for group-limited routing, or None.
      softmax: whether to return the softmax of the logits, too.

    `plan.unavailable_reason` says which sizes the kernel supports.
    """
    rows, columns = logits.shape
    out_type = [
        jax.ShapeDtypeStruct((rows, k), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)
    ]
    if softmax:
        out_type.append(jax.ShapeDtypeStruct((rows, columns), jnp.float32))
    operands = {"logits": logits, "compared": compared, "bias": bias, "gathered": gathered}
    given = {name: array for name, array in operands.items() if array is not None}
    has_one_bias = bias is not None and bias.shape[0] == 1
    kernel = _TopK(
        rows,
        columns,
        k,
        weighing,
        sigmoid=sigmoid,
        groups=groups,
        makes_softmax=softmax,
        given=tuple(given),
        has_one_bias=has_one_bias,
    )
    num_blocks = pl.cdiv(rows, _ROWS)
    launch = compiler.kernel(kernel, out_type=out_type, num_blocks=num_blocks, kernel_name="top_k")
    return Chosen(*launch(*given.values()))


class _Pair(NamedTuple):
    """A column or a group of columns; zeros stand for one that is chosen already."""

    key: Value  # of its number
    complement: Value  # of its index


@dataclasses.dataclass(frozen=True)
class _TopK:
    """The kernel of `top_k`; its references are of the operands `given`, then of the results."""

    rows: int
    columns: int
    k: int
    weighing: Weighing
    sigmoid: bool
    groups: Groups | None
    makes_softmax: bool
    # The names of `top_k`'s operands that are not None, in the order in which they are passed.
    given: tuple[str, ...]
    has_one_bias: bool  # whether the bias is [1, E], the same for all rows

    def __call__(self, *refs: Any) -> None:
        mosaic.inline(self.emit, [lax.axis_index("block"), *refs])

    def emit(self, block: Any, *refs: Value) -> None:
        # The number of the row that this warp handles.
        row = mosaic.add(
            mosaic.mul(mosaic.scalar(block), _ROWS),
            arith.divui(mosaic.warpgroup_thread(), mosaic.i32(WARP)),
        )
        with mosaic.when(mosaic.below(row, self.rows)):
            self.one_row(_Lanes(self.columns), row, refs)

    def one_row(self, lanes: _Lanes, row: Value, refs: Sequence[Value]) -> None:
        """Chooses the columns of a row, computes their weights, and stores the row's results."""
        operands = dict(zip(self.given, refs[: len(self.given)], strict=True))
        out = Chosen(*refs[len(operands) :])
        columns, chosen = self.choose(lanes, row, operands)
        if self.makes_softmax:
            logits = lanes.load(operands["logits"], row)
            *softmax, probability = self.softmax(lanes, logits, chosen)
            lanes.store_row(softmax, out.softmax, row)
            # Logits are logarithms of the probabilities, up to a constant; see `Weighing`.
            chosen = chosen if self.weighing.normalize else probability
        if "gathered" in operands:
            chosen = lanes.gather(operands["gathered"], row, columns)
        lanes.store_chosen(columns, out.columns, row, self.k)
        lanes.store_chosen(chosen, out.chosen, row, self.k)
        lanes.store_chosen(self.weigh(lanes, chosen), out.weights, row, self.k)

    def choose(
        self, lanes: _Lanes, row: Value, operands: Mapping[str, Value]
    ) -> tuple[Value, Value]:
        """Returns the k best columns of a row and their logits' bits: in lane i the i-th best."""
        pairs = lanes.pairs([_key(number) for number in self.compared(lanes, row, operands)])
        if self.groups is not None:
            is_kept = self.is_kept(lanes, self.groups, [key for key, _ in pairs])
            excluded = mosaic.i32(_KEY_OF_MINUS_INFINITY)
            pairs = [pair._replace(key=arith.select(is_kept, pair.key, excluded)) for pair in pairs]
        zero = mosaic.i32(0)
        # Lanes from k on hold column 0.
        chosen = _Pair(zero, _complement(zero))
        for step in range(self.k):
            best = _warp_best(_best(pairs))
            pairs = [_without(pair, best) for pair in pairs]
            chosen = _selected(mosaic.equal(lanes.lane, step), best, chosen)
        column = _complement(chosen.complement)
        if "compared" in operands or self.sigmoid or "bias" in operands:
            return column, lanes.gather(operands["logits"], row, column)
        # The logits themselves were compared.
        return column, _bits(chosen.key)

    def compared(self, lanes: _Lanes, row: Value, operands: Mapping[str, Value]) -> Sequence[Value]:
        """Returns the numbers by which the columns that a lane holds are compared, as bits."""
        numbers = lanes.load(operands.get("compared", operands["logits"]), row)
        if self.sigmoid:
            numbers = [_apply(_SIGMOID, number) for number in numbers]
        if "bias" in operands:
            biases = lanes.load(operands["bias"], mosaic.i32(0) if self.has_one_bias else row)
            numbers = [_apply(_ADD, *pair) for pair in zip(numbers, biases, strict=True)]
        return numbers

    def is_kept(self, lanes: _Lanes, groups: Groups, keys: Sequence[Value]) -> Value:
        """Returns whether a lane's columns, which have these keys, belong to a chosen group."""
        key = self.group_key(groups, keys)
        group = arith.divui(lanes.lane, mosaic.i32(WARP // groups.number))
        # This lane's group; zeros once it is chosen.
        pair = _Pair(key, _complement(group))
        kept: Value | None = None
        for _ in range(groups.kept):
            best = _warp_best(pair)
            is_best = mosaic.equal(pair.complement, best.complement)
            kept = is_best if kept is None else arith.ori(kept, is_best)
            pair = _without(pair, best)
        return kept

    def group_key(self, groups: Groups, keys: Sequence[Value]) -> Value:
        """Returns the key of a lane's group: of the sum of the group's `best` largest numbers."""
        lanes_of_group = WARP // groups.number
        # The two largest keys of this lane's columns, and then of all lanes of its group.
        largest: Value = keys[0]
        second: Value | None = None  # None if the lane holds one column
        for key in keys[1:]:
            largest, second = _two_largest(largest, second, key, None)
        distance = 1
        while distance < lanes_of_group:
            other = mosaic.shuffle(largest, distance)
            other_second = None if second is None else mosaic.shuffle(second, distance)
            largest, second = _two_largest(largest, second, other, other_second)
            distance *= 2
        if groups.best == 1:
            return largest
        # A group has at least two columns (see `unavailable_reason`).
        assert second is not None
        return _key(_apply(_ADD, _bits(largest), _bits(second)))

    def weigh(self, lanes: _Lanes, chosen: Value) -> Value:
        """Returns the bits of the weight of the i-th best column in lane i; see `Weighing`."""
        # Lane i of `chosen` has the number of the i-th best column, as `Weighing` describes it.
        weighing = self.weighing
        scale = _number(weighing.scale)
        if not weighing.normalize:
            return _apply(_MULTIPLY, chosen, scale)
        is_choice = mosaic.below(lanes.lane, self.k)
        # A column's score is e^exponent, times _FACTOR if it is a sigmoid.
        exponent = _apply(_EXPONENT, chosen) if weighing.sigmoid else chosen
        key = mosaic.warp_max(arith.select(is_choice, _key(exponent), mosaic.i32(0)))
        # Terms are the scores, and `epsilon`, divided by e^largest, so that none overflows.
        log_epsilon = _number(weighing.log_epsilon)
        largest = _apply(_MAX, _bits(key), log_epsilon)
        terms = _apply(_EXP, exponent, largest)
        if weighing.sigmoid:
            terms = _apply(_MULTIPLY, terms, _apply(_FACTOR, chosen))
        total = arith.select(is_choice, terms, mosaic.i32(0))
        total = _sum_of_lanes(total, pl.next_power_of_2(self.k))
        if weighing.epsilon:
            total = _apply(_ADD, total, _apply(_EXP, log_epsilon, largest))
        # Terms are divided by their sum, which must not be 0.
        total = _apply(_MAX, total, _number(LEAST_SUM))
        return _apply(_MULTIPLY, _apply(_DIVIDE, terms, total), scale)

    def softmax(self, lanes: _Lanes, values: Sequence[Value], other: Value) -> list[Value]:
        """Returns the softmax of this lane's logits, and then the probability of `other`."""
        # `other` is, in each lane, the logit of any column of the row.
        keys = lanes.zero_past_row([_key(value) for value in values])
        # The largest number of this lane, by a tree, as in `_best`.
        while len(keys) > 1:
            first, second, *rest = keys
            keys = [*rest, _larger(first, second)]
        largest = _bits(mosaic.warp_max(keys[0]))
        terms = [_apply(_EXP, value, largest) for value in (*values, other)]
        total = functools.reduce(functools.partial(_apply, _ADD), lanes.zero_past_row(terms[:-1]))
        total = _sum_of_lanes(total, WARP)
        return [_apply(_DIVIDE, term, total) for term in terms]


def _key(bits: Value) -> Value:
    # Flips the sign bit, and the other bits of negative numbers.
    spread = arith.shrsi(bits, mosaic.i32(31))
    return arith.xori(bits, arith.ori(spread, mosaic.i32(_SIGN)))


def _bits(key: Value) -> Value:
    """Returns the bits of the float32 number whose key is `key`: the inverse of `_key`."""
    below_zero = _complement(arith.shrsi(key, mosaic.i32(31)))
    return arith.xori(key, arith.ori(below_zero, mosaic.i32(_SIGN)))


def _complement(word: Value) -> Value:
    return arith.xori(word, mosaic.i32(0xFFFFFFFF))


def _number(value: float) -> Value:
    return mosaic.i32(int(np.float32(value).view(np.uint32)))


def _apply(function: Elementwise, *words: Value) -> Value:
    """Applies a function of float32 numbers to their bits; returns bits, too."""
    floats = [arith.bitcast(mosaic.float_type(), word) for word in words]
    return arith.bitcast(mosaic.integer_type(32), function.emit(*floats)[0])


def _selected(condition: Value, a: _Pair, b: _Pair) -> _Pair:
    return _Pair(*(arith.select(condition, x, y) for x, y in zip(a, b, strict=True)))


def _larger(a: Value, b: Value) -> Value:
    return arith.select(mosaic.below(b, a), a, b)


def _best(columns: Sequence[_Pair]) -> _Pair:
    """Returns the best of a lane's columns, by a tree in which few comparisons wait for others."""
    columns = list(columns)
    while len(columns) > 1:
        odd = columns[len(columns) // 2 * 2 :]
        pairs = zip(columns[::2], columns[1::2], strict=False)
        columns = [_selected(_is_larger(a, b), a, b) for a, b in pairs] + odd
    return columns[0]


def _is_larger(a: _Pair, b: _Pair) -> Value:
    # Of two complements, the smaller one is that of the larger index.
    is_tie = mosaic.equal(a.key, b.key)
    wins_tie = arith.andi(is_tie, mosaic.below(b.complement, a.complement))
    return arith.ori(mosaic.below(b.key, a.key), wins_tie)


def _warp_best(pair: _Pair) -> _Pair:
    key = mosaic.warp_max(pair.key)
    complement = arith.select(mosaic.equal(pair.key, key), pair.complement, mosaic.i32(0))
    return _Pair(key, mosaic.warp_max(complement))


def _without(pair: _Pair, taken: _Pair) -> _Pair:
    """Returns `pair`, or zeros if it is `taken`, so that it is not chosen again."""
    zero = mosaic.i32(0)
    is_taken = mosaic.equal(pair.complement, taken.complement)
    return _selected(is_taken, _Pair(zero, zero), pair)


def _two_largest(
    a: Value, a_second: Value | None, b: Value, b_second: Value | None
) -> tuple[Value, Value]:
    """Returns the two largest of a >= a_second and b >= b_second; a None is left out."""
    a_is_larger = mosaic.below(b, a)
    first, second = arith.select(a_is_larger, a, b), arith.select(a_is_larger, b, a)
    for other in (a_second, b_second):
        if other is not None:
            second = _larger(other, second)
    return first, second


def _sum_of_lanes(word: Value, number: int) -> Value:
    """Gives each lane the sum of the float32 words of its set of `number` = 2^i adjacent lanes."""
    distance = number // 2
    while distance:
        word = _apply(_ADD, word, mosaic.shuffle(word, distance))
        distance //= 2
    return word


class _Lanes:
    """A lane of a warp, and the neighbouring columns of a row of `columns` that it holds."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.width = pl.cdiv(columns, WARP)  # the number of columns of a lane
        self.lane = arith.remui(mosaic.warpgroup_thread(), mosaic.i32(WARP))

    def load(self, ref: Value, row: Value) -> list[Value]:
        """Loads the bits of this lane's columns of a row of `ref` [T, E], past its end the last."""
        i32 = mosaic.integer_type(32)
        first = mosaic.mul(self.lane, self.width)
        start = mosaic.mul(row, self.columns)
        base = mosaic.pointer(ref)
        if self.columns % WARP == 0:
            # A vector of 4, 2 or 1 words must begin at a multiple of its length; `start` does.
            length = math.gcd(self.width, 4)
            start = mosaic.add(start, first)
            bits = []
            for i in range(0, self.width, length):
                pointer = mosaic.element_pointer(base, mosaic.add(start, i), i32)
                bits += mosaic.load_numbers(pointer, length)
            return bits
        last = mosaic.i32(self.columns - 1)
        columns = [arith.minui(mosaic.add(first, i), last) for i in range(self.width)]
        places = [mosaic.add(start, column) for column in columns]
        return [llvm.load(i32, mosaic.element_pointer(base, place, i32)) for place in places]

    def pairs(self, keys: Sequence[Value]) -> list[_Pair]:
        """Returns the pairs of this lane's columns, by their keys; key 0 past the last column."""
        # Columns past the last have the lowest key and the highest indices, so none is chosen.
        first = mosaic.mul(self.lane, self.width)
        columns = [mosaic.add(first, i) for i in range(self.width)]
        keys = self.zero_past_row(keys)
        return [_Pair(key, _complement(column)) for key, column in zip(keys, columns, strict=True)]

    def zero_past_row(self, words: Sequence[Value]) -> list[Value]:
        """Returns the words of this lane's columns, but 0 for columns past the row's last one."""
        if self.columns % WARP == 0:
            return list(words)
        first, end = mosaic.mul(self.lane, self.width), mosaic.i32(self.columns)
        columns = [mosaic.add(first, i) for i in range(self.width)]
        return [
            arith.select(mosaic.below(column, end), word, mosaic.i32(0))
            for column, word in zip(columns, words, strict=True)
        ]

    def gather(self, ref: Value, row: Value, column: Value) -> Value:
        """Loads ref[row, column]; each lane has a column of its own. `ref` is [T, E]."""
        place = mosaic.add(mosaic.mul(row, self.columns), column)
        return mosaic.element_at(ref, place, mosaic.integer_type(32))

    def store_chosen(self, word: Value, ref: Value, row: Value, k: int) -> None:
        """Stores `word` of lane i to ref[row, i], for each lane i < k; `ref` is [T, k]."""
        with mosaic.when(mosaic.below(self.lane, k)):
            place = mosaic.add(mosaic.mul(row, k), self.lane)
            llvm.store(word, mosaic.pointer_at(ref, place, mosaic.integer_type(32)))

    def store_row(self, words: Sequence[Value], ref: Value, row: Value) -> None:
        """Stores the words of the columns that this lane holds to row `row` of ref [T, E]."""
        i32, base = mosaic.integer_type(32), mosaic.pointer(ref)
        first = mosaic.mul(self.lane, self.width)
        start = mosaic.add(mosaic.mul(row, self.columns), first)
        if self.columns % WARP == 0:
            length = math.gcd(self.width, 4)
            for i in range(0, self.width, length):
                pointer = mosaic.element_pointer(base, mosaic.add(start, i), i32)
                mosaic.store_numbers(words[i : i + length], pointer)
            return
        for i, word in enumerate(words):
            column = mosaic.add(first, i)
            with mosaic.when(mosaic.below(column, self.columns)):
                place = mosaic.add(start, i)
                llvm.store(word, mosaic.element_pointer(base, place, i32))
