"""Kernel of the gradient of an expert's gate, between the float8 matmuls of the backward pass.

It computes what `gate_gradient` computes. The results are operands of the next float8 matmuls, so
the kernel quantizes them: dgate and dup as rows (for the gradient of x) and transposed (for those
of wi_0 and wi_1), and w * h transposed (for that of wo).

A thread block of 8 warps handles a tile of 128 rows by 128 columns in two turns of 64 rows. In a
turn a thread handles a patch of 4 rows by 8 columns, and a warp 8 rows by all 128 columns. A warp
loads and stores whole lines of memory, 128 bytes, also of the transposed results: these pass
through shared memory. Between finding the scales and rounding, a thread keeps its results in shared
memory. So two thread blocks fit on a multiprocessor: one computes while the other waits for memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul.gate_gradient import gradients_of_row
from pallas_kernels.matmul.quantized_tiles import (
    BFLOAT16,
    PTX_TYPE,
    Tile,
    load_words,
    max_of,
    on_tiles,
    past,
    pointer_to,
    rounded_words,
    scale_of,
    share,
    shared_numbers,
    shared_words,
    word_at,
)
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows

# The patches of `_ACROSS` threads cover the columns of the tile.
_ROWS, _COLUMNS = 4, 8
_ACROSS = BLOCK // _COLUMNS
_TURNS = 2
_ROWS_OF_TURN = BLOCK // _TURNS
_THREADS = _ACROSS * _ROWS_OF_TURN // _ROWS
_WARPS = _THREADS // WARP
# The 32-bit words that hold the bfloat16 numbers of a row of a patch.
_WORDS = _COLUMNS // 2
# The kernel stores three results transposed, dgate, dup and w * h, and the first two also as rows.
_WITH_ROWS = 2
_RESULTS = 3
# A thread stores 16 values of a column of a tile at a time: a piece.
_PIECE = 16
_PIECES = BLOCK // _PIECE
# Arrays of 32-bit numbers in shared memory: for each turn, result and row of a patch, the words of
# each thread, with some padding; from _FACTORS on, 1 / scale for each row of dgate and of dup; from
# _LARGEST on, the largest magnitude in each warp and turn, for all three results.
_OF_ROW = _THREADS * _WORDS + _PIECES * _WORDS
_FACTORS = _TURNS * _RESULTS * _ROWS * _OF_ROW
_LARGEST = _FACTORS + _WITH_ROWS * BLOCK
_SHARED = _LARGEST + _RESULTS * _TURNS * _WARPS


def gate_gradient(
    gating: Elementwise,
    dhidden: jax.Array,
    gate: Scaled,
    up: Scaled,
    weights: jax.Array,
    blocks: jax.Array,
) -> tuple[tuple[Scaled, Scaled], tuple[TransposedRows, ...], jax.Array]:
    """Computes the gradients of gate and up from that of w * h, where h = act(gate, up).

    Results are computed in float32; those to be quantized are first rounded to bfloat16. Rows past
    the last group, and blocks without rows, are undefined.

    Args:
      gating: gradient_of(act).
      dhidden: [R, F] bfloat16, the gradient of w * h; F is a multiple of 128.
      gate, up: rows [R, F], float8_e4m3fn with scales.
      weights: [R] float32, the weight w of each row.
      blocks: [P / 128, 2] int32, the first result of `row_blocks`.

    Returns:
      The gradients of gate and up, [R, F] float8 each; these and w * h transposed, [F, P] float8
      each; and the sums of dhidden * h over each row and 128 columns, [R, F / 128] float32.
    """
    num_rows, width = dhidden.shape
    num_row_blocks, tile_columns = blocks.shape[0], width // BLOCK
    height = num_row_blocks * BLOCK

    def emit(memrefs: Any, tile: Tile) -> None:
        thread = _Tile(**vars(tile), gating=gating, num_rows=num_rows, width=width, height=height)
        thread.emit(memrefs[:6], memrefs[6:-1], memrefs[-1])

    rows = jax.ShapeDtypeStruct((num_rows, width), gate.values.dtype)
    # The next matmuls take the scales of rows transposed. The sums of rows have the same shape.
    row_scales = jax.ShapeDtypeStruct((tile_columns, num_rows), jnp.float32)
    transposed = jax.ShapeDtypeStruct((width, height), gate.values.dtype)
    block_scales = jax.ShapeDtypeStruct((num_row_blocks, tile_columns), jnp.float32)
    results = on_tiles(
        "gate_gradient_float8",
        [dhidden, *gate, *up, weights],
        blocks,
        [*[rows, row_scales] * _WITH_ROWS, *[transposed, block_scales] * _RESULTS, row_scales],
        emit,
        width=width,
        num_warps=_WARPS,
        num_shared=_SHARED,
    )
    # The results are pairs of values and scales, but for the last.
    dgate, dgate_scales, dup, dup_scales, *parts, row_sums = results
    columns = tuple(TransposedRows(*parts[i : i + 2]) for i in range(0, 2 * _RESULTS, 2))
    return (Scaled(dgate, dgate_scales.T), Scaled(dup, dup_scales.T)), columns, row_sums.T


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """A tile that a thread block computes; results have [width, height] when transposed."""

    gating: Elementwise  # the result of `gate_gradient.gradient_of`
    num_rows: int
    width: int
    height: int

    def emit(self, ins: Any, outs: Any, shared: Any) -> None:
        """Emits the code of one thread: computes, quantizes and stores its part of the tile."""
        # `outs` are values and scales, in turn, of the rows of dgate and of dup and of all three
        # results transposed, and at last the sums of rows.
        values, scales, row_sums = outs[:-1:2], outs[1:-1:2], outs[-1]
        down, across = mosaic.divided(mosaic.thread(), _ACROSS)
        # The first column and row of the thread's patch in the tile.
        column = mosaic.mul(across, _COLUMNS)

        def row_of(turn: Value) -> Value:
            return mosaic.add(mosaic.mul(turn, _ROWS_OF_TURN), mosaic.mul(down, _ROWS))

        with mosaic.repeat(_TURNS) as turn:
            row_outs = [*scales[:_WITH_ROWS], row_sums]
            self.compute(ins, row_outs, shared, turn, row_of(turn), column)
        mosaic.block_barrier()
        self.finish_transposed(shared, scales[_WITH_ROWS:])
        mosaic.block_barrier()
        with mosaic.repeat(_TURNS) as turn:
            self.store_rows(values[:_WITH_ROWS], shared, turn, row_of(turn), column)
        mosaic.block_barrier()
        self.store_columns(values[_WITH_ROWS:], shared)

    def compute(
        self, ins: Any, row_outs: Any, shared: Any, turn: Value, top: Value, column: Value
    ) -> None:
        """Computes the thread's patch of a turn, from (top, column) on; keeps it in `shared`."""
        # `row_outs` are the scales of rows of dgate and of dup, and the sums of dhidden * h.
        warp, lane = mosaic.divided(mosaic.thread(), WARP)
        left = mosaic.add(mosaic.mul(self.column, BLOCK), column)

        # largest[result][row] is the bits of the largest magnitude of a row of the patch.
        largest: list[list[Value]] = [[] for _ in range(_RESULTS)]
        sums = []
        for i, operands in enumerate(self.load(ins, top, left)):
            results, row_sum = self.compute_row(*operands)
            sums.append(arith.bitcast(mosaic.integer_type(32), row_sum))
            for result, words in enumerate(results):
                words = BFLOAT16.without_infinities(words)
                share(shared, _place_of(turn, result, i), words)
                largest[result].append(BFLOAT16.largest(words))

        largest_of_warp = [mosaic.warp_max(max_of(of_rows)) for of_rows in largest]
        with mosaic.when(mosaic.equal(lane, 0)):
            at = mosaic.add(mosaic.mul(turn, _WARPS), warp)
            for result, bits in enumerate(largest_of_warp):
                share(shared, mosaic.add(at, _place_of_largest(result)), [bits])
        self.finish_rows(largest[:_WITH_ROWS], sums, row_outs, shared, top, column)

    def finish_rows(
        self, largest: Any, sums: Any, row_outs: Any, shared: Any, top: Value, column: Value
    ) -> None:
        """Stores scales and sums of the rows of a turn, and keeps 1 / scale of rows in `shared`."""
        # `largest`, for dgate and dup, and `sums` have a word for each row of the patch. Threads
        # with the same rows combine theirs; the first `_ROWS` of them then have a row's result.
        sizes = [_combined_row(of_rows, arith.maxui) for of_rows in largest]
        total = _combined_row(sums, _sum_of_words)
        across = arith.divui(column, mosaic.i32(_COLUMNS))
        row = mosaic.add(top, _index_of_combined_row(across))
        scales, factors = zip(*map(scale_of, sizes), strict=True)
        with mosaic.when(mosaic.below(across, _ROWS)):
            for result, factor in enumerate(factors):
                at = mosaic.add(row, _FACTORS + result * BLOCK)
                share(shared, at, [arith.bitcast(mosaic.integer_type(32), factor)])
            with mosaic.when(mosaic.below(row, self.count)):
                numbers = [*scales, arith.bitcast(mosaic.float_type(), total)]
                row_of_out = mosaic.add(self.first, row)
                for number, out in zip(numbers, row_outs, strict=True):
                    place = pointer_to(out, self.column, self.num_rows, row_of_out, size=4)
                    llvm.store(number, place)

    def store_rows(self, outs: Any, shared: Any, turn: Value, top: Value, column: Value) -> None:
        """Rounds the patch that `compute` has kept, stores its rows, and keeps it transposed."""
        # `outs` are the rows of dgate and of dup.
        left = mosaic.add(mosaic.mul(self.column, BLOCK), column)
        for result in range(_RESULTS):
            numbers = [
                BFLOAT16.numbers(shared_words(shared, _place_of(turn, result, i), _WORDS))
                for i in range(_ROWS)
            ]
            if result < _WITH_ROWS:
                factors = shared_numbers(shared, mosaic.add(top, _FACTORS + result * BLOCK), _ROWS)
                row_of_out = mosaic.add(self.first, top)
                start = pointer_to(outs[result], row_of_out, self.width, left, size=1)
                for i, factor in enumerate(factors):
                    with mosaic.when(mosaic.below(mosaic.add(top, i), self.count)):
                        words = rounded_words(numbers[i], [factor] * _COLUMNS)
                        mosaic.store_numbers(words, past(start, i * self.width))
            place = mosaic.i32(_place_of_largest(result))
            (tile_factor,) = shared_numbers(shared, place, count=1)
            # Column by column, so that a word of four float8 has the four rows of a column.
            by_columns = [number for four in zip(*numbers, strict=True) for number in four]
            words = rounded_words(by_columns, [tile_factor] * len(by_columns))
            # The words of the 8 columns replace the first two rows of the patch.
            for i in range(0, _COLUMNS, _WORDS):
                share(shared, _place_of(turn, result, i // _WORDS), words[i : i + _WORDS])

    def store_columns(self, outs: Any, shared: Any) -> None:
        """Stores the transposed results `outs`, which `store_rows` has left in shared memory."""
        thread = mosaic.thread()
        # The thread's first column in the tile, and the first of the 16 rows of its pieces.
        first_column, piece = mosaic.divided(thread, _PIECES)
        row = mosaic.mul(piece, _PIECE)
        turn, row_of_turn = mosaic.divided(row, _ROWS_OF_TURN)
        top = mosaic.add(mosaic.mul(self.block, BLOCK), row)
        left = mosaic.add(mosaic.mul(self.column, BLOCK), first_column)
        # The thread whose patch has the column and the piece's first rows, and where that patch now
        # has the word with the column: in which of its rows, and at which of the row's words.
        down = arith.divui(row_of_turn, mosaic.i32(_ROWS))
        across, column = mosaic.divided(first_column, _COLUMNS)
        owner = mosaic.add(mosaic.mul(down, _ACROSS), across)
        row_of_patch, word = mosaic.divided(column, _WORDS)
        # The block's threads store this many columns at a time.
        at_once = _THREADS // _PIECES
        for result in range(_RESULTS):
            start = pointer_to(outs[result], left, self.height, top, size=1)
            base = mosaic.add(_place_of(turn, result, 0, owner), word)
            base = mosaic.add(base, mosaic.mul(row_of_patch, _OF_ROW))
            for i in range(0, BLOCK, at_once):
                # Further columns are in patches to the right, the piece's other rows in lower ones.
                to_right = i // _COLUMNS * _WORDS
                words = [
                    word_at(shared, mosaic.add(base, to_right + k * _ACROSS * _WORDS))
                    for k in range(_PIECE // _ROWS)
                ]
                mosaic.store_numbers(words, past(start, i * self.height))

    def load(self, ins: Any, top: Value, left: Value) -> list[tuple[Any, ...]]:
        """Loads what `compute_row` takes of each row of a patch, from (top, left) on."""
        f32 = mosaic.float_type()
        dhidden, gate, gate_scales, up, up_scales, weights = ins

        def words_at(ref: Any, row: Value, size: int) -> list[Value]:
            return load_words(pointer_to(ref, row, self.width, left, size), size * _COLUMNS // 4)

        def scale_at(ref: Any, row: Value) -> Value:
            return llvm.load(f32, pointer_to(ref, row, self.width // BLOCK, self.column, size=4))

        rows = []
        for i in range(_ROWS):
            exists, source = self.find(mosaic.add(top, i))
            words = words_at(dhidden, source, 2)
            values = [words_at(each, source, 1) for each in (gate, up)]
            scales = [scale_at(each, source) for each in (gate_scales, up_scales)]
            weight = llvm.load(f32, pointer_to(weights, source, 1, mosaic.i32(0), size=4))
            rows.append((exists, words, values, scales, weight))
        return rows

    def compute_row(
        self,
        exists: Value,
        dhidden: list[Value],
        values: list[list[Value]],
        scales: list[Value],
        weight: Value,
    ) -> tuple[list[list[Value]], Value]:
        """Computes bfloat16 words of (dgate, dup, w * h) of a row, and its sum of dhidden * h."""
        # `exists` (i1): whether the block has the row. `values` and `scales`: those of gate and up.
        grads = BFLOAT16.numbers(dhidden)
        pre = [
            [arith.mulf(n, scale) for word in words for n in float8.widened(PTX_TYPE, word)]
            for words, scale in zip(values, scales, strict=True)
        ]
        results, total = gradients_of_row(self.gating, grads, pre, weight)
        words = [
            [
                arith.select(exists, BFLOAT16.pair(*numbers[i : i + 2]), mosaic.i32(0))
                for i in range(0, _COLUMNS, 2)
            ]
            for numbers in results
        ]
        return words, arith.select(exists, total, mosaic.f32(0.0))

    def finish_transposed(self, shared: Any, scales: Any) -> None:
        """Computes and stores the scale of each transposed result, from the warps' maxima."""
        word = mosaic.integer_type(32)
        warp, lane = mosaic.divided(mosaic.thread(), WARP)
        tiles = self.width // BLOCK
        for result in range(_RESULTS):
            # One warp finds the scale of each result, and keeps 1 / scale for `store_rows`.
            with mosaic.when(mosaic.equal(warp, result)):
                base = mosaic.i32(_place_of_largest(result))
                # Each lane reads a maximum; some lanes read the same.
                at = mosaic.add(base, arith.remui(lane, mosaic.i32(_TURNS * _WARPS)))
                largest = mosaic.warp_max(word_at(shared, at))
                with mosaic.when(mosaic.equal(lane, 0)):
                    scale, factor = scale_of(largest)
                    share(shared, base, [arith.bitcast(word, factor)])
                    place = pointer_to(scales[result], self.block, tiles, self.column, size=4)
                    llvm.store(scale, place)


def _place_of_largest(result: int) -> int:
    """Returns where a result's largest magnitudes of all warps begin, later 1 / scale."""
    return _LARGEST + result * _TURNS * _WARPS


def _place_of(turn: Value, result: int, row: int, thread: Value | None = None) -> Value:
    """Returns the first word in which `thread`, by default this one, keeps a row of its patch."""
    # Each piece of 16 rows before the patch's shifts the patch by _WORDS, so that the threads that
    # store the pieces access different banks. Pieces of an earlier turn count, too.
    thread = mosaic.thread() if thread is None else thread
    start = mosaic.mul(turn, _RESULTS * _ROWS * _OF_ROW + _PIECES // _TURNS * _WORDS)
    start = mosaic.add(start, (result * _ROWS + row) * _OF_ROW)
    piece = arith.divui(thread, mosaic.i32(_ACROSS * _PIECE // _ROWS))
    return mosaic.add(start, mosaic.mul(mosaic.add(thread, piece), _WORDS))


def _sum_of_words(a: Value, b: Value) -> Value:
    f32 = mosaic.float_type()
    total = arith.addf(arith.bitcast(f32, a), arith.bitcast(f32, b))
    return arith.bitcast(mosaic.integer_type(32), total)


def _combined_row(words: list[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Combines each row's word over the `_ACROSS` threads that share rows; returns one result."""
    # `words` has a word for each of the patch's four rows. After distance 1 a thread goes on with
    # two of them, after distance 2 with one, whose index `_index_of_combined_row` tells.
    across = arith.remui(mosaic.thread(), mosaic.i32(_ACROSS))
    distance = 1
    while distance < _ACROSS:
        if len(words) > 1:
            # Of two threads, one goes on with the first half of the rows, the other with the rest.
            half = len(words) // 2
            has_upper = _is_odd(across, distance)
            pairs = list(zip(words[:half], words[half:], strict=True))
            sent = [arith.select(has_upper, low, high) for low, high in pairs]
            words = [arith.select(has_upper, high, low) for low, high in pairs]
        else:
            sent = words
        received = [mosaic.shuffle(each, distance) for each in sent]
        words = [combine(*both) for both in zip(words, received, strict=True)]
        distance *= 2
    return words[0]


def _index_of_combined_row(across: Value) -> Value:
    """Returns the row of a patch whose result thread `across` gets from `_combined_row`."""
    row = mosaic.i32(0)
    distance = 1
    while distance < _ROWS:
        half = mosaic.i32(_ROWS // distance // 2)
        row = mosaic.add(row, arith.select(_is_odd(across, distance), half, mosaic.i32(0)))
        distance *= 2
    return row


def _is_odd(across: Value, divisor: int) -> Value:
    """Returns whether `across` / `divisor`, rounded down, is odd, as i1."""
    bit = arith.remui(arith.divui(across, mosaic.i32(divisor)), mosaic.i32(2))
    return mosaic.equal(bit, 1)
