"""Kernel of the gradient of an expert's gate in bfloat16, between the matmuls of the backward pass.

An expert computes gate = x @ wi_0, up = x @ wi_1, h = gating(gate, up) and (w * h) @ wo, where w is
the weight of a row. From dhidden, the gradient of w * h, the kernel computes dgate and dup, in
place of gate and up, w * h, in place of dhidden, and the gradient of w, dhidden * h summed over the
128 columns of each tile.

It leaves out rows past the last group. XLA's own pass reads and writes all rows of all six arrays,
and a receive buffer with room for any routing has many times as many rows as groups have.

A thread block of 8 warps handles a tile of 128 rows by 128 columns, 16 rows at a time. A thread
handles 8 columns of a row, 16 bytes of each array, and a warp all 128 columns of two rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.matmul.quantized_tiles import BFLOAT16, Tile, load_words, on_tiles, pointer_to
from pallas_kernels.matmul.row_blocks import BLOCK, row_blocks

# The elements of `_ACROSS` threads cover the columns of the tile.
_COLUMNS = 8
_ACROSS = BLOCK // _COLUMNS
_WARPS = 8
_ROWS_AT_ONCE = _WARPS * WARP // _ACROSS
# The 32-bit words that hold a thread's bfloat16 numbers of a row.
_WORDS = _COLUMNS // 2


def gradient_of(gating: Any) -> Elementwise:
    """Returns the `Elementwise` (gate, up, dh) -> (h, dgate, dup) of a function (gate, up) -> h.

    Raises NotSupported if kernels cannot emit one of the operations.
    """

    def value_and_gradients(gate: jax.Array, up: jax.Array, dh: jax.Array) -> tuple[jax.Array, ...]:
        hidden, vjp = jax.vjp(gating, gate, up)
        return (hidden, *vjp(dh.astype(hidden.dtype)))

    return Elementwise(value_and_gradients, arity=3, results=3)


def gate_gradient(
    gating: Elementwise,
    dhidden: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    weights: jax.Array,
    num_used: jax.Array,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of gate and up from that of w * h, where h = act(gate, up).

    If dhidden, gate or up is still used elsewhere, XLA first copies it.

    Args:
      gating: gradient_of(act).
      dhidden: [R, F] bfloat16, the gradient of w * h; F is a multiple of 128.
      gate, up: [R, F] bfloat16.
      weights: [R] float32, the weight w of each row.
      num_used: [] int32, the number of rows of all groups.

    Returns:
      (w * h, dgate, dup, dweights): three [R, F] bfloat16, [R] float32; undefined past the groups.
    """
    num_rows, width = dhidden.shape

    def emit(memrefs: Any, tile: Tile) -> None:
        _Tile(**vars(tile), gating=gating, num_rows=num_rows, width=width).emit(*memrefs)

    blocks, _ = row_blocks(num_used[None], num_rows)  # those of all groups as one
    # Row j of `tile_sums` has the sums over columns 128 * j to 128 * j + 127.
    *results, tile_sums = on_tiles(
        "gate_gradient",
        [weights],
        blocks,
        [jax.ShapeDtypeStruct((width // BLOCK, num_rows), jnp.float32)],
        emit,
        width=width,
        num_warps=_WARPS,
        into=[dhidden, gate, up],
    )
    return (*results, tile_sums.sum(axis=0))


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    gating: Elementwise  # the result of `gradient_of`
    num_rows: int
    width: int

    def emit(self, weights: Any, dhidden: Any, gate: Any, up: Any, sums: Any) -> None:
        """Emits the code of one thread; overwrites dhidden, gate and up, and stores rows' sums."""
        # The thread's row among those handled at once, and its place among the threads of a row.
        down, across = mosaic.divided(mosaic.thread(), _ACROSS)
        # The thread's first column in the arrays.
        left = mosaic.add(mosaic.mul(self.column, BLOCK), mosaic.mul(across, _COLUMNS))
        with mosaic.repeat(BLOCK // _ROWS_AT_ONCE) as step:
            exists, row = self.find(mosaic.add(mosaic.mul(step, _ROWS_AT_ONCE), down))
            places = [
                pointer_to(each, row, self.width, left, size=2) for each in (dhidden, gate, up)
            ]
            weight_place = pointer_to(weights, row, 1, mosaic.i32(0), size=4)
            weight = llvm.load(mosaic.float_type(), weight_place)
            words = [load_words(place, _WORDS) for place in places]
            grads, *pre = map(BFLOAT16.numbers, words)
            (dgate, dup, weighted), total = gradients_of_row(self.gating, grads, pre, weight)
            with mosaic.when(exists):
                for place, numbers in zip(places, (weighted, dgate, dup), strict=True):
                    pairs = zip(numbers[::2], numbers[1::2], strict=True)
                    mosaic.store_numbers([BFLOAT16.pair(*pair) for pair in pairs], place)
            # The threads of a row add up their sums, and the first of them stores the result.
            total = mosaic.warp_sum(total, _ACROSS)
            with mosaic.when(exists):
                with mosaic.when(mosaic.equal(across, 0)):
                    at = pointer_to(sums, self.column, self.num_rows, row, size=4)
                    llvm.store(total, at)


def gradients_of_row(
    gating: Elementwise, grads: Sequence[Value], pre: Sequence[Sequence[Value]], weight: Value
) -> tuple[tuple[list[Value], list[Value], list[Value]], Value]:
    """Computes elements (dgate, dup, w * h) of a row, and their sum of dhidden * h, in float32.

    `gating` is `gradient_of(act)`, `weight` is w, `grads` is dhidden, and `pre` are gate and up.
    """
    results: tuple[list[Value], list[Value], list[Value]] = [], [], []
    total = mosaic.f32(0.0)
    for grad, *arguments in zip(grads, *pre, strict=True):
        dh = arith.mulf(grad, weight)
        # Approximate functions take fewer instructions, and err far less than bfloat16 rounds.
        hidden, dgate, dup = gating.emit(*arguments, dh, approximate=True)
        total = arith.addf(total, arith.mulf(grad, hidden))
        for elements, number in zip(results, (dgate, dup, arith.mulf(hidden, weight)), strict=True):
            elements.append(number)
    return results, total
