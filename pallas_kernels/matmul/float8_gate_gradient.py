"""Kernel of the gradient of an expert's gate, between the float8 matmuls of the backward pass.

An expert computes gate = x @ wi_0, up = x @ wi_1, h = gating(gate, up) and (w * h) @ wo, where w is
the weight of a row. The kernel takes dhidden, the gradient of w * h. It multiplies dh = w * dhidden
by the derivatives of the gating. The results are operands of the next float8 matmuls, so the kernel
quantizes them before it writes them to memory:

  dgate, dup    the gradients of gate and up: as rows, for the gradient of x; and transposed, for
                the gradients of wi_0 and wi_1
  w * h         transposed, for the gradient of wo
  <dhidden, h>  the gradient of w; the kernel sums it over the 128 columns of each tile

A thread block of 8 warps handles a tile of 128 rows by 128 columns in two turns of 64 rows. In a
turn a thread handles a patch of 4 rows by 8 columns, and a warp 8 rows by all 128 columns. A warp
loads and stores whole lines of memory, 128 bytes, also of the transposed results: these pass
through shared memory.

Between finding the scales and rounding, a thread keeps its results in shared memory. So two thread
blocks fit on a multiprocessor, and one computes while the other waits for memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.matmul.gate_gradient import bfloat16s, gradients_of_row, sum_of_words
from pallas_kernels.matmul.packed import BFLOAT16
from pallas_kernels.matmul.quantized_tiles import (
    PTX_TYPE,
    Scaled,
    Tile,
    load_words,
    max_of,
    on_tiles,
    past,
    pointer_to,
    rounded_word,
    scale_of,
    share,
    shared_numbers,
    shared_words,
    store_words,
    word_at,
)
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# A thread handles a patch of 4 rows by 8 columns. The patches of `_ACROSS` threads lie side by
# side, and cover the columns of the tile.
_ROWS, _COLUMNS = 4, 8
_ACROSS = BLOCK // _COLUMNS
_TURNS = 2
_ROWS_OF_TURN = BLOCK // _TURNS
_THREADS = _ACROSS * _ROWS_OF_TURN // _ROWS
_WARPS = _THREADS // WARP
# The 32-bit words that hold the bfloat16 numbers of a row of a patch.
_WORDS = _COLUMNS // 2
# The kernel quantizes three results: dgate, dup and w * h. It stores all of them transposed, and
# the first two also as rows.
_WITH_ROWS = 2
_RESULTS = 3
# A thread stores 16 values of a column of a tile at a time: a piece.
_PIECE = 16
_PIECES = BLOCK // _PIECE
# Shared memory holds three arrays of 32-bit numbers. The first has the threads' results: for each
# turn, result and row of a patch, the words of each thread, with some padding. The second, from
# _FACTORS on, has 1 / scale for each row of dgate and of dup. The third, from _TOTALS on, has the
# largest magnitude in each warp and turn, for all three results.
_OF_ROW = _THREADS * _WORDS + _PIECES * _WORDS
_FACTORS = _TURNS * _RESULTS * _ROWS * _OF_ROW
_TOTALS = _FACTORS + _WITH_ROWS * BLOCK
_SHARED = _TOTALS + _RESULTS * _TURNS * _WARPS


class _Operands(NamedTuple):
    """The operands of a row of a thread's patch.

    Attributes:
      exists: whether the tile's block has such a row.
      dhidden: words with two bfloat16 numbers each.
      values: words of gate and of up, with four float8 values each.
      scales: the scales of gate and of up.
      weight: the weight of the row.
    """

    exists: Value
    dhidden: list[Value]
    values: list[list[Value]]
    scales: list[Value]
    weight: Value


class GateGradient(NamedTuple):
    """The results of `gate_gradient`, for R rows of F hidden values each.

    The transposed results are [F, P]. P is the number of rows after padding: rows are added to each
    group, so that every group starts at a multiple of 128.

    Attributes:
      dpre: the gradients of gate and up, [R, F] float8 each.
      transposed: the same two gradients, transposed, [F, P] float8 each.
      hidden: w * h, the hidden values h times the weight w of their row, transposed, [F, P] float8.
      dweights: [R, F / 128] float32: partial sums of the gradient of w. For each row and each 128
        columns, it has the sum of dhidden * h, where dhidden is the gradient of w * h.
    """

    dpre: tuple[Scaled, Scaled]
    transposed: tuple[TransposedRows, TransposedRows]
    hidden: TransposedRows
    dweights: jax.Array


def gate_gradient(
    gating: Elementwise,
    dhidden: jax.Array,
    gate: Scaled,
    up: Scaled,
    weights: jax.Array,
    blocks: jax.Array,
) -> GateGradient:
    """Computes the gradients of gate and up from the gradient of w * h, where h = act(gate, up).

    `act` is the function between an expert's matmuls, and w is the weight of a row. Also computes
    w * h. Quantizes the gradients and w * h to float8.

    Args:
      gating: gradient_of(act), a function (gate, up, dh) -> (h, dgate, dup).
      dhidden: [R, F] bfloat16, the gradient of the weighted hidden values, w * h. F is the number
        of hidden values of a row, a multiple of 128.
      gate, up: rows [R, F], float8_e4m3fn with scales: the arguments of `act`.
      weights: [R] float32, the weight w of each row.
      blocks: [P / 128, 2] int32, each block's first row and number of rows: the first result of
        `row_blocks`. P is the number of rows with padding, in which each group starts at a
        multiple of 128.

    Returns:
      The gradients of gate and up, the hidden values w * h, and sums for the gradient of w. All
      are computed in float32; those to be quantized are first rounded to bfloat16. The contents of
      rows past the last group, and of blocks without rows, are undefined.
    """
    num_rows, width = dhidden.shape
    num_row_blocks, tiles = blocks.shape[0], width // BLOCK
    height = num_row_blocks * BLOCK

    def emit(memrefs: Any, block: Value, column: Value, first: Value, count: Value) -> None:
        tile = _Tile(block, column, first, count, gating, num_rows, width, height)
        tile.emit(memrefs[:6], memrefs[6:-1], memrefs[-1])

    values = jax.ShapeDtypeStruct((num_rows, width), gate.values.dtype)
    # The next matmuls take the scales of rows transposed.
    of_rows = jax.ShapeDtypeStruct((tiles, num_rows), jnp.float32)
    transposed = jax.ShapeDtypeStruct((width, height), gate.values.dtype)
    of_blocks = jax.ShapeDtypeStruct((num_row_blocks, tiles), jnp.float32)
    results = on_tiles(
        "gate_gradient_float8",
        [dhidden, *gate, *up, weights],
        blocks,
        [*[values, of_rows] * _WITH_ROWS, *[transposed, of_blocks] * _RESULTS, of_rows],
        emit,
        width=width,
        num_warps=_WARPS,
        num_shared=_SHARED,
    )
    rows, turned, dweights = results[:4], results[4:-1], results[-1]
    return GateGradient(
        (Scaled(rows[0], rows[1].T), Scaled(rows[2], rows[3].T)),
        (TransposedRows(*turned[:2]), TransposedRows(*turned[2:4])),
        TransposedRows(*turned[4:]),
        dweights.T,
    )


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """A tile of 128 rows by 128 columns, which a thread block computes.

    Attributes:
      gating: the function (gate, up, dh) -> (h, dgate, dup).
      num_rows: the number of rows of the operands.
      width: the number of columns of the operands.
      height: the number of columns of the transposed results: the number of rows, with each group
        padded to a multiple of 128.
    """

    gating: Elementwise
    num_rows: int
    width: int
    height: int

    def emit(self, ins: Any, outs: Any, shared: Any) -> None:
        """Emits the code by which a thread computes its elements of the tile.

        `ins`, `outs` and `shared` are memrefs of the operands, the results and shared memory.
        """
        i32 = mosaic.i32
        down, across = (op(mosaic.thread(), i32(_ACROSS)) for op in (arith.divui, arith.remui))
        place = arith.muli(across, i32(_COLUMNS))

        def row_of(turn: Value) -> Value:
            return arith.addi(arith.muli(turn, i32(_ROWS_OF_TURN)), arith.muli(down, i32(_ROWS)))

        with mosaic.repeat(_TURNS) as turn:
            self.compute(ins, outs, shared, turn, row_of(turn), place)
        mosaic.block_barrier()
        self.finish(shared, outs)
        mosaic.block_barrier()
        with mosaic.repeat(_TURNS) as turn:
            self.store_rows(outs, shared, turn, row_of(turn), place)
        mosaic.block_barrier()
        self.store_columns(outs, shared)

    def compute(
        self, ins: Any, outs: Any, shared: Any, turn: Value, row: Value, place: Value
    ) -> None:
        """Computes the thread's patch of a turn, and keeps the results in `shared`.

        The patch begins in row `row` and column `place` of the tile. Also computes and stores the
        scales of the patch's rows, and each row's sum of dhidden * h.
        """
        i32, f32, word = mosaic.i32, mosaic.float_type(), mosaic.integer_type(32)
        warp, lane = (op(mosaic.thread(), i32(WARP)) for op in (arith.divui, arith.remui))
        left = arith.addi(arith.muli(self.column, i32(BLOCK)), place)

        # largest[result][row] is the bits of the largest magnitude of a row of a result.
        largest: list[list[Value]] = [[] for _ in range(_RESULTS)]
        sums = []
        for i, operands in enumerate(self.load(ins, row, left)):
            results, of_row = self.compute_row(operands)
            sums.append(arith.bitcast(word, of_row))
            for result, words in enumerate(results):
                words = [BFLOAT16.without_infinities(word) for word in words]
                share(shared, _own_place(turn, result, i), words)
                largest[result].append(BFLOAT16.largest(words))

        totals = [mosaic.warp_max(max_of(sizes)) for sizes in largest]
        with mosaic.when(mosaic.equal(lane, i32(0))):
            at = arith.addi(arith.muli(turn, i32(_WARPS)), warp)
            for result, total in enumerate(totals):
                share(shared, arith.addi(at, i32(_total_of(result))), [total])

        # The threads that have elements of the same rows find each row's largest magnitudes and its
        # sum. The first `_ROWS` of them then have those of a row each.
        sizes, others = (_of_rows(largest[i], arith.maxui) for i in range(_WITH_ROWS))
        total = _of_rows(sums, sum_of_words)
        across = arith.divui(place, i32(_COLUMNS))
        row = arith.addi(row, _row_of(across))
        found = [scale_of(each) for each in (sizes, others)]
        with mosaic.when(mosaic.below(across, i32(_ROWS))):
            for result, (_, factor) in enumerate(found):
                at = arith.addi(row, i32(_FACTORS + result * BLOCK))
                share(shared, at, [arith.bitcast(word, factor)])
            with mosaic.when(mosaic.below(row, self.count)):
                numbers = [*(scale for scale, _ in found), arith.bitcast(f32, total)]
                row = arith.addi(self.first, row)
                for number, out in zip(numbers, (outs[1], outs[3], outs[-1]), strict=True):
                    llvm.store(number, pointer_to(out, self.column, self.num_rows, row, 4))

    def store_rows(self, outs: Any, shared: Any, turn: Value, row: Value, place: Value) -> None:
        """Rounds what `compute` has kept of the thread's patch of a turn, and stores its rows.

        Of each result, the transposed patch replaces the kept words.
        """
        i32 = mosaic.i32
        left = arith.addi(arith.muli(self.column, i32(BLOCK)), place)
        for result in range(_RESULTS):
            numbers = [
                [
                    number
                    for word in shared_words(shared, _own_place(turn, result, i), _WORDS)
                    for number in BFLOAT16.numbers(word)
                ]
                for i in range(_ROWS)
            ]
            if result < _WITH_ROWS:
                factors = shared_numbers(
                    shared, arith.addi(row, i32(_FACTORS + result * BLOCK)), _ROWS
                )
                start = pointer_to(
                    outs[2 * result], arith.addi(self.first, row), self.width, left, 1
                )
                for i, factor in enumerate(factors):
                    with mosaic.when(mosaic.below(arith.addi(row, i32(i)), self.count)):
                        words = [
                            rounded_word(numbers[i][j : j + 4], [factor] * 4)
                            for j in range(0, _COLUMNS, 4)
                        ]
                        store_words(words, past(start, i * self.width))
            (factor,) = shared_numbers(shared, i32(_total_of(result)), 1)
            columns = [
                rounded_word([of_row[j] for of_row in numbers], [factor] * _ROWS)
                for j in range(_COLUMNS)
            ]
            for i in range(0, _COLUMNS, _WORDS):
                at = _own_place(turn, result, i // _WORDS)
                share(shared, at, columns[i : i + _WORDS])

    def store_columns(self, outs: Any, shared: Any) -> None:
        """Stores the transposed results, which `store_rows` has left in shared memory."""
        i32, thread = mosaic.i32, mosaic.thread()
        piece, first = arith.remui(thread, i32(_PIECES)), arith.divui(thread, i32(_PIECES))
        row = arith.muli(piece, i32(_PIECE))
        turn, row_of_turn = (op(row, i32(_ROWS_OF_TURN)) for op in (arith.divui, arith.remui))
        top = arith.addi(arith.muli(self.block, i32(BLOCK)), row)
        left = arith.addi(arith.muli(self.column, i32(BLOCK)), first)
        # The threads whose patches have the rows of the piece, in the column's patches.
        down = arith.divui(row_of_turn, i32(_ROWS))
        across, column = (op(first, i32(_COLUMNS)) for op in (arith.divui, arith.remui))
        owner = arith.addi(arith.muli(down, i32(_ACROSS)), across)
        slot, word = (op(column, i32(_WORDS)) for op in (arith.divui, arith.remui))
        at_once = _THREADS // _PIECES
        for result in range(_RESULTS):
            start = pointer_to(outs[4 + 2 * result], left, self.height, top, 1)
            base = arith.addi(_place_of(turn, result, 0, owner), word)
            base = arith.addi(base, arith.muli(slot, i32(_OF_ROW)))
            for i in range(0, BLOCK, at_once):
                # Further columns are those of the next patches.
                before = i // _COLUMNS * _WORDS
                words = [
                    word_at(shared, arith.addi(base, i32(before + k * _ACROSS * _WORDS)))
                    for k in range(_PIECE // _ROWS)
                ]
                store_words(words, past(start, i * self.height))

    def load(self, ins: Any, row: Value, left: Value) -> list[_Operands]:
        """Loads the operands of a thread's patch, from row `row` of the tile and column `left` on.

        Returns those of each row of the patch.
        """
        f32 = mosaic.float_type()
        dhidden, gate, gate_scales, up, up_scales, weights = ins

        def words_at(ref: Any, row: Value, size: int) -> list[Value]:
            return load_words(pointer_to(ref, row, self.width, left, size), size * _COLUMNS // 4)

        def scale_at(ref: Any, row: Value) -> Value:
            return llvm.load(f32, pointer_to(ref, row, self.width // BLOCK, self.column, 4))

        rows = []
        for i in range(_ROWS):
            exists, source = self.find(arith.addi(row, mosaic.i32(i)))
            rows.append(
                _Operands(
                    exists,
                    words_at(dhidden, source, 2),
                    [words_at(each, source, 1) for each in (gate, up)],
                    [scale_at(each, source) for each in (gate_scales, up_scales)],
                    llvm.load(f32, pointer_to(weights, source, 1, mosaic.i32(0), 4)),
                )
            )
        return rows

    def compute_row(self, operands: _Operands) -> tuple[list[list[Value]], Value]:
        """Computes a row of a thread's patch.

        Returns (words, sum). `words` has the elements of dgate, dup and w * h: for each of the
        three, 32-bit words with two bfloat16 numbers each. `sum` is the sum of dhidden * h over
        the row's elements. All are zero if the tile's block has no such row.
        """
        exists, dhidden, values, scales, weight = operands
        grads = [number for w in dhidden for number in BFLOAT16.numbers(w)]
        pre = [
            [arith.mulf(n, scale) for w in words for n in float8.widened(PTX_TYPE, w)]
            for words, scale in zip(values, scales, strict=True)
        ]
        columns, total = gradients_of_row(self.gating, grads, pre, weight)
        words = [
            [
                arith.select(exists, bfloat16s(*row[i : i + 2]), mosaic.i32(0))
                for i in range(0, _COLUMNS, 2)
            ]
            for row in columns
        ]
        return words, arith.select(exists, total, mosaic.f32(0.0))

    def finish(self, shared: Any, outs: Any) -> None:
        """Computes and stores the scale of each transposed result.

        It follows from the largest magnitudes that the warps have stored in `shared`. The first of
        these is overwritten with 1 / scale.
        """
        i32, word = mosaic.i32, mosaic.integer_type(32)
        warp, lane = (op(mosaic.thread(), i32(WARP)) for op in (arith.divui, arith.remui))
        tiles = self.width // BLOCK
        for result in range(_RESULTS):
            with mosaic.when(mosaic.equal(warp, i32(result))):
                base = i32(_total_of(result))
                at = arith.addi(base, arith.remui(lane, i32(_TURNS * _WARPS)))
                largest = mosaic.warp_max(word_at(shared, at))
                with mosaic.when(mosaic.equal(lane, i32(0))):
                    scale, factor = scale_of(largest)
                    share(shared, base, [arith.bitcast(word, factor)])
                    at = pointer_to(outs[5 + 2 * result], self.block, tiles, self.column, 4)
                    llvm.store(scale, at)


def _total_of(result: int) -> int:
    """Returns where in shared memory the largest magnitudes of a result begin, of each warp.

    The first of them is later overwritten with 1 / scale.
    """
    return _TOTALS + result * _TURNS * _WARPS


def _own_place(turn: Value, result: int, row: int) -> Value:
    """Returns where in shared memory this thread keeps a row of a patch.

    The patch is that of a turn and a result.
    """
    return _place_of(turn, result, row, mosaic.thread())


def _place_of(turn: Value, result: int, row: int, thread: Value) -> Value:
    """Returns where in shared memory `thread` keeps a row of its patch of a turn and a result.

    Threads whose rows are in different pieces of the tile's columns are some words further apart,
    so that the threads which store the pieces access different banks of shared memory.
    """
    i32 = mosaic.i32
    before = arith.muli(turn, i32(_RESULTS * _ROWS * _OF_ROW + _PIECES // _TURNS * _WORDS))
    before = arith.addi(before, i32((result * _ROWS + row) * _OF_ROW))
    piece = arith.divui(thread, i32(_ACROSS * _PIECE // _ROWS))
    return arith.addi(before, arith.muli(arith.addi(thread, piece), i32(_WORDS)))


def _of_rows(words: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Combines a word of each row of a patch with those of the `_ACROSS` threads of these rows.

    Returns in the first `_ROWS` of these threads what `combine` makes of all threads' words of the
    row `_row_of(across)` of the patch.
    """
    across, distance = arith.remui(mosaic.thread(), mosaic.i32(_ACROSS)), 1
    while distance < _ACROSS:
        if len(words) > 1:
            # Of two threads, one goes on with one half of the rows, and the other with the rest.
            half, is_upper = len(words) // 2, _is_odd(across, distance)
            pairs = [*zip(words[:half], words[half:], strict=True)]
            sent = [arith.select(is_upper, low, high) for low, high in pairs]
            words = [arith.select(is_upper, high, low) for low, high in pairs]
        else:
            sent = words
        others = [mosaic.shuffle(each, distance) for each in sent]
        words = [combine(*both) for both in zip(words, others, strict=True)]
        distance *= 2
    return words[0]


def _row_of(across: Value) -> Value:
    """Returns the row of a patch whose word `_of_rows` returns in a thread.

    `across` is the index of the thread among the `_ACROSS` threads of the row.
    """
    i32, row, distance = mosaic.i32, mosaic.i32(0), 1
    while distance < _ROWS:
        half = i32(_ROWS // distance // 2)
        row = arith.addi(row, arith.select(_is_odd(across, distance), half, i32(0)))
        distance *= 2
    return row


def _is_odd(across: Value, divisor: int) -> Value:
    """Returns whether across / divisor, rounded down, is odd."""
    bit = arith.remui(arith.divui(across, mosaic.i32(divisor)), mosaic.i32(2))
    return mosaic.equal(bit, mosaic.i32(1))
