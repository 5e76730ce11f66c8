"""Base of the grouped matmul kernels: warpgroup roles, ring of operand tiles, order of tiles.

The kernels are persistent: a fixed number of thread blocks loop over the tiles of the output. A
thread block has three warpgroups: a loader, which copies operands, and two computers, which
multiply them. It has a ring of pipeline stages in shared memory. A stage holds the operands of one
step of a sum over the contraction dimension: a tile of the left operand and a tile of each right
operand, 64 long along that dimension.

                     full                       full
  memory --> loader ------> stages of the ring ------> computer 0 --> its half of the output tile
                    <------ 0  1  2  3 ...     <------ computer 1 --> its half
                     empty                      empty

  loader     copies operand tiles into a stage as soon as both computers have released it. The
             loader runs ahead of the computers by up to the number of stages, also into the next
             output tile.
  computers  multiply the tiles in a stage and release it. Each computes half of the output tile.
             If the registers have room, a computer stores an output tile while it multiplies the
             next one.

Each kernel is a subclass of `Kernel`. Its `__call__` gives each warpgroup its role, and defines the
operands in a stage, their multiplication, and the use of the sums.
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

# A stage's operand tiles are this many elements long along the contraction dimension.
STEP = 64
# A computer warpgroup stores this many columns at a time: the width of a swizzled 16-bit tile.
CHUNK = 64
COMPUTERS = 2
# Warpgroup 2 loads operand tiles. Warpgroups 0 and 1 compute.
_LOADER = 2
# Registers per thread of the loader warpgroup and of the computer warpgroups, after the loader has
# given registers to the computers. All threads start with 168.
_LOADER_REGISTERS, _COMPUTER_REGISTERS = 40, 232
# Bytes of a block's shared memory that are reserved for barriers and for Mosaic.
OTHER_BYTES = 2560


@dataclasses.dataclass(frozen=True)
class Choice:
    """Candidate tiles of one operand in global memory, one of which is copied.

    A copy's source array and shape are static, so there is a candidate for each that may be needed.

    Attributes:
      tiles: references to the candidate tiles.
      chosen: int32, the index of the tile to copy.
    """

    tiles: Sequence[Any]
    chosen: Any = 0

    def copy(self, destination: Callable[[Any], Any], full: Any) -> None:
        """Starts an asynchronous copy of the chosen tile to shared memory.

        Args:
          destination: maps a candidate tile to the reference in shared memory that it is copied to.
          full: the barrier at which the copy arrives.
        """

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
    """A ring of pipeline stages in shared memory, each with the operand tiles of one step.

    The arrays and barriers are scratch types outside the kernel's body, and references inside it.

    Attributes:
      left: [stages, ...] one tile of the left operand for each stage.
      right: [stages, ...] one tile of the right operand for each stage; [stages, matrices, ...] if
        `matrices` is more than 1.
      full: for each stage, the barrier at which the loader's copies arrive.
      empty: for each stage, the barrier at which the computer warpgroups release it.
      num_stages: number of stages.
      matrices: number of right operand tiles in a stage.
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
        """Returns a ring of scratch types, from which the kernel's launch allocates shared memory.

        Args:
          dtype: dtype of both operands.
          num_stages: number of stages.
          left: shape of a left operand tile.
          right: shape of a right operand tile.
          matrices: number of right operand tiles in a stage.
        """
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
        """Returns the index of the stage that holds step `step`.

        A thread block numbers its steps consecutively, over all its output tiles.
        """
        return lax.rem(step, jnp.int32(self.num_stages))

    def right_tiles(self, stage: jax.Array) -> list[Any]:
        """Returns references to a stage's `matrices` right operand tiles."""
        tiles = self.right.at[stage]
        return [tiles] if self.matrices == 1 else [tiles.at[i] for i in range(self.matrices)]

    def fill(self, used: jax.Array, left: Choice, rights: Sequence[Choice]) -> jax.Array:
        """Starts the copies of one step's operand tiles, once the step's stage is empty.

        Args:
          used: int32, the number of steps that this block has filled before.
          left: the left operand tile; it may have fewer rows than the stage has room for.
          rights: a right operand tile for each of `matrices`.

        Returns:
          `used` + 1.
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
        """Waits until the computer warpgroups have released all stages, after `used` steps."""
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
        """Sums products over the ring's next `steps` steps, and releases their stages.

        Args:
          used: int32, the number of steps that this block has multiplied before.
          steps: number of steps of this sum: 0, or at least `least_steps`.
          shape: shape of the accumulator.
          multiply: `multiply(accumulator, stage, step)` starts the asynchronous matmuls of a
            stage's operands: exactly `matrices` of them, since `wgmma_wait` counts matmuls.
          meanwhile: `meanwhile(step)` runs in each step while its matmuls are under way.
          least_steps: `meanwhile` runs at least this many times, even if `steps` is 0. If it is not
            0, each step first checks that it is below `steps`. This check would make the gradients
            of matrices up to 7 % slower.

        Returns:
          The sums in registers, float32 of shape `shape`.
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
        # After the wait only this step's matmuls may still run, so the previous step's stage is
        # free.
        plgpu.wgmma_wait(self.matrices)
        pl.when((step > 0) & (step <= steps))(lambda: self._free(used + (step - 1)))

    def _free(self, step: jax.Array) -> None:
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Base class of the grouped matmul kernels: warpgroup roles, and the order of output tiles.

    Attributes:
      tiles: tile sizes, with at least `block_n`, the columns of an output tile, and `band`, the
        number of columns of tiles in a band (see `place`).
      num_blocks: number of thread blocks.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
      width: columns of the output.
    """

    tiles: Any
    num_blocks: int
    interpreted: bool
    width: int

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        """Runs as the kernel's body, with references to operands, outputs and named scratch."""
        raise NotImplementedError

    @property
    def tile_columns(self) -> int:
        """Returns how many tiles cover the output's columns; the last may reach past them."""
        return -(-self.width // self.tiles.block_n)

    def take_roles(self, load: Callable[[], None], compute: Callable[[jax.Array], None]) -> None:
        """Runs `load()` in the loader warpgroup, and `compute(number)` in both computer warpgroups.

        `number` is the computer warpgroup's index, 0 or 1. The loader first gives most of its
        registers to the computers.
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
        """Runs `body` on each output tile that belongs to this thread block.

        Block b has the tiles b, b + num_blocks, b + 2 * num_blocks and so on. The next tile is
        looked up before the body runs on the current one, to hide the latency of the look-up.

        Args:
          total: int32, the number of output tiles of all blocks.
          look_up: maps a tile's index to the description of the tile that `body` takes.
          body: `body(look_up(tile), exists, carry)` returns the next carry. `exists` is whether
            there is a tile to compute.
          carry: the first carry.
          once_more: whether the body also runs once after the last tile, with `exists` False. A
            body that stores the previous tile while it computes a tile can then store the last
            tile.

        Returns:
          The last carry.
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
        """Returns the position of the output tile `index`: its row of tiles, and its first column.

        Tiles are numbered band by band, and row by row within a band. A band is `tiles.band`
        columns of tiles over all `rows` rows of tiles; the last band may have fewer columns.
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
    """Calls `functions[index]` for a traced index; calls none if the index is past the last one."""
    # JAX lowers the first branch of a switch twice. An empty first branch keeps the code small.
    lax.switch(jnp.where(index < len(functions), index + 1, 0), [lambda: None, *functions])


# A warpgroup's register layout for arrays of 8 rows and 64 columns. Each of the four warps holds
# two rows, and each thread holds four neighbouring values of a row.
EIGHT_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((ROW_ALIGNMENT, CHUNK), (2, 4))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)


def check_buffers(tiles: Any) -> None:
    """Raises ValueError if `tiles.num_stages` is less than 2, or `tiles.band` is less than 1."""
    if tiles.num_stages < 2 or tiles.band < 1:
        raise ValueError(f"a ring needs two stages, and band must be positive, not {tiles}.")


def launch(
    kernel: Kernel,
    scratch_types: dict[str, Any],
    out_type: Any,
    name: str,
    interpret: Any,
) -> Callable[..., Any]:
    """Returns a function from operand arrays to result arrays, which launches `kernel` on the GPU.

    Args:
      kernel: the kernel, which runs on `kernel.num_blocks` blocks of three warpgroups.
      scratch_types: types of shared memory and barriers, by the argument names of the kernel.
      out_type: shape and dtype of the result, or a list of them.
      name: the kernel's name in profiles.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.
    """
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
    """Returns Mosaic's transforms of an array in shared memory that tensor cores read.

    The array is stored as tiles of 8 rows of 128 bytes, which are swizzled.
    """
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((ROW_ALIGNMENT, columns)), plgpu.SwizzleTransform(128)


def aligned(row: jax.Array) -> jax.Array:
    return pl.multiple_of(row, ROW_ALIGNMENT)


def quotient_and_rest(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.div(a, b), lax.rem(a, b)


def transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def zeros(shape: tuple[int, int], dtype: Any, layout: Any, interpreted: bool) -> jax.Array:
    """Returns zeros in registers. `layout` is their Mosaic register layout on a GPU."""
    array = jnp.zeros(shape, dtype)
    return array if interpreted else plgpu.layout_cast(array, layout)
