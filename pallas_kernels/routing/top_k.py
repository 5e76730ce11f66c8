"""Top-k routing kernel: chooses the k best columns (experts) of every row (token) without sorting.

One warp handles one row. Each lane of the warp holds some neighbouring columns of the row in
registers. A column is a tuple of unsigned 32-bit words. The last word is the complement of the
column's index. The other words are integer *keys* of the float32 numbers by which columns are
compared. Keys are ordered like their numbers in the total order of IEEE 754, which `lax.top_k` also
uses: -NaN < -inf < -0 < 0 < inf < NaN. So the best column has the largest tuple. If columns have
equal keys, the one with the lowest index has the largest tuple. Each of k steps finds the largest
tuple of the row, by one warp reduction per word, and then sets it to 0.

A column's score grows with its logit. So without a bias, columns are compared by their logits. With
a bias, they are compared by the sum of score and bias. The exact sum is high + low, where `high` is
the sum rounded to float32 (see `order`); if sums are equal, logits decide. The warp first chooses
by `high` alone. This choice is final unless two chosen columns have equal `high`, or the last
chosen column and a column that was not chosen do. Then the warp chooses again, by (high, low,
logit).

In group-limited routing, each row chooses columns only from its best groups of columns. The warp
chooses the best groups in the same way as columns, and columns of other groups count as -inf. If
groups are compared by the sum of their two best scores, the warp first adds only the `high` parts
of the two scores. It compares the exact sums only if rounding errors could change the choice.

On request, the warp also computes the row's softmax. The results have the bits of XLA's kernels,
except for sums over a row, which are added in the order of the lanes. This order does not depend on
the number of rows.
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
from pallas_kernels.fabric.hardware import WARP, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.routing import order
from pallas_kernels.routing.plan import LEAST_SUM, Groups, Weighing, unavailable_reason

# The number of rows that a thread block handles: one for each warp.
_ROWS = WARPGROUP // WARP
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
    """The chosen columns (experts) of each of T rows (tokens), and their weights.

    Attributes:
      columns: [T, k] int32, the chosen columns, best first.
      chosen: [T, k] float32, the numbers from which the weights of the chosen columns are computed:
        logits, softmax probabilities, or `top_k`'s argument `gathered` at the columns.
      weights: [T, k] float32, the weights of the chosen columns.
      softmax: [T, E] float32, the softmax of each row of E logits, or None if `top_k` was not asked
        for it.
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
    """Chooses the k best columns (experts) of each row (token), and computes their weights.

    Args:
      logits: [T, E] float32, T > 0.
      k: the number of columns to choose in each row.
      weighing: how weights are computed.
      scores: the name of the score function of the logits, a key of `order.OF_TWO`. The bias is
        added to scores, and groups are compared by sums of scores.
      rounded: [T, E] float32, the scores, or None. The kernel computes the scores "logit" and
        "sigmoid" itself. It needs other scores only if there is a bias, or if groups are compared
        by the sum of two scores.
      bias: [1, E] or [T, E] float32 added to the scores in the choice, or None.
      kept: [T, E] int32, 0 for columns whose score counts as -inf in the choice; None if there are
        no such columns.
      gathered: [T, E] float32, the numbers from which weights are computed; see `Weighing`. If
        None, the numbers are the softmax if `softmax` is set and `weighing` does not normalize,
        else the logits.
      groups: the groups of columns for group-limited routing, or None.
      softmax: whether to return the softmax of the logits, too.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      The chosen columns, best first, and their weights.

    Raises:
      ValueError: the kernel does not support this number of columns, choices or groups.
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


# The 32-bit words by which columns, or groups, are compared, lexicographically. The first words are
# keys of float32 numbers. The last word is the complement of the index: if all keys are equal, the
# lower index has the larger tuple. A tuple of zeros stands for no column.
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
    # The names of `top_k`'s operands that are not None, in the order in which they are passed.
    given: tuple[str, ...]
    # Whether the bias is [1, E], the same for all rows.
    has_one_bias: bool
    interpreted: bool

    @property
    def width(self) -> int:
        """The number of columns of a row that each lane of a warp holds."""
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
            arith.divui(mosaic.warpgroup_thread(), mosaic.i32(WARP)),
        )
        with mosaic.when(mosaic.below(row, mosaic.i32(self.rows))):
            self.one_row(_Lanes(self.columns, self.width), row, refs)

    def one_row(self, lanes: Any, row: Any, refs: Sequence[Any]) -> None:
        """Chooses the columns of a row, computes their weights, and stores the row's results.

        Args:
          lanes: the operations on the lanes of the warp, a `_Lanes`.
          row: the index of the row.
          refs: references to the kernel's operands, in the order of `given`, and to its outputs.
        """
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
        """Returns the weights of the row's chosen columns: in lane i that of the i-th best column.

        Lane i of `chosen` holds the number from which this weight is computed; see `Weighing`.
        `chosen` and the result are words with the bits of a float32. They are arbitrary in lanes
        from k on.
        """
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
        """Computes the softmax of a row.

        Args:
          lanes: the operations on the lanes of the warp.
          values: the logits of the row: a word for each column that a lane holds.
          others: logits whose probabilities are computed, too, such as those of the chosen columns.

        Returns:
          The probabilities of `values`, and then those of `others`. Arguments and results are
          32-bit words with the bits of float32 numbers.
        """
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
        """Returns the k best columns of a row and their logits, as two words in each lane.

        Lane i < k holds the index of the i-th best column, and the float32 bits of its logit. The
        other lanes hold some valid index, so that every lane can load from its index.
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
        """Chooses the k best columns of a row, exactly or by a faster guess.

        Args:
          lanes: the operations on the lanes of the warp.
          row: the index of the row.
          operands: references to the kernel's operands, by name.
          exact: whether groups, and columns with a bias, are compared by exact sums (of two scores,
            or of score and bias). If False, they are compared by sums rounded to float32. The
            choice is then a guess, which may be wrong where two sums are nearly equal.

        Returns:
          (words, is_sure). In lane i < k, `words` are the words of the i-th best column. `is_sure`
          is whether the choice is certain to be the exact one.
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
        """Computes the keys by which columns and groups are compared, for the columns of a lane.

        A key is an unsigned integer that grows with a float32 number. Every column has its logit as
        a number. If `order.has_sums` says so, it also has `high` and `low`: high + low is the
        column's score, plus its bias if there is one, and `high` is this sum rounded to float32.

        Args:
          lanes: the operations on the lanes of the warp.
          row: the index of the row.
          operands: references to the kernel's operands, by name.
          exact: whether to return all keys. If False, returns only the keys by which `chosen`
            guesses its choice, which cost less.

        Returns:
          A list for each number, with a key for every column that the lane holds. Columns without
          `high` and `low` have the numbers (logit,). The other columns have the numbers (high, low,
          logit) if `exact`; if not, they have (high,) with a bias, and (high, logit) without one.
          Columns without a bias are compared by the logit alone. Groups, and columns with a bias,
          are compared by the first number; if it is equal, by the next one.
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
        """Chooses the best groups of columns of a row, exactly or by a faster guess.

        Args:
          lanes: the operations on the lanes of the warp.
          columns: for each column that a lane holds, the keys (words) by which it is compared.
          exact: whether `columns` have all their keys, so that the choice is exact. If False, they
            have only the first key, and the choice is a guess.

        Returns:
          (kept, doubt). `kept` is, in each lane, whether the lane's columns belong to a chosen
          group. `doubt` is a word that is 0 if the choice is certain to equal the exact choice.
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
            # `second` exists, because a group has at least two columns (see `unavailable_reason`).
            assert second is not None
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
            # The groups were chosen by lower bounds of their sums of scores. The choice is certain
            # if the lower bound of the last chosen group exceeds the upper bound of the sum of
            # every group that was not chosen.
            reaches = lanes.select(lanes.greater(best[0], upper), none, lanes.word(1))
            doubt = lanes.either(doubt, lanes.select(kept, none, reaches))
            doubt = lanes.warp_max(doubt)
        return kept, doubt

    def sum_of(self, lanes: Any, *keys: _Words) -> _Words:
        """Returns the keys of the three numbers (high, low, tie) by which groups are compared.

        A key is a word that grows with its number. high + low is the sum of the scores of the
        group's two best columns. `tie` is the function `order.OF_TWO` of their logits, which
        decides if sums are equal. `keys` has a tuple of words for each of the two columns. The
        tuple's last word is the key of the column's logit. The two words before it are the keys of
        two numbers whose sum is the column's score. They are left out if the score is the logit.
        """
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
    """Returns, in each lane, the largest of `columns`; a column's words are compared in order."""
    columns = list(columns)
    while len(columns) > 1:
        odd = columns[len(columns) // 2 * 2 :]
        pairs = zip(columns[::2], columns[1::2], strict=False)
        columns = [_selected(lanes, _is_larger(lanes, a, b), a, b) for a, b in pairs] + odd
    return columns[0]


def _warp_best(lanes: Any, own: _Words) -> _Words:
    """Returns, in every lane, the largest of all lanes' tuples `own`."""
    best, is_best = [lanes.warp_max(own[0])], None
    for word in own[1:]:
        is_last = lanes.equal(own[len(best) - 1], best[-1])
        is_best = is_last if is_best is None else lanes.both(is_best, is_last)
        best.append(lanes.warp_max(lanes.select(is_best, word, lanes.word(0))))
    return tuple(best)


def _without(lanes: Any, words: _Words, taken: _Words) -> _Words:
    """Returns `words`, or zeros if `taken` are the words of the same column or group.

    Zeros are the smallest tuple, so a column or group that was taken is not chosen again.
    """
    gone, none = lanes.equal(words[-1], taken[-1]), lanes.word(0)
    return tuple(lanes.select(gone, none, word) for word in words)


def _two_largest(
    lanes: Any, a: _Words, a_second: _Words | None, b: _Words, b_second: _Words | None
) -> tuple[_Words, _Words]:
    """Returns the largest and the second largest of the tuples a, a_second, b and b_second.

    a_second is at most a, and b_second is at most b. Either may be None, and is then left out.
    """
    a_is_larger = _is_larger(lanes, a, b)
    first, second = _selected(lanes, a_is_larger, a, b), _selected(lanes, a_is_larger, b, a)
    for other in (a_second, b_second):
        if other is not None:
            second = _selected(lanes, _is_larger(lanes, other, second), other, second)
    return first, second


def _sum_of_lanes(lanes: Any, word: Any, number: int) -> Any:
    """Sums `word` over each set of `number` neighbouring lanes; all lanes of a set get its sum.

    `number` is a power of two. `word` and the sum are words with the bits of a float32.
    """
    distance = number // 2
    while distance:
        word = lanes.apply(_ADD, word, lanes.exchange(word, distance))
        distance //= 2
    return word


class _Lanes:
    """The operations of the kernel `_TopK`, emitted as the code of one lane of a warp.

    Operands and results are words, unsigned 32-bit integers, which may be the bits of a float32. A
    lane holds `width` neighbouring columns of a row of `columns` columns.
    """

    def __init__(self, columns: int, width: int) -> None:
        self.columns, self.width = columns, width
        self.lane = arith.remui(mosaic.warpgroup_thread(), mosaic.i32(WARP))

    def first_row(self, row: Value) -> Value:
        return self.word(0)

    def load(self, ref: Value, row: Value, *, again: bool = False) -> list[Value]:
        """Loads the `width` columns of row `row` of `ref` [T, E] that this lane holds, as words.

        Columns past the row's last column repeat the last column. Set `again` if the row has been
        loaded before: the loads are then volatile, so that the compiler loads the values again
        instead of keeping them in registers.
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
        """Returns the tuple of words of each column that this lane holds.

        The words of a column are its keys, and then the complement of its index. Each list in
        `keys` has a key for each column. All words of columns past the row's last column are 0.
        """
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
        """Returns the bits of the float32 number whose key is `key`: the inverse of `key()`."""
        below_zero = self.complement(arith.shrsi(key, mosaic.i32(31)))
        return arith.xori(key, arith.ori(below_zero, mosaic.i32(_SIGN)))

    def within_row(self, words: Sequence[Value]) -> list[Value]:
        """Returns `words`, one for each column that this lane holds, but 0 past the last column."""
        if self.columns % WARP == 0:
            return list(words)
        first, last = arith.muli(self.lane, mosaic.i32(self.width)), mosaic.i32(self.columns)
        columns = [arith.addi(first, mosaic.i32(i)) for i in range(self.width)]
        return [
            arith.select(mosaic.below(column, last), word, mosaic.i32(0))
            for column, word in zip(columns, words, strict=True)
        ]

    def apply(self, function: Elementwise, *words: Value) -> Value:
        """Applies a function of float32 numbers to their bits `words`; returns bits, too."""
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
        # The float32 numbers above 0 have the bits 1 to _INFINITY. So for them alone, `of` - 1 is
        # less than _INFINITY: 0 - 1 wraps around to the largest unsigned word.
        is_positive = self.greater(self.word(_INFINITY), self.minus_one(of))
        return self.select(is_positive, value, other)

    def unless(
        self, condition: Value, function: Callable[[], list[Value]], values: list[Value]
    ) -> list[Value]:
        """Emits a branch: returns `values` if `condition` is true, else the results of `function`.

        The condition must have the same value in all lanes of a warp.
        """
        return mosaic.unless(condition, function, values)

    def minus_one(self, word: Value) -> Value:
        return arith.subi(word, self.word(1))

    def gather(self, ref: Value, row: Value, column: Value) -> Value:
        place = arith.addi(arith.muli(row, mosaic.i32(self.columns)), column)
        i32 = mosaic.integer_type(32)
        return llvm.load(i32, mosaic.element_pointer(mosaic.pointer(ref), place, i32))

    def store_chosen(self, word: Value, ref: Value, row: Value, k: int) -> None:
        """Stores `word` of lane i to ref[row, i], for each lane i < k; `ref` is [T, k]."""
        with mosaic.when(mosaic.below(self.lane, mosaic.i32(k))):
            place = arith.addi(arith.muli(row, mosaic.i32(k)), self.lane)
            llvm.store(word, mosaic.element_pointer(mosaic.pointer(ref), place, word.type))

    def store_row(self, words: Sequence[Value], ref: Value, row: Value) -> None:
        """Stores `words`, one for each column that this lane holds, to row `row` of ref [T, E]."""
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
        """Returns the `word` of the lane whose index is this lane's index XOR `distance`."""
        return mosaic.shuffle(word, distance)

    def word(self, value: int) -> Value:
        return mosaic.i32(value)

    def number(self, value: float) -> Any:
        """Returns the word with the float32 bits of the constant `value`."""
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
    """The operations of `_Lanes` for Pallas' interpreter, on all lanes of a warp at once.

    A word is an array [WARP] uint32 here.
    """

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
