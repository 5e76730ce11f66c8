"""Base of the grouped matmul kernels: warpgroup roles, and the order of output tiles.

The kernels are persistent: a fixed number of thread blocks, or a few waves of them, loop over the
tiles of the output. A thread block has two *computers*, warpgroups that each compute half of an
output tile. Operands reach them by a ring of stages in shared memory (`operand_ring`). A third
warpgroup fills it, the loader, or else the computers do. With three warpgroups, each thread has 168
registers, with two 255. If they have room, a computer stores an output tile while it multiplies the
operands of the next one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import compiler, mosaic
from pallas_kernels.fabric.fabric import update_in_place
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT

# The length of a stage's operand tiles along the contraction dimension, or of a piece of them.
STEP = 64
# A computer stores this many columns of a tile at a time: 128 bytes, as wide as a swizzle.
CHUNK = 64
COMPUTERS = 2
# Warpgroup 2 is the loader, if there is one.
_LOADER = 2
# A thread block of a wave has at least this many output tiles, so that the start of a block takes
# little time next to them. Only the last wave with tiles may have fewer.
_LEAST_TILES = 8
# Bytes of shared memory that are reserved for barriers and for Mosaic.
OTHER_BYTES = 2560


@dataclasses.dataclass(frozen=True)
class BlockTiles:
    """A thread block's output tiles: `count` of `total`, from `first` on, `stride` apart."""

    first: jax.Array
    stride: jax.Array
    count: jax.Array
    total: jax.Array

    def index(self, turn: Any) -> jax.Array:
        """Returns the index of the block's tile number `turn`; past the last, a valid one."""
        last = jnp.maximum(self.total - 1, 0)
        return jnp.minimum(self.first + turn * self.stride, last)

    def walk(
        self,
        look_up: Callable[[jax.Array], Any],
        body: Callable[[Any, Any, Any], Any],
        carry: Any,
        *,
        once_more: bool = False,
    ) -> Any:
        """Runs `body` on each tile, and looks up the next one meanwhile, to hide the latency.

        `body(look_up(index), exists, carry)` computes the tile of an index, and returns the next
        carry. With `once_more`, it also runs once after the last tile, with `exists` False, to
        store the last tile if it stores a tile while it computes the next. Returns the last carry.
        """

        def one_tile(turn: jax.Array, state: Any) -> Any:
            tile, carry = state
            following = look_up(self.index(turn + 1))
            exists = turn < self.count if once_more else True
            return following, body(tile, exists, carry)

        state = look_up(self.index(0)), carry
        _, last_carry = lax.fori_loop(0, self.count + int(once_more), one_tile, state)
        return last_carry


def even_bands(width: int, block_n: int, most: int) -> int:
    """Returns `Tiles.band` of bands about equally wide, of at most `most` columns of tiles."""
    columns = -(-width // block_n)
    return -(-columns // -(-columns // most))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Base class of the grouped matmul kernels: warpgroup roles, and the order of output tiles."""

    # Has at least `block_n`, the columns of an output tile, and `band`; see `tile_position`.
    tiles: Any
    num_blocks: int  # of a wave: as many as run at the same time
    width: int  # columns of the output
    num_waves: int = dataclasses.field(default=1, kw_only=True)  # see `block_tiles`

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        raise NotImplementedError

    @property
    def all_blocks(self) -> int:
        return self.num_blocks * self.num_waves

    @property
    def has_loader(self) -> bool:
        """Whether a third warpgroup loads operands, where a computer needs few registers."""
        raise NotImplementedError

    @property
    def loads_in_one_warp(self) -> bool:
        """Whether the loader only starts copies and moves scalars, for which a warp is enough."""
        return True

    def take_roles(self, load: Callable[[], None], compute: Callable[[jax.Array], None]) -> None:
        """Runs `load()` in the loader, if there is one, and `compute(number)` in both computers."""
        warpgroup = lax.axis_index("warpgroup")
        if not self.has_loader:
            compute(warpgroup)
            # Bulk copies must have read shared memory before the block ends.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return

        @pl.when(warpgroup == _LOADER)
        def _load():
            if not self.loads_in_one_warp:
                return load()
            # Instructions of the other warps would take power and time from the computers.
            pl.kernel(
                lambda: pl.when(lax.axis_index("warp") == 0)(load),
                mesh=plgpu.WarpMesh(axis_name="warp"),
            )()

        @pl.when(warpgroup != _LOADER)
        def _compute():
            compute(warpgroup)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @property
    def tile_columns(self) -> int:
        return -(-self.width // self.tiles.block_n)

    def block_tiles(self, total: jax.Array) -> BlockTiles:
        """Returns which of `total` output tiles belong to this thread block."""
        # A wave of blocks has a range of tiles, of which block b has every num_blocks-th. A GPU
        # starts the blocks wave by wave, each as soon as a multiprocessor is free. If another
        # kernel occupies some multiprocessors, blocks that cannot start delay only their own wave.
        first, end = lax.axis_index("block"), total
        stride = jnp.int32(self.num_blocks)
        if self.num_waves > 1:
            wave, block_of_wave = quotient_and_rest(first, stride)
            tiles_of_block = lax.div(total + (self.all_blocks - 1), jnp.int32(self.all_blocks))
            tiles_of_wave = jnp.maximum(tiles_of_block, _LEAST_TILES) * stride
            first = block_of_wave + wave * tiles_of_wave
            end = jnp.minimum(total, (wave + 1) * tiles_of_wave)
        count = lax.div(jnp.maximum(end - first + (stride - 1), 0), stride)
        return BlockTiles(first, stride, count, total)

    def tile_position(self, index: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the position of an output tile: (index of its row of tiles, its first column).

        Tiles are numbered band by band, and within a band row by row. A band is `tiles.band`
        adjacent columns of tiles, or fewer in the last band, over all `rows` rows of tiles, if any.
        So tiles that blocks compute at the same time share operands, which stay in the caches.
        """
        band = jnp.int32(self.tiles.band)
        band_index, index_in_band = quotient_and_rest(index, jnp.maximum(rows * band, 1))
        # The columns of tiles in this band.
        columns = band
        if self.tile_columns % self.tiles.band:
            columns = jnp.minimum(band, self.tile_columns - band_index * band)
            # LLVM would divide 16-bit numbers, which ptxas does by a call in relocatable code. Any
            # call serializes the tensor cores' instructions.
            columns = mosaic.opaque_scalar(columns)
        row, column = quotient_and_rest(index_in_band, columns)
        return row, (band_index * band + column) * self.tiles.block_n


def run_one(functions: Sequence[Callable[[], None]], index: jax.Array) -> None:
    """Runs `functions[index]` in a kernel; none of them if the traced index is past the last."""
    # JAX lowers the first branch of a switch twice, so the first branch here is empty.
    lax.switch(jnp.where(index < len(functions), index + 1, 0), [lambda: None, *functions])


def choose(index: jax.Array, functions: Sequence[Callable[[], None]], first: int = 0) -> None:
    """Runs `functions[index - first]` in a kernel; past either end, the nearest of them."""
    # In each step of a ring, a few comparisons take less time than a jump table of all functions.
    if len(functions) == 1:
        return functions[0]()
    half = len(functions) // 2
    # `lax.cond` compiles to the same code, but JAX lowers its first branch twice, at each level.
    halves = [
        lambda: choose(index, functions[half:], first + half),
        lambda: choose(index, functions[:half], first),
    ]
    return run_one(halves, (index < first + half).astype(jnp.int32))


def launch(
    kernel: Kernel, scratch_types: dict[str, Any], out_type: Any, name: str
) -> Callable[..., Any]:
    """Returns a function from operands to results that launches `kernel` on its blocks."""
    return compiler.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch_types,
        num_blocks=kernel.all_blocks,
        num_warpgroups=COMPUTERS + kernel.has_loader,
        # Pallas would add a barrier before each copy to a stage, which computers wait for if they
        # feed the ring. Stages have barriers of their own, and each write to shared memory is
        # between a wait for the copies from it and `commit_smem`, which are barriers, too.
        auto_barriers=False,
        kernel_name=name,
    )


def run_into(
    sums: Sequence[jax.Array] | None, operands: Sequence[jax.Array], kernel: Kernel,
    scratch_types: dict[str, Any], out_type: Any, name: str,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Runs a kernel; returns its results or, if given, `sums`, to which it adds them in place."""
    if sums is None:
        return tuple(launch(kernel, scratch_types, out_type, name)(*operands))
    call = launch(kernel, scratch_types, [], name)
    updated, _ = update_in_place(sums, lambda refs: call(*operands, *refs))
    return updated


def store_or_add(buffer: Any, destination: Any, adds: bool) -> None:
    """Starts a bulk copy of a buffer in shared memory to `destination`, or an addition to it."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, destination, reduction_op="add" if adds else None)


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """Returns Mosaic's transforms for tensor cores: swizzled tiles of 8 rows of 128 bytes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((ROW_ALIGNMENT, columns)), plgpu.SwizzleTransform(128)


def stage_of(number: jax.Array, num_stages: int) -> jax.Array:
    """Returns the stage of a ring for step `number`, which is at least 0."""
    return quotient_and_rest(number, jnp.int32(num_stages))[1]


def quotient_and_rest(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a / b, rounded down, and the rest; neither number is negative."""
    # Without signs, a division takes fewer instructions.
    a, b = a.astype(jnp.uint32), b.astype(jnp.uint32)
    return lax.div(a, b).astype(jnp.int32), lax.rem(a, b).astype(jnp.int32)


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def zeros(shape: tuple[int, int], dtype: Any) -> jax.Array:
    """Returns zeros in registers, in the layout WGMMA."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), plgpu.Layout.WGMMA)
