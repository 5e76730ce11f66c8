"""Chooses the k best columns (experts) of every row without sorting: one warp per row.

A lane holds neighbouring columns of its row in registers, each as a tuple of unsigned 32-bit words.
The first words are keys of the numbers by which columns are compared. A key grows with its number
in the total order of IEEE 754, which `lax.top_k` also uses: -NaN < -inf < -0 < 0 < inf < NaN. The
last word falls with the column's index, so that among equal columns the first has the largest
tuple. Each of k steps takes the largest tuple of the row, by one reduction over the warp per word,
and clears it in its lane.

Columns without a bias are compared by their logits. With a bias they are compared by (high, low,
logit) of `order`. The warp first chooses by `high` alone. It chooses again, by all three, only if
two of the best columns, or the last of them and another column, have equal highs.

With groups, the lanes of a group first compute the group's keys, the warp chooses the best groups
in the same way, and columns of other groups count as -inf. The sums of the groups' two best highs
choose the groups, unless their rounding errors may decide.

If asked for, the warp also computes the row's softmax. The lanes that hold the choices compute the
weights. The arithmetic is that of XLA's kernels, except that sums are taken in the order of the
lanes, which does not depend on the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import LANES, WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.routing import order
from pallas_kernels.routing.plan import LEAST_SUM, Groups, Weighing, unavailable_reason

_ROWS = LANES // WARP  # a block has this many rows, one per warp
_SIGN = 0x80000000
_ADD = Elementwise(lambda a, b: a + b, 2)
_MAX = Elementwise(lambda a, b: jnp.maximum(a, b), 2)
_EXP = Elementwise(lambda value, largest: jnp.exp(value - largest), 2)
_DIVIDE = Elementwise(lambda a, b: a / b, 2)
_SCALE = Elementwise(lambda x, scale: x * scale, 2)
_EXPONENT = Elementwise(lambda logit: jnp.minimum(logit, np.float32(0)), 1)
_FACTOR = Elementwise(lambda logit: jax.nn.sigmoid(jnp.abs(logit)), 1)
_OF_SUMS = {function: Elementwise(function, arity) for function, arity in order.ARITY.items()}
_OF_TWO = {name: Elementwise(function, 2) for name, function in order.OF_TWO.items()}
_INFINITY = 0x7F800000
_KEY_OF_MINUS_INFINITY = 0x007FFFFF


class Chosen(NamedTuple):
    """The choices of each of T rows of E columns.

    Attributes:
      columns: [T, k] int32, the chosen columns, best first.
      chosen: [T, k] float32, the inputs of their weights.
      weights: [T, k] float32, their weights.
      softmax: [T, E] float32, the softmax of each row of logits; None unless it was asked for.
    """

    columns: Any
    chosen: Any
    weights: Any
    softmax: Any = None


def top_k(
    logits: jax.Array,
    k: int,
    weighing: Weighing,
    *,
    scores: str = "logit",
    rounded: jax.Array | None = None,
    bias: jax.Array | None = None,
    kept: jax.Array | None = None,
    gathered: jax.Array | None = None,
    groups: Groups | None = None,
    softmax: bool = False,
    interpret: Any = None,
) -> Chosen:
    """Chooses the k best columns of each row.

    Args:
      logits: [T, E] float32, T > 0.
      k: how many to choose.
      weighing: what weights are made of.
      scores: what the bias is added to, and what is summed of groups: a key of `order.OF_TWO`.
      rounded: [T, E] float32, the scores if they are neither logits nor sigmoids and a bias or
        groups need them; else None.
      bias: [1, E] or [T, E] float32, or None.
      kept: [T, E] int32, 0 for columns that count as -inf; None: none do.
      gathered: [T, E] float32, what is weighed; None: the softmax if it is made and is not
        normalized again, else the logits.
      groups: the groups of columns to choose from, or None.
      softmax: whether to return the softmax of the logits.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.
    """
    rows, columns = logits.shape
    if reason := unavailable_reason(columns, k, groups):
        raise ValueError(f"the kernel cannot run: {reason}.")
    out_type = [
        jax.ShapeDtypeStruct((rows, k), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)
    ]
    if softmax:
        out_type.append(jax.ShapeDtypeStruct((rows, columns), jnp.float32))
    operands = {
        "logits": logits,
        "rounded": rounded,
        "bias": bias,
        "kept": kept,
        "gathered": gathered,
    }
    given = {name: array for name, array in operands.items() if array is not None}
    kernel = _TopK(
        rows,
        columns,
        k,
        weighing,
        scores,
        groups,
        softmax,
        tuple(given),
        bias is not None and bias.shape[0] == 1,
        bool(interpret),
    )
    return Chosen(
        *mosaic.kernel(
            kernel,
            out_type=out_type,
            grid=(pl.cdiv(rows, _ROWS),),
            grid_names=("block",),
            interpret=interpret,
            kernel_name="top_k",
        )(*given.values())
    )


# The words of a column or of a group: its keys, and last a word that distinguishes equal ones.
# Words of 0 stand for no column.
_Words = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _TopK:
    rows: int
    columns: int
    k: int
    weighing: Weighing
    scores: str
    groups: Groups | None
    makes_softmax: bool
    given: tuple[str, ...]  # the operands' names
    has_one_bias: bool  # of all rows
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
        """Chooses the columns of a row, and computes their weights. Words hold bits of numbers."""
        operands = dict(zip(self.given, refs, strict=False))
        out = Chosen(*refs[len(operands) :])
        columns, chosen = self.choose(lanes, row, operands)
        if self.makes_softmax:
            logits = lanes.load(operands["logits"], row)
            *softmax, of_chosen = self.softmax(lanes, logits, chosen)
            lanes.store_row(softmax, out.softmax, row)
            chosen = chosen if self.weighing.normalize else of_chosen
        if "gathered" in operands:
            chosen = lanes.gather(operands["gathered"], row, columns)
        lanes.store_chosen(columns, out.columns, row, self.k)
        lanes.store_chosen(chosen, out.chosen, row, self.k)
        lanes.store_chosen(self.weigh(lanes, chosen), out.weights, row, self.k)

    def weigh(self, lanes: Any, chosen: Any) -> Any:
        """Computes the weights of the choices that the first k lanes hold."""
        weighing = self.weighing
        scale = lanes.number(weighing.scale)
        if not weighing.normalize:
            return lanes.apply(_SCALE, chosen, scale)
        is_choice = lanes.greater(lanes.word(self.k), lanes.lane)
        exponent = lanes.apply(_EXPONENT, chosen) if weighing.sigmoid else chosen
        key = lanes.warp_max(lanes.select(is_choice, lanes.key(exponent), lanes.word(0)))
        floor = lanes.number(weighing.log_epsilon)
        largest = lanes.apply(_MAX, lanes.bits(key), floor)
        terms = lanes.apply(_EXP, exponent, largest)
        if weighing.sigmoid:
            terms = lanes.apply(_SCALE, terms, lanes.apply(_FACTOR, chosen))
        total = lanes.select(is_choice, terms, lanes.word(0))
        total = _sum_of_lanes(lanes, total, pl.next_power_of_2(self.k))
        if weighing.epsilon:
            total = lanes.apply(_ADD, total, lanes.apply(_EXP, floor, largest))
        total = lanes.apply(_MAX, total, lanes.number(LEAST_SUM))
        return lanes.apply(_SCALE, lanes.apply(_DIVIDE, terms, total), scale)

    def softmax(self, lanes: Any, values: Sequence[Any], *others: Any) -> list[Any]:
        """Computes the row's softmax for a lane's own values, and for other values of the row."""
        keys = [words[0] for words in lanes.columns_of([[lanes.key(value) for value in values]])]
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

    def choose(self, lanes: Any, row: Any, operands: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns, in lane i < k, the i-th best column of a row and its logit.

        Other lanes hold any column.
        """

        def by_all_keys() -> list[Any]:
            best, _ = self.chosen(lanes, row, operands, exact=True)
            return [lanes.complement(best[-1]), lanes.bits(best[-2])]

        compares_sums = self.groups is not None and self.groups.best == 2
        if not compares_sums and "bias" not in operands:
            return tuple(by_all_keys())
        best, is_sure = self.chosen(lanes, row, operands, exact=False)
        column = lanes.complement(best[-1])
        if "bias" in operands:
            logit = lanes.gather(operands["logits"], row, column)
        else:
            logit = lanes.bits(best[-2])
        return tuple(lanes.unless(is_sure, by_all_keys, [column, logit]))

    def chosen(
        self, lanes: Any, row: Any, operands: Mapping[str, Any], *, exact: bool
    ) -> tuple[_Words, Any]:
        """Returns the words of the i-th best column in lane i, and whether they are right.

        With `exact` columns and groups are compared by all of their keys, which is right.
        """
        keys = self.keys(lanes, row, operands, exact)
        of_columns = keys if "bias" in operands else keys[-1:]
        columns = lanes.columns_of(of_columns)
        none, one = lanes.word(0), lanes.word(1)
        doubts = none
        kept = None
        if self.groups is not None:
            of_groups = [words[:-1] for words in lanes.columns_of(keys)]
            if not exact:
                of_groups = [words[:1] for words in of_groups]
            is_kept, doubts = self.kept(lanes, of_groups, exact)
            kept = [is_kept] * self.width
        elif "kept" in operands:
            kept = [lanes.greater(word, none) for word in lanes.load(operands["kept"], row)]
        if kept is not None:
            out = lanes.word(_KEY_OF_MINUS_INFINITY)
            columns = [
                (*(lanes.select(is_kept, key, out) for key in words[:-1]), words[-1])
                for is_kept, words in zip(kept, columns, strict=True)
            ]
        compares = "bias" in operands and not exact
        chosen: _Words = (*[none] * (len(columns[0]) - 1), lanes.complement(none))
        last = None
        for step in range(self.k):
            best = _warp_best(lanes, _best(lanes, columns))
            columns = [_without(lanes, words, best) for words in columns]
            mine = lanes.equal(lanes.lane, lanes.word(step))
            chosen = _selected(lanes, mine, best, chosen)
            if compares and last is not None:
                doubts = lanes.select(lanes.equal(best[0], last), one, doubts)
            last = best[0]
        if compares:
            is_last = [lanes.equal(words[0], last) for words in columns]
            equals_last = functools.reduce(lanes.either, is_last)
            doubts = lanes.warp_max(lanes.select(equals_last, one, doubts))
        return chosen, lanes.equal(doubts, none)

    def keys(
        self, lanes: Any, row: Any, operands: Mapping[str, Any], exact: bool
    ) -> list[list[Any]]:
        """Returns lists of keys of a lane's columns; columns are compared by the first list first.

        With `exact` the lists are the keys of (high, low, logit), or of the logit alone if there
        are no sums. Without `exact` they are the keys of `high` if there are sums, and of the logit
        if there is no bias.
        """
        bias = operands.get("bias")
        has_sums = order.has_sums(self.scores, bias, self.groups)
        of_logits = self.scores in ("logit", "sigmoid")
        nothing = [None] * self.width
        logits, rounded, biases = nothing, nothing, nothing
        if exact or of_logits or bias is None:
            logits = lanes.load(operands["logits"], row, again=exact)
        if has_sums and not of_logits:
            rounded = lanes.load(operands["rounded"], row, again=exact)
        if bias is not None:
            of_row = lanes.first_row(row) if self.has_one_bias else row
            biases = lanes.load(bias, of_row, again=exact)
        keys = []
        if has_sums:
            sums = [
                order.score_and_bias(lanes, self.scores, *of_column, rounded=not exact)
                for of_column in zip(logits, rounded, biases, strict=True)
            ]
            keys = [list(map(lanes.key, parts)) for parts in zip(*sums, strict=True)]
        if exact or bias is None:
            keys.append(list(map(lanes.key, logits)))
        return keys

    def kept(self, lanes: Any, columns: Sequence[_Words], exact: bool) -> tuple[Any, Any]:
        """Returns whether each lane's group is among the best, and 0 where that is right.

        `columns` are keys alone.
        """
        assert self.groups is not None
        lanes_of_group = WARP // self.groups.number
        first: _Words = columns[0]
        second: _Words | None = None
        for words in columns[1:]:
            first, second = _two_largest(lanes, first, second, words, None)
        distance = 1
        while distance < lanes_of_group:
            other = tuple(lanes.exchange(key, distance) for key in first)
            other_second = second and tuple(lanes.exchange(key, distance) for key in second)
            first, second = _two_largest(lanes, first, second, other, other_second)
            distance *= 2
        none = doubt = lanes.word(0)
        upper = first[0]
        if self.groups.best == 2:
            assert second is not None  # a group has two columns or more
            if exact:
                first = self.sum_of(lanes, first, second)
            else:
                highs = lanes.bits(first[0]), lanes.bits(second[0])
                total, lower, bound = order.bounds_of_two(lanes, *highs)
                first, upper = (lanes.key(lower),), lanes.key(bound)
                doubt = lanes.where_nan(total, lanes.word(1))
        own: _Words = (*first, lanes.complement(lanes.divided(lanes.lane, lanes_of_group)))
        kept, best = None, own
        for _ in range(self.groups.kept):
            best = _warp_best(lanes, own)
            is_best = lanes.equal(own[-1], best[-1])
            kept = is_best if kept is None else lanes.either(kept, is_best)
            own = _without(lanes, own, best)
        if not exact:
            # Those that are left have lower bounds in `own`, and may not reach the last kept.
            reaches = lanes.select(lanes.greater(best[0], upper), none, lanes.word(1))
            doubt = lanes.either(doubt, lanes.select(kept, none, reaches))
            doubt = lanes.warp_max(doubt)
        return kept, doubt

    def sum_of(self, lanes: Any, *keys: _Words) -> _Words:
        """Returns the keys of a group of these two best columns."""
        numbers = [[lanes.bits(key) for key in words] for words in keys]
        logits = [words[-1] for words in numbers]
        sums = [
            words[:-1] or [logit, lanes.zero()]
            for words, logit in zip(numbers, logits, strict=True)
        ]
        total = order.add(lanes, *sums)
        tie = lanes.apply(_OF_TWO[self.scores], *logits)
        return tuple(lanes.key(word) for word in (*total, tie))


def _selected(lanes: Any, condition: Any, a: _Words, b: _Words) -> _Words:
    return tuple(lanes.select(condition, *words) for words in zip(a, b, strict=True))


def _is_larger(lanes: Any, a: _Words, b: _Words) -> Any:
    *firsts, last = zip(a, b, strict=True)
    larger = lanes.greater(*last)
    for words in reversed(firsts):
        larger = lanes.either(lanes.greater(*words), lanes.both(lanes.equal(*words), larger))
    return larger


def _best(lanes: Any, columns: Sequence[_Words]) -> _Words:
    """Returns the largest words of a lane."""
    columns = list(columns)
    while len(columns) > 1:
        odd = columns[len(columns) // 2 * 2 :]
        pairs = zip(columns[::2], columns[1::2], strict=False)
        columns = [_selected(lanes, _is_larger(lanes, a, b), a, b) for a, b in pairs] + odd
    return columns[0]


def _warp_best(lanes: Any, own: _Words) -> _Words:
    """Returns the largest words of the warp, in every lane."""
    best, is_best = [lanes.warp_max(own[0])], None
    for word in own[1:]:
        is_last = lanes.equal(own[len(best) - 1], best[-1])
        is_best = is_last if is_best is None else lanes.both(is_best, is_last)
        best.append(lanes.warp_max(lanes.select(is_best, word, lanes.word(0))))
    return tuple(best)


def _without(lanes: Any, words: _Words, taken: _Words) -> _Words:
    """Returns `words`, or words of 0 if they equal the taken words."""
    gone, none = lanes.equal(words[-1], taken[-1]), lanes.word(0)
    return tuple(lanes.select(gone, none, word) for word in words)


def _two_largest(
    lanes: Any, a: _Words, a_second: _Words | None, b: _Words, b_second: _Words | None
) -> tuple[_Words, _Words]:
    """Returns the two largest of a, a_second, b and b_second, where a second may be None."""
    a_is_larger = _is_larger(lanes, a, b)
    first, second = _selected(lanes, a_is_larger, a, b), _selected(lanes, a_is_larger, b, a)
    for other in (a_second, b_second):
        if other is not None:
            second = _selected(lanes, _is_larger(lanes, other, second), other, second)
    return first, second


def _sum_of_lanes(lanes: Any, word: Any, number: int) -> Any:
    """Returns to each lane the float32 sum over its group of `number` lanes, a power of two."""
    distance = number // 2
    while distance:
        word = lanes.apply(_ADD, word, lanes.exchange(word, distance))
        distance //= 2
    return word


class _Lanes:
    """Emits the operations of `_TopK` for one thread; words are unsigned, with 32 bits."""

    def __init__(self, columns: int, width: int) -> None:
        self.columns, self.width = columns, width
        self.lane = arith.remui(mosaic.lane(), mosaic.i32(WARP))

    def first_row(self, row: Value) -> Value:
        return self.word(0)

    def load(self, ref: Value, row: Value, *, again: bool = False) -> list[Value]:
        """Returns the bits of this lane's columns of a row; past the last column, of that one.

        With `again` they are loaded even if they have been before, and need no registers meanwhile.
        """
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
                loaded = llvm.load(of_vector, pointer, alignment=4 * length, volatile_=again)
                bits += [vector.extract(loaded, [], [j]) for j in range(length)]
            return bits
        last = mosaic.i32(self.columns - 1)
        columns = [arith.minui(arith.addi(first, mosaic.i32(i)), last) for i in range(self.width)]
        places = [arith.addi(start, column) for column in columns]
        pointers = [mosaic.element_pointer(base, place, i32) for place in places]
        return [llvm.load(i32, pointer, volatile_=again) for pointer in pointers]

    def key(self, bits: Value) -> Value:
        spread = arith.shrsi(bits, mosaic.i32(31))
        return arith.xori(bits, arith.ori(spread, mosaic.i32(_SIGN)))

    def columns_of(self, keys: Sequence[Sequence[Value]]) -> list[_Words]:
        """Returns the words of this lane's columns; 0 past the row's last column."""
        first = arith.muli(self.lane, mosaic.i32(self.width))
        columns = []
        for i, of_column in enumerate(zip(*keys, strict=True)):
            column = arith.addi(first, mosaic.i32(i))
            words = (*of_column, self.complement(column))
            if self.columns % WARP:
                is_column, none = mosaic.below(column, mosaic.i32(self.columns)), self.word(0)
                words = tuple(arith.select(is_column, word, none) for word in words)
            columns.append(words)
        return columns

    def bits(self, key: Value) -> Value:
        """Returns the bits of the number that has this key."""
        below_zero = self.complement(arith.shrsi(key, mosaic.i32(31)))
        return arith.xori(key, arith.ori(below_zero, mosaic.i32(_SIGN)))

    def within_row(self, words: Sequence[Value]) -> list[Value]:
        """Replaces a lane's words past the row's last column by 0."""
        if self.columns % WARP == 0:
            return list(words)
        first, last = arith.muli(self.lane, mosaic.i32(self.width)), mosaic.i32(self.columns)
        columns = [arith.addi(first, mosaic.i32(i)) for i in range(self.width)]
        return [
            arith.select(mosaic.below(column, last), word, mosaic.i32(0))
            for column, word in zip(columns, words, strict=True)
        ]

    def apply(self, function: Elementwise, *words: Value) -> Value:
        """Applies a function of float32 numbers to words that hold their bits."""
        floats = [arith.bitcast(mosaic.float_type(), word) for word in words]
        return arith.bitcast(mosaic.integer_type(32), function.emit(*floats))

    def call(self, function: Callable[..., jax.Array], *words: Any) -> Any:
        return self.apply(_OF_SUMS[function], *words)

    def zero(self) -> Any:
        return self.word(0)

    def where_finite(self, of: Any, value: Any) -> Any:
        is_finite = self.greater(self.word(_INFINITY), self.both(of, self.word(_SIGN - 1)))
        return self.select(is_finite, value, self.zero())

    def where_nan(self, of: Any, value: Any) -> Any:
        is_nan = self.greater(self.both(of, self.word(_SIGN - 1)), self.word(_INFINITY))
        return self.select(is_nan, value, self.zero())

    def where_positive(self, of: Any, value: Any, other: Any) -> Any:
        # Numbers above 0, infinity included, have the bits 1 to _INFINITY. Words are unsigned, so
        # 0 - 1 is the largest word.
        is_positive = self.greater(self.word(_INFINITY), self.minus_one(of))
        return self.select(is_positive, value, other)

    def unless(
        self, condition: Value, function: Callable[[], list[Value]], values: list[Value]
    ) -> list[Value]:
        """Returns `values` where the condition holds, else what `function` emits.

        The condition must be the same for all threads of a warp.
        """
        return mosaic.unless(condition, function, values)

    def minus_one(self, word: Value) -> Value:
        return arith.subi(word, self.word(1))

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
        """Stores each lane's words to the columns that `load` reads."""
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
        return mosaic.warp_max(word)

    def exchange(self, word: Value, distance: int) -> Value:
        """Returns the word of the lane whose number differs by `distance`, a power of two."""
        return mosaic.shuffle(word, distance)

    def word(self, value: int) -> Value:
        return mosaic.i32(value)

    def number(self, value: float) -> Any:
        """Returns the bits of a float32."""
        return self.word(int(np.float32(value).view(np.uint32)))

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
    """Computes the operations of `_Lanes` in Pallas' interpreter; words are [WARP] uint32."""

    def __init__(self, columns: int, width: int) -> None:
        self.columns, self.width = columns, width
        self.lane = jnp.arange(WARP, dtype=jnp.uint32)

    def first_row(self, row: Any) -> Any:
        return 0 * row

    def unless(self, condition: Any, function: Any, values: list[Any]) -> list[Any]:
        return lax.cond(condition[0], lambda: values, function)

    def minus_one(self, word: Any) -> Any:
        return word - jnp.uint32(1)

    def load(self, ref: Any, row: Any, *, again: bool = False) -> list[Any]:
        values = jnp.pad(ref[row], (0, WARP * self.width - self.columns), mode="edge")
        bits = lax.bitcast_convert_type(values, jnp.uint32).reshape(WARP, self.width)
        return [bits[:, i] for i in range(self.width)]

    def key(self, bits: Any) -> Any:
        return jnp.where(bits >= jnp.uint32(_SIGN), ~bits, bits | jnp.uint32(_SIGN))

    def columns_of(self, keys: Sequence[Sequence[Any]]) -> list[_Words]:
        columns = []
        for i, of_column in enumerate(zip(*keys, strict=True)):
            column = self.lane * self.width + i
            is_column = column < self.columns
            words = (*of_column, ~column)
            columns.append(tuple(jnp.where(is_column, word, 0) for word in words))
        return columns

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
