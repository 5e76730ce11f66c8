"""Replaces, in Pallas' GPU interpreter, what the matmul kernels emit instruction by instruction.

The interpreter runs a warpgroup as one thread, and no emitted code. So each function here computes
by JAX operations what a function of the kernels emits for each thread. Kernels are otherwise the
same, with their copies, barriers and shared memory.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import compiler, elementwise, mosaic
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT
from pallas_kernels.formats import E8M0, FLOAT8_ROWS, MXFP4, bitcast
from pallas_kernels.matmul import (
    decoder,
    float8,
    float8_drhs,
    mxfp4_matmul,
    register_tiles,
    row_blocks,
    row_tiles,
    tensor_cores,
    weight_only,
)
from pallas_kernels.matmul.kernel import CHUNK, COMPUTERS, STEP, swizzled
from support.one_thread import replaced


@contextlib.contextmanager
def matmul_kernels(options: Any) -> Iterator[None]:
    """Runs matmul kernels in the interpreter with `options` while the context is open."""
    kernel, copy, turns = compiler.kernel, plgpu.copy_smem_to_gmem, _Turns()
    replacements: dict[Any, dict[str, Any]] = {
        compiler: dict(kernel=functools.partial(kernel, interpret=options)),
        plgpu: dict(
            copy_smem_to_gmem=functools.partial(_copy_or_add, copy),
            layout_cast=lambda array, layout: array,
            load=lambda ref, **_: ref[...],
        ),
        mosaic: dict(opaque_scalar=lambda number: number),
        elementwise.Elementwise: dict(__call__=lambda self, *arrays: self.function(*arrays)),
        row_tiles: dict(
            row_tiles=row_tiles_by_xla,
            _call=row_tiles._call.__wrapped__,
            _rows_and_tiles_before=_rows_and_tiles_before,
        ),
        register_tiles: dict(
            store_rows=_store_rows,
            store_rows_through=_store_rows_through,
            store_column=_store_column,
            load_column=_load_column,
            store_transposed=_store_transposed,
            zero_rows_outside=_zero_rows_outside,
            write_registers=_write,
            read_registers=lambda room: room[...],
        ),
        tensor_cores: dict(
            start_float8_product=functools.partial(_start_float8_product, turns),
            add_float8_product=functools.partial(_add_float8_product, turns),
            wait_for_turn=lambda: _call_back(turns.wait),
            give_turn=lambda: _call_back(turns.give),
        ),
        float8: dict(_quantize=_quantize),
        float8_drhs: dict(prefetch=lambda *_: None),
        decoder.Decoder: dict(
            load_scales=_load_scales,
            stage_scales=_stage_scales,
            fill_table=lambda self, computer: None,
            load=_load,
            decode=functools.partialmethod(_decode, itertools.count()),
        ),
        decoder.Staged: dict(types=_staged_types),
        mxfp4_matmul: dict(transforms_of_numbers=lambda pieces: ()),
        weight_only: dict(_compute_block=_compute_weight_only_block),
    }
    with replaced(replacements):
        yield
        jax.effects_barrier()
        assert not any(turns.left.values()), turns.left


class _Turns:
    """Counts the turns that each computer of a block was given, less those that it took."""

    def __init__(self) -> None:
        self.left: collections.Counter[tuple[int, int]] = collections.Counter()
        self.lock = threading.Lock()

    def wait(self, block: Any, computer: Any) -> None:
        with self.lock:
            self.left[int(block), int(computer)] -= 1

    def give(self, block: Any, computer: Any) -> None:
        with self.lock:
            self.left[int(block), 1 - int(computer)] += 1

    def take(self) -> None:
        _call_back(self.wait)
        _call_back(self.give)


def _call_back(function: Callable[[Any, Any], None]) -> None:
    io_callback(function, None, lax.axis_index("block"), lax.axis_index("warpgroup"))


def _copy_or_add(copy: Any, buffer: Any, destination: Any, reduction_op: Any = None) -> None:
    if reduction_op == "add":
        buffer[...] += destination[...]
        plgpu.commit_smem()
    copy(buffer, destination)


def row_tiles_by_xla(
    group_sizes: jax.Array,
    heights: tuple[int, ...],
    num_rows: int,
    alignment: int = ROW_ALIGNMENT,
) -> jax.Array:
    """Computes `row_tiles.row_tiles` without a kernel."""
    num_groups = group_sizes.shape[0]
    starts, ends = row_blocks.row_ranges(group_sizes, num_rows)
    group_sizes = ends - starts
    first = starts // alignment * alignment
    counts = jnp.where(group_sizes > 0, -((first - ends) // heights[-1]), 0)
    height = row_tiles._lowest(list(heights), -((first - ends) // jnp.maximum(counts, 1)))
    tile_ends = jnp.cumsum(counts, dtype=jnp.int32)
    most = row_tiles.most_tiles(num_groups, heights, num_rows, alignment)
    tile = jnp.arange(most + 1, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= tile_ends[:-1], axis=1, dtype=jnp.int32)
    group = jnp.where(tile_ends[-1] > 0, group, 0)  # the entries of no tile are 0
    row = first[group] + (tile - (tile_ends - counts)[group]) * height[group]
    end = jnp.minimum(row + height[group], ends[group])
    table = jnp.stack([group, row, jnp.maximum(row, starts[group]), end], axis=1)
    totals = jnp.stack([tile_ends[-1], ends[-1], ends[-1], ends[-1]])
    return jnp.where(tile[:, None] == most, totals, table)


def _rows_and_tiles_before(
    sizes: Any, own: jax.Array, height: jax.Array, num_rows: int, alignment: int
) -> tuple[jax.Array, jax.Array]:
    def count_one(group: jax.Array, totals: Any) -> Any:
        rows, tiles = totals
        end = jnp.minimum(rows + jnp.clip(sizes[group], 0, num_rows), num_rows)
        needed = lax.div(lax.rem(rows, alignment) + (end - rows) + (height - 1), height)
        return end, tiles + jnp.where(end > rows, needed, 0)

    return lax.fori_loop(jnp.int32(0), own, count_one, (jnp.int32(0), jnp.int32(0)))


# ---------------------------------------------------------------------------------- register_tiles


def _each_row(begin: Any, end: Any, num_rows: int, store: Callable[[Any], None]) -> None:
    def one_row(row: jax.Array, _: None) -> None:
        pl.when((row >= begin) & (row < end))(lambda: store(row))

    lax.fori_loop(0, num_rows, one_row, None)


def _store_rows(out: Any, values: Any, target: register_tiles.Target, layout: Any) -> None:
    top, left, begin, end = target

    def store(row: Any) -> None:
        out[top + row, pl.ds(left, values.shape[1])] = values[row]

    _each_row(begin, end, values.shape[0], store)


def _store_rows_through(room: Any, out: Any, values: Any, target: register_tiles.Target) -> None:
    (top, left, begin, end), (num_rows, columns) = target, values.shape
    room[...] = values.astype(room.dtype)
    whole = (begin <= 0) & (end >= num_rows)

    @pl.when(whole)
    def _() -> None:
        out[pl.ds(top, num_rows), pl.ds(left, columns)] = room[...]

    def store(row: Any) -> None:
        out[top + row, pl.ds(left, columns)] = room[row]

    pl.when(~whole)(lambda: _each_row(begin, end, num_rows, store))


def _store_column(
    out: Any, values: Any, target: register_tiles.Target, *, to_row: bool = False
) -> None:
    top, left, begin, end = target

    def store(row: Any) -> None:
        out[(left, top + row) if to_row else (top + row, left)] = values[row]

    _each_row(begin, end, values.shape[0], store)


def _load_column(ref: Any, first: jax.Array, count: int, last: int) -> jax.Array:
    return ref[pl.ds(jnp.minimum(first, last + 1 - count), count)].astype(jnp.float32)


def _store_transposed(ref: Any, values: jax.Array) -> None:
    ref[...] = values.T


def _write(room: Any, values: jax.Array) -> None:
    room[...] = values


def _zero_rows_outside(
    tile: Any, begin: Any, end: Any, transforms: Any, worker: Any, num_workers: int
) -> None:
    share = tile.shape[0] // num_workers
    own = tile.at[pl.ds(worker * share, share)]
    row = worker * share + lax.broadcasted_iota(jnp.int32, own.shape, 0)
    own[...] = jnp.where((row >= begin) & (row < end), own[...], 0)


# ------------------------------------------------------------------------------------------ float8


def _start_float8_product(
    turns: _Turns,
    left: Any,
    right: Any,
    stage: jax.Array,
    row: Any,
    first: Any,
    in_turns: bool,
) -> tensor_cores.StartedProduct:
    if in_turns:
        turns.take()
    product = _float8_product(left, right, stage, row, first)
    # Here threads, not tensor cores, read the operands.
    plgpu.commit_smem()
    form = tensor_cores._Form("", "", in_turns)  # PTX alone names types
    return tensor_cores.StartedProduct(product, [left, right, stage, row, first], form)


def _float8_product(left: Any, right: Any, stage: jax.Array, row: Any, block: Any) -> jax.Array:
    rows, columns = left[stage, pl.ds(row, 64)], right[stage, pl.ds(block * 128, 128)]
    return jnp.dot(rows.astype(jnp.float32), columns.astype(jnp.float32).T)


def _add_float8_product(
    turns: _Turns,
    total: jax.Array,
    started: tensor_cores.StartedProduct,
    index: int,
    count: Any,
    row_scales: jax.Array | None,
    block_scale: Any,
) -> tuple[jax.Array, tensor_cores.StartedProduct]:
    left, right, stage, row, first = started.operands
    of_rows = 1.0 if row_scales is None else row_scales[:, None]
    scaled = started.product * (of_rows * block_scale)
    if index + 1 < right.shape[1] // 128:
        if started.form.in_turns:
            pl.when(index + 1 < count)(turns.take)
        following = jnp.minimum(first + index + 1, right.shape[1] // 128 - 1)
        product = _float8_product(left, right, stage, row, following)
        started = started._replace(product=product)
    plgpu.commit_smem()
    return jnp.where(index < count, scaled + total, total), started


def _quantize(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, scales = FLOAT8_ROWS.encode(rows)
    return values, scales[:, 0]


# ------------------------------------------------------------------------------------------- MXFP4


def _staged_types(num_stages: int, pieces: int, columns: int) -> Any:
    # The interpreter's tensor cores read no registers. In place of the table, there is room for
    # decoded columns: parts of [64, 64] for each compute warpgroup.
    shape = COMPUTERS, columns // CHUNK * pieces, CHUNK, STEP
    return decoder.Staged(
        plgpu.SMEM((num_stages, pieces * columns), jnp.int32),
        plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(jnp.bfloat16)),
    )


def _load_scales(self: Any, group: jax.Array, left_edge: jax.Array, step: jax.Array) -> jax.Array:
    """Returns the two codes of each column of a piece in a word, for `_load`."""
    parts = []
    for piece in range(self.pieces):
        own = pl.ds((step * self.pieces + piece) * decoder.SCALES, decoder.SCALES)
        for _, scales in self.matrices:
            for first in range(0, self.block_n, CHUNK):
                begin = jnp.minimum(left_edge + first, scales.shape[1] - CHUNK)
                codes = scales[group, pl.ds(begin, CHUNK), own].astype(jnp.int32)
                parts.append(codes[:, 0] | codes[:, 1] << 8)
    return jnp.concatenate(parts)


def _stage_scales(self: Any, stage: jax.Array, codes: jax.Array) -> None:
    self.scales[stage] = codes
    plgpu.commit_smem()


def _load(self: Any, stage: jax.Array, piece: int, matrix: Any, first: Any) -> jax.Array:
    """Returns decoded columns, [64, 64] bfloat16."""
    line = jnp.int32(matrix * self.block_n + first)
    values = self.values[stage].reshape(-1, self.pieces, decoder.NUMBER_BYTES)[:, piece]
    codes = self.scales[stage].reshape(self.pieces, -1)[piece]
    codes = jnp.stack([codes & 0xFF, codes >> 8], axis=1)
    scales = bitcast(codes.astype(jnp.uint8), E8M0)
    own = (lax.dynamic_slice_in_dim(part, line, CHUNK) for part in (values, scales))
    return MXFP4.decode(tuple(own), jnp.bfloat16)


def _decode(self: Any, parts: Iterator[int], loaded: jax.Array) -> Any:
    # The parts of a step, which are traced one after the other, get different places.
    room = self.staged.table
    stored = room.at[lax.axis_index("warpgroup"), next(parts) % room.shape[1]]
    stored[...] = loaded
    plgpu.commit_smem()
    return stored


def _compute_weight_only_block(
    sizes: Any, refs: Any, group: Any, block: Any, first: Any, rows: Any
) -> None:
    *refs, _rows, _ring = refs
    count = sizes.strips_at_once * sizes.rounds

    def compute(i: jax.Array, _: None) -> None:
        begin = (block * count + i) * 16

        @pl.when(begin < sizes.width)
        def _() -> None:
            _weight_only_columns(sizes, refs, group, first, rows, begin)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _() -> None:
        lax.fori_loop(0, count, compute, None)


def _weight_only_columns(
    sizes: Any, refs: Any, group: Any, first: Any, rows: Any, begin: Any
) -> None:
    """Computes 16 columns of `rows` rows of the output, from column `begin` on."""
    rows_ref, *others, out = refs
    columns = pl.ds(begin, 16)
    biases = iter(others[2 * sizes.num_matrices :])
    matrices, offsets = [], []
    for i in range(sizes.num_matrices):
        values, scales = others[2 * i][group, columns], others[2 * i + 1]
        if sizes.is_float8:
            of_columns = jnp.repeat(scales[group, lax.div(begin, 128)], 128)
            matrices.append(values.astype(jnp.float32) * of_columns)
        else:
            of_columns = bitcast(scales[group, columns], E8M0)
            matrices.append(sizes.format.decode((values, of_columns), jnp.float32))
        bias = next(biases)[group, columns] if sizes.has_bias[i] else jnp.zeros(16)
        offsets.append(bias.astype(jnp.float32))

    def of_row(row: jax.Array, _: None) -> None:
        own = rows_ref[(0 if sizes.same_rows else first) + row].astype(jnp.float32)
        products = [lax.reduce_precision(jnp.dot(matrix, own), 8, 7) for matrix in matrices]
        numbers = [product + offset for product, offset in zip(products, offsets, strict=True)]
        result = numbers[0] if sizes.gating is None else sizes.gating(*numbers)
        out[first + row, columns] = result.astype(jnp.bfloat16)

    lax.fori_loop(0, rows, of_row, None)
