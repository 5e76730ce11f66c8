"""What the grouped matmul's kernels share: a ring of operand tiles, and the order of tiles.

A fixed number of blocks walk the tiles of the output, each with three warpgroups:

  loader    (one) copies operand tiles into a ring in shared memory, ahead of the computers;
  computers (two) multiply the operand tiles, each for half of the output tile, and store it: if
            the registers have room for it, in parts, while the next one is multiplied.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.fabric import drain
from pallas_kernels.matmul.row_tiles import ROW_ALIGNMENT

CHUNK = 64  # columns that a computer stores at a time, and the width of a swizzled tile
COMPUTERS = 2
_LOADER = 2  # the loader's warpgroup; the computers are 0 and 1
_LOADER_REGISTERS, _COMPUTER_REGISTERS = 40, 232  # of each thread, from 168
OTHER_BYTES = 2560  # shared memory set aside for barriers and for Mosaic


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The common base of the kernels: the ring, and the order of tiles."""

    tiles: Any  # has block_n, num_stages and band
    num_blocks: int
    interpreted: bool
    width: int  # columns of the output

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        """The body: takes references to the operands and the outputs, and scratch."""
        raise NotImplementedError

    @property
    def matrices(self) -> int:
        """Returns how many right operand tiles a stage holds."""
        return 1

    @property
    def tile_columns(self) -> int:
        """Returns how many tiles are side by side; the last may reach past the output."""
        return -(-self.width // self.tiles.block_n)

    def ring(
        self, dtype: Any, left: tuple[int, int], right: tuple[int, ...], staged: tuple[int, int]
    ) -> dict[str, Any]:
        """Returns scratch types: of the ring and its barriers, and of what each computer stages.

        `staged` is (chunks, rows of a chunk).
        """
        stages, operand = self.tiles.num_stages, swizzled(dtype)
        return dict(
            left=plgpu.SMEM((stages, *left), dtype, transforms=operand),
            right=plgpu.SMEM((stages, *right), dtype, transforms=operand),
            staged=plgpu.SMEM((COMPUTERS, *staged, CHUNK), dtype, transforms=operand),
            full=plgpu.Barrier(num_arrivals=1 + self.matrices, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=stages),
        )

    def take_roles(
        self,
        scratch: dict[str, Any],
        load: Callable[[], jax.Array],
        compute: Callable[[jax.Array], None],
    ) -> None:
        """Runs `load` in the loader's warpgroup and `compute` in those of the computers.

        The registers that the loader does without go to the computers. `load` returns how many
        stages it has filled; `compute` is given the computer's number, and starts its stores.
        """
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _LOADER)
        def _load():
            if not self.interpreted:
                plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
            drain(scratch["empty"], load(), self.tiles.num_stages)

        @pl.when(warpgroup != _LOADER)
        def _compute():
            if not self.interpreted:
                plgpu.set_max_registers(_COMPUTER_REGISTERS, action="increase")
            compute(warpgroup)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def each_of(
        self,
        total: jax.Array,
        look_up: Callable[[jax.Array], Any],
        body: Callable[[Any, Any], Any],
        carry: Any,
    ) -> Any:
        """Runs `body(look_up(tile), carry)` for this block's share of `total` tiles.

        The next tile is looked up before the body runs on the current one, to hide the latency of
        the look-up.
        """
        return self._each(total, look_up, lambda tile, _, carry: body(tile, carry), carry, 0)

    def each_and_store(
        self,
        total: jax.Array,
        look_up: Callable[[jax.Array], Any],
        body: Callable[[Any, jax.Array, Any], Any],
        carry: Any,
    ) -> Any:
        """Runs `body(tile, exists, carry)` for each tile as `each_of` does, and once more.

        The body stores the tile before the one that it computes. The last time there is none to
        compute, and `exists` is False. So the code that stores a tile stands in the kernel once.
        """
        return self._each(total, look_up, body, carry, 1)

    def _each(self, total, look_up, body, carry, more):
        block, stride = lax.axis_index("block"), self.num_blocks
        mine = lax.div(total - block + (stride - 1), jnp.int32(stride))

        def looked_up(i):
            return look_up(jnp.minimum(block + i * stride, jnp.maximum(total - 1, 0)))

        def step(i, both):
            tile, carry = both
            following = looked_up(i + 1)
            return following, body(tile, i < mine, carry)

        return lax.fori_loop(0, mine + more, step, (looked_up(0), carry))[1]

    def place(self, index: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the row of tiles and the first column of the output tile of an index.

        Tiles are numbered band by band: a band is `tiles.band` columns of tiles, over all `rows`.
        The last band may have fewer columns.
        """
        band = jnp.int32(self.tiles.band)
        whole, rest = quotient_and_rest(index, jnp.maximum(rows * band, 1))
        in_band = band
        if self.tile_columns % self.tiles.band:
            in_band = jnp.minimum(band, self.tile_columns - whole * band)
        row, column = quotient_and_rest(rest, in_band)
        return row, (whole * band + column) * self.tiles.block_n

    def fill(
        self, scratch: Any, used: jax.Array, lefts: Sequence[Any], kind: Any, rights: Sequence[Any]
    ) -> jax.Array:
        """Copies operand tiles, `lefts[kind]` and all of `rights`, into the ring's next stage.

        Waits until the stage is empty. A left tile may have fewer rows than the stage has room for.
        """
        stage = lax.rem(used, jnp.int32(self.tiles.num_stages))

        @pl.when(used >= self.tiles.num_stages)
        def _():
            plgpu.barrier_wait(scratch["empty"].at[stage])

        full = scratch["full"].at[stage]

        def copy_left(left):
            plgpu.copy_gmem_to_smem(left, scratch["left"].at[stage, : left.shape[0]], full)

        lax.switch(kind, [functools.partial(copy_left, left) for left in lefts])
        tiles = scratch["right"].at[stage]
        for i, right in enumerate(rights):
            plgpu.copy_gmem_to_smem(right, tiles if len(rights) == 1 else tiles.at[i], full)
        return used + 1

    def accumulate(
        self,
        scratch: Any,
        used: jax.Array,
        steps: Any,
        shape: tuple[int, int],
        multiply: Callable[[Any, jax.Array, jax.Array], None],
        meanwhile: Callable[[jax.Array], None] | None = None,
        least_steps: int = 0,
    ) -> jax.Array:
        """Runs `multiply(accumulator, stage, step)` on the ring's next `steps` stages; frees them.

        `multiply` starts as many matmuls as there are `matrices`, which `wgmma_wait` counts, into
        an accumulator of the given shape. `meanwhile(step)` runs while they are under way, and
        `least_steps` times at least. With `least_steps` every step asks whether it is one of
        `steps`, which costs the gradients of matrices up to 7 %.
        """
        num_stages = jnp.int32(self.tiles.num_stages)

        def free(i):
            plgpu.barrier_arrive(scratch["empty"].at[lax.rem(used + i, num_stages)])

        def scope(accumulator):
            def multiply_stage(i):
                stage = lax.rem(used + i, num_stages)
                plgpu.barrier_wait(scratch["full"].at[stage])
                multiply(accumulator, stage, i)

            def step(i, _):
                if least_steps:
                    pl.when(i < steps)(lambda: multiply_stage(i))
                else:
                    multiply_stage(i)
                if meanwhile is not None:
                    meanwhile(i)
                # Once the step before this one has ended, its stage is free.
                plgpu.wgmma_wait(self.matrices)
                pl.when((i > 0) & (i <= steps))(lambda: free(i - 1))

            all_steps = jnp.maximum(steps, least_steps)
            lax.fori_loop(0, all_steps, step, None)
            total = accumulator[...]
            pl.when((all_steps > 0) & (all_steps <= steps))(lambda: free(all_steps - 1))
            return total

        return pl.run_scoped(scope, plgpu.ACC(shape))


def run_one(functions: Sequence[Callable[[], None]], index: jax.Array) -> None:
    """Runs the function of that index, or nothing if it is past the last."""
    # JAX lowers the first branch of a switch twice.
    lax.switch(jnp.where(index < len(functions), index + 1, 0), [lambda: None, *functions])


# Of 8 rows of 64 columns, a warp holds two rows in registers, and a thread four neighbours of one.
EIGHT_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((ROW_ALIGNMENT, CHUNK), (2, 4))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)


def check_buffers(tiles: Any) -> None:
    """Raises ValueError if a ring of such tiles could not turn, or nothing could be swept."""
    if tiles.num_stages < 2 or tiles.band < 1:
        raise ValueError(f"a ring needs two stages, and band must be positive, not {tiles}.")


def launch(
    kernel: Kernel,
    scratch_types: dict[str, Any],
    out_type: Any,
    name: str,
    interpret: Any,
) -> Callable[..., Any]:
    """Returns the function of arrays that runs a kernel on its blocks of three warpgroups."""
    return mosaic.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(kernel.num_blocks,),
        grid_names=("block",),
        num_threads=COMPUTERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name=name,
    )


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """Returns the transforms to the tensor cores' layout: swizzled tiles of 8 rows of 128 bytes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((ROW_ALIGNMENT, columns)), plgpu.SwizzleTransform(128)


def aligned(row: jax.Array) -> jax.Array:
    return pl.multiple_of(row, ROW_ALIGNMENT)


def quotient_and_rest(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.div(a, b), lax.rem(a, b)


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def zeros(shape: tuple[int, int], dtype: Any, layout: Any, interpreted: bool) -> jax.Array:
    """Returns zeros in registers, in a layout of Mosaic's."""
    array = jnp.zeros(shape, dtype)
    return array if interpreted else plgpu.layout_cast(array, layout)


def row_numbers(shape: tuple[int, int], layout: Any, interpreted: bool) -> jax.Array:
    """Returns each element's row, int32, in a layout of Mosaic's."""
    if interpreted:
        return lax.broadcasted_iota(jnp.int32, shape, 0)
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
