"""What the grouped matmul's kernels share: roles of warpgroups, a ring, and the order of tiles.

A fixed number of thread blocks walk the tiles of the output. A block has three warpgroups and, in
shared memory, a ring of stages. A stage holds what one step of a sum takes: a tile of the left
operand and a tile of each right one, which are 64 long along the summed dimension.

                     full                       full
  memory --> loader ------> stages of the ring ------> computer 0 --> its half of the output tile
                    <------ 0  1  2  3 ...     <------ computer 1 --> its half
                     empty                      empty

  loader     fills one stage after the other, as soon as both computers have emptied it: it runs
             ahead of them by as many steps as there are stages, also into the next output tile.
  computers  multiply the tiles in a stage, each for its half of the output tile, and empty it. They
             store an output tile, if the registers have room for it, while the next one is
             multiplied.

A kernel is a `Kernel` with a `__call__`, which gives each warpgroup its role. What is in a stage,
how it is multiplied and what becomes of the sums is for each kernel to say.
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

STEP = 64  # length of a stage's tiles along the summed dimension
CHUNK = 64  # columns that a computer stores at a time, and the width of a swizzled tile
COMPUTERS = 2
_LOADER = 2  # the loader's warpgroup; the computers are 0 and 1
_LOADER_REGISTERS, _COMPUTER_REGISTERS = 40, 232  # registers per thread, instead of 168
OTHER_BYTES = 2560  # the shared memory that is reserved for barriers and for Mosaic


@dataclasses.dataclass(frozen=True)
class Choice:
    """Tiles of an operand in memory; only the tile of index `chosen` is copied."""

    tiles: Sequence[Any]
    chosen: Any = 0

    def copy(self, destination: Callable[[Any], Any], full: Any) -> None:
        """Starts to copy the chosen tile to `destination(tile)`; the copy arrives at `full`."""

        def copy(tile: Any) -> None:
            plgpu.copy_gmem_to_smem(tile, destination(tile), full)

        lax.switch(self.chosen, [functools.partial(copy, tile) for tile in self.tiles])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["left", "right", "full", "empty"],
    meta_fields=["num_stages", "matrices"],
)
@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring of operand tiles: holds scratch types outside the kernel's body, references inside.

    Attributes:
      left: [stages, ...] the tiles of the left operand.
      right: [stages, ...] the tiles of the right operand; [stages, matrices, ...] if a stage has
        several.
      full: a stage's barrier at which its copies arrive.
      empty: a stage's barrier at which the computers arrive.
      num_stages: depth of the ring.
      matrices: right operand tiles in a stage.
    """

    left: Any
    right: Any
    full: Any
    empty: Any
    num_stages: int
    matrices: int

    @classmethod
    def types(
        cls,
        dtype: Any,
        num_stages: int,
        left: tuple[int, int],
        right: tuple[int, int],
        matrices: int = 1,
    ) -> Ring:
        """Returns the types of scratch, for tiles of the given shapes."""
        operand = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled(dtype))
        several = (matrices,) if matrices > 1 else ()
        return cls(
            left=operand((num_stages, *left)),
            right=operand((num_stages, *several, *right)),
            full=plgpu.Barrier(num_arrivals=1 + matrices, num_barriers=num_stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=num_stages),
            num_stages=num_stages,
            matrices=matrices,
        )

    def stage_of(self, step: jax.Array) -> jax.Array:
        """Returns the stage of a step; steps are counted over all tiles of the block."""
        return lax.rem(step, jnp.int32(self.num_stages))

    def right_tiles(self, stage: jax.Array) -> list[Any]:
        """Returns the right operand's tiles in a stage."""
        tiles = self.right.at[stage]
        return [tiles] if self.matrices == 1 else [tiles.at[i] for i in range(self.matrices)]

    def fill(self, used: jax.Array, left: Choice, rights: Sequence[Choice]) -> jax.Array:
        """Copies operand tiles to the next stage, that of step `used`; returns `used` + 1.

        Waits until the stage is empty. A left tile may have fewer rows than the stage has room for.
        """
        stage = self.stage_of(used)

        @pl.when(used >= self.num_stages)
        def _():
            plgpu.barrier_wait(self.empty.at[stage])

        full = self.full.at[stage]
        left.copy(lambda tile: self.left.at[stage, : tile.shape[0]], full)
        for destination, right in zip(self.right_tiles(stage), rights, strict=True):
            right.copy(functools.partial(_always, destination), full)
        return used + 1

    def drain(self, used: jax.Array) -> None:
        """Waits until the computers have emptied all stages, after `used` steps."""
        drain(self.empty, used, self.num_stages)

    def accumulate(
        self,
        used: jax.Array,
        steps: Any,
        shape: tuple[int, int],
        multiply: Callable[[Any, jax.Array, jax.Array], None],
        meanwhile: Callable[[jax.Array], None] | None = None,
        least_steps: int = 0,
    ) -> jax.Array:
        """Sums over the ring's next `steps` stages, from step `used` on, and empties them.

        Args:
          used: steps that the block has taken before.
          steps: steps of this sum.
          shape: shape of the accumulator.
          multiply: `multiply(accumulator, stage, step)` starts as many matmuls as there are
            `matrices`, which `wgmma_wait` counts.
          meanwhile: `meanwhile(step)` runs while matmuls are under way, `least_steps` times at
            least.
          least_steps: if it is not 0, every step checks whether it is one of `steps`. The checks
            make the gradients of matrices up to 7 % slower.

        Returns:
          The sums in registers, float32.
        """

        def sum_up(accumulator: Any) -> jax.Array:
            step = functools.partial(
                self._take_step, accumulator, used, steps, multiply, meanwhile, least_steps > 0
            )
            all_steps = jnp.maximum(steps, least_steps)
            lax.fori_loop(0, all_steps, step, None)
            total = accumulator[...]
            is_full = (all_steps > 0) & (all_steps <= steps)
            pl.when(is_full)(lambda: self._free(used + (all_steps - 1)))
            return total

        return pl.run_scoped(sum_up, plgpu.ACC(shape))

    def _take_step(
        self,
        accumulator: Any,
        used: jax.Array,
        steps: Any,
        multiply: Callable[[Any, jax.Array, jax.Array], None],
        meanwhile: Callable[[jax.Array], None] | None,
        may_be_past: bool,
        step: jax.Array,
        _: None,
    ) -> None:
        def multiply_stage() -> None:
            stage = self.stage_of(used + step)
            plgpu.barrier_wait(self.full.at[stage])
            multiply(accumulator, stage, step)

        if may_be_past:
            pl.when(step < steps)(multiply_stage)
        else:
            multiply_stage()
        if meanwhile is not None:
            meanwhile(step)
        # Once the step before this one has ended, its stage is empty.
        plgpu.wgmma_wait(self.matrices)
        pl.when((step > 0) & (step <= steps))(lambda: self._free(used + (step - 1)))

    def _free(self, step: jax.Array) -> None:
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The common base of the kernels: the roles of warpgroups, and the order of tiles.

    Attributes:
      tiles: sizes of tiles; has block_n and band.
      num_blocks: thread blocks.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
      width: columns of the output.
    """

    tiles: Any
    num_blocks: int
    interpreted: bool
    width: int

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        """The body: takes references to the operands and the outputs, and scratch."""
        raise NotImplementedError

    @property
    def tile_columns(self) -> int:
        """Returns how many tiles are side by side; the last may reach past the output."""
        return -(-self.width // self.tiles.block_n)

    def take_roles(self, load: Callable[[], None], compute: Callable[[jax.Array], None]) -> None:
        """Runs `load()` in the loader's warpgroup, and `compute(number)` in each computer.

        `number` is the computer's number. Registers move from the loader to the computers.
        """
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _LOADER)
        def _load():
            if not self.interpreted:
                plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
            load()

        @pl.when(warpgroup != _LOADER)
        def _compute():
            if not self.interpreted:
                plgpu.set_max_registers(_COMPUTER_REGISTERS, action="increase")
            compute(warpgroup)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def walk(
        self,
        total: jax.Array,
        look_up: Callable[[jax.Array], Any],
        body: Callable[[Any, Any, Any], Any],
        carry: Any,
        *,
        once_more: bool = False,
    ) -> Any:
        """Runs `body(look_up(tile), exists, carry)` for this block's share of `total` tiles.

        The next tile is looked up before the body runs on the current one, to hide the latency of
        the look-up.

        With `once_more` the body also runs once after the last tile, with `exists` False. A body
        that stores the previous tile while it computes a tile can then store the last one too.
        """
        block, stride = lax.axis_index("block"), self.num_blocks
        mine = lax.div(total - block + (stride - 1), jnp.int32(stride))

        def looked_up(i: Any) -> Any:
            return look_up(jnp.minimum(block + i * stride, jnp.maximum(total - 1, 0)))

        def turn(i: jax.Array, both: Any) -> Any:
            tile, carry = both
            following = looked_up(i + 1)
            return following, body(tile, i < mine if once_more else True, carry)

        return lax.fori_loop(0, mine + int(once_more), turn, (looked_up(0), carry))[1]

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


def _always(destination: Any, _: Any) -> Any:
    return destination


def run_one(functions: Sequence[Callable[[], None]], index: jax.Array) -> None:
    """Runs the function at `index`; runs nothing if the index is past the last function."""
    # JAX lowers the first branch of a switch twice, so the first one is empty.
    lax.switch(jnp.where(index < len(functions), index + 1, 0), [lambda: None, *functions])


# A register layout of 8 rows and 64 columns. Each warp holds two rows, and each thread four
# neighbouring values of a row.
EIGHT_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((ROW_ALIGNMENT, CHUNK), (2, 4))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)


def check_buffers(tiles: Any) -> None:
    """Raises ValueError if the ring has fewer than two stages, or `band` is not positive."""
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
