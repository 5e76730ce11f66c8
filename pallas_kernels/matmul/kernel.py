"""Base of the grouped matmul kernels: warpgroup roles, ring of operand tiles, order of tiles.

The kernels are persistent: a fixed number of thread blocks, or a few waves of them, loop over the
tiles of the output. A thread block has three warpgroups: a loader, which copies operands, and two
*computers*, the compute warpgroups, which multiply them. It keeps a ring of pipeline stages in
shared memory. A stage holds the operands of one step of a sum over the contraction dimension: a
tile of the left operand and a tile of each right operand. Along that dimension they are 64 long, or
a multiple of 64 for matrices in MXFP4. In the diagram, `full` and `empty` are the barriers of each
stage by which the warpgroups wait for each other:

                     full                       full
  memory --> loader ------> stages of the ring ------> computer 0 --> its half of the output tile
                    <------ 0  1  2  3 ...     <------ computer 1 --> its half of the output tile
                     empty                      empty

  loader     copies operand tiles into a stage as soon as both computers have released it. It runs
             ahead of the computers by up to the number of stages. It does not wait at the end of an
             output tile, but goes on with the operands of the next one.
  computers  multiply the tiles in a stage and release it. Each computes half of the output tile.
             If the registers have room, a computer stores an output tile while it multiplies the
             operands of the next one.

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
from pallas_kernels.fabric.fabric import drain, update_in_place
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT

# The length of a stage's operand tiles along the contraction dimension, or of a piece of them.
STEP = 64
# A compute warpgroup stores this many columns of an output tile at a time. A row of them, in 16-bit
# numbers, is 128 bytes long, as wide as a 128-byte swizzle.
CHUNK = 64
COMPUTERS = 2
# Warpgroup 2 loads operand tiles. Warpgroups 0 and 1 compute.
_LOADER = 2
# Registers per thread of the loader warpgroup and of the compute warpgroups. All threads start with
# 168 registers; then the loader gives most of its own to the compute warpgroups.
_LOADER_REGISTERS, _COMPUTER_REGISTERS = 40, 232
# A thread block of a wave has at least this many output tiles, or the wave is the last with tiles.
_LEAST_TILES = 8
# Bytes of a thread block's shared memory that are reserved for barriers and for Mosaic.
OTHER_BYTES = 2560


@dataclasses.dataclass(frozen=True)
class TileSource:
    """Several candidate tiles of an operand in global memory, and which of them to copy.

    The kernel chooses the tile while it runs. But the array and the shape of a copy must be known
    when the kernel is compiled. So each array and shape that may be needed has a candidate tile.

    Attributes:
      candidates: references to the candidate tiles.
      index: int32, the index of the tile to copy.
    """

    candidates: Sequence[Any]
    index: Any = 0

    def copy(self, destination: Callable[[Any], Any], full: Any) -> None:
        """Starts an asynchronous copy of the tile `index` to shared memory.

        Args:
          destination: takes a candidate tile, and returns a reference to the part of shared memory
            that gets this tile if it is copied.
          full: the barrier at which the copy arrives when it is complete.
        """

        def copy(tile: Any) -> None:
            plgpu.copy_gmem_to_smem(tile, destination(tile), full)

        lax.switch(self.index, [functools.partial(copy, tile) for tile in self.candidates])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["left", "right", "full", "empty"],
    meta_fields=["num_stages", "num_matrices"],
)
@dataclasses.dataclass(frozen=True)
class OperandRing:
    """A ring of pipeline stages in shared memory, each with the operand tiles of one step.

    Outside the kernel's body, the attributes `left`, `right`, `full` and `empty` are types of
    scratch, and inside it they are references to the scratch.

    Attributes:
      left: [stages, ...] one tile of the left operand for each stage.
      right: [stages, ...] one tile of the right operand for each stage; [stages, num_matrices, ...]
        if `num_matrices` is more than 1.
      full: for each stage, the barrier at which the loader's copies into the stage arrive.
      empty: for each stage, the barrier at which the compute warpgroups arrive when they have
        multiplied its tiles, so that the loader may overwrite them.
      num_stages: number of stages.
      num_matrices: number of right operand tiles in a stage.
    """

    left: Any
    right: Any
    full: Any
    empty: Any
    num_stages: int
    num_matrices: int

    @classmethod
    def types(
        cls,
        dtype: Any,
        num_stages: int,
        left: tuple[int, int],
        right: tuple[int, int],
        num_matrices: int = 1,
    ) -> OperandRing:
        """Returns a ring of scratch types, from which the kernel's launch allocates shared memory.

        Args:
          dtype: dtype of both operands.
          num_stages: number of stages.
          left: shape of a left operand tile.
          right: shape of a right operand tile.
          num_matrices: number of right operand tiles in a stage.
        """
        operand = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled(dtype))
        several = (num_matrices,) if num_matrices > 1 else ()
        return cls(
            left=operand((num_stages, *left)),
            right=operand((num_stages, *several, *right)),
            full=plgpu.Barrier(num_arrivals=1 + num_matrices, num_barriers=num_stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=num_stages),
            num_stages=num_stages,
            num_matrices=num_matrices,
        )

    def stage_of(self, step: jax.Array) -> jax.Array:
        """Returns the index of the stage that holds the operand tiles of step `step`.

        A sum over the contraction dimension is computed in steps. A step covers a part of that
        dimension: it multiplies one left operand tile by one tile of each right operand. A stage is
        a slot of the ring in shared memory, which holds the tiles of one step. A thread block
        numbers its steps from 0 on, through all of its output tiles, and uses the stages in turn.
        """
        return lax.rem(step, jnp.int32(self.num_stages))

    def right_tiles(self, stage: jax.Array) -> list[Any]:
        """Returns references to the `num_matrices` tiles of right operands in a stage."""
        tiles = self.right.at[stage]
        return (
            [tiles] if self.num_matrices == 1 else [tiles.at[i] for i in range(self.num_matrices)]
        )

    def fill(self, used: jax.Array, left: TileSource, rights: Sequence[TileSource]) -> jax.Array:
        """Starts the copies of one step's operand tiles, once the step's stage is empty.

        Args:
          used: int32, the number of steps for which this block has filled a stage before.
          left: the left operand tile. It may have fewer rows than there is room for in the stage.
          rights: the `num_matrices` right operand tiles.

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
        """Waits until the compute warpgroups have released all stages.

        The loader calls it after its last step; `used` is the number of steps that it has filled.
        """
        drain(self.empty, used, self.num_stages)

    def accumulate(
        self,
        used: jax.Array,
        steps: Any,
        shape: tuple[int, int],
        multiply: Callable[[Any, jax.Array, jax.Array], None],
        meanwhile: Callable[[jax.Array], None] | None = None,
        least_steps: int = 0,
        matmuls: int | None = None,
    ) -> jax.Array:
        """Sums products over the ring's next `steps` steps, and releases their stages.

        Args:
          used: int32, the number of steps that this block has multiplied before.
          steps: number of steps of this sum: 0, or at least `least_steps`.
          shape: shape of the accumulator.
          multiply: `multiply(accumulator, stage, step)` starts the asynchronous matmuls of a
            stage's operands: at least `matmuls` of them.
          meanwhile: `meanwhile(step)` runs in each step while the step's matmuls are under way, for
            example to store the previous output tile.
          least_steps: the least number of times that `meanwhile` runs. If `steps` is 0, it then
            runs without matmuls. Pass 0 where this is not needed: with a larger number, each step
            first checks that it is below `steps`. In the kernel for the gradients of matrices, this
            check would cost up to 7 % of the time.
          matmuls: how many matmuls of a stage may still run when the next stage's begin; None:
            `num_matrices`.

        Returns:
          The sums in registers, float32 of shape `shape`.
        """

        def all_steps_into(accumulator: Any) -> jax.Array:
            step = functools.partial(
                self._take_step,
                accumulator,
                used,
                steps,
                multiply,
                meanwhile,
                least_steps > 0,
                self.num_matrices if matmuls is None else matmuls,
            )
            all_steps = jnp.maximum(steps, least_steps)
            lax.fori_loop(0, all_steps, step, None)
            total = accumulator[...]
            is_full = (all_steps > 0) & (all_steps <= steps)
            pl.when(is_full)(lambda: self._free(used + (all_steps - 1)))
            return total

        return pl.run_scoped(all_steps_into, plgpu.ACC(shape))

    def accumulate_complete(
        self,
        used: jax.Array,
        steps: Any,
        totals: jax.Array,
        add: Callable[[jax.Array, jax.Array], jax.Array],
        meanwhile: Callable[[jax.Array], None] | None = None,
        least_steps: int = 0,
    ) -> jax.Array:
        """Sums products like `accumulate`, by matmuls that are complete when they return.

        `add(totals, stage)` adds the products of a stage's operands to `totals`, an array in
        registers, and returns the new totals. `meanwhile` runs after it. The other arguments are
        those of `accumulate`.
        """

        def take_step(step: jax.Array, totals: jax.Array) -> jax.Array:
            def add_stage() -> jax.Array:
                stage = self.stage_of(used + step)
                plgpu.barrier_wait(self.full.at[stage])
                new = add(totals, stage)
                # Bulk copies may overwrite only what the threads have read.
                plgpu.commit_smem()
                plgpu.barrier_arrive(self.empty.at[stage])
                return new

            if least_steps:
                totals = lax.cond(step < steps, add_stage, lambda: totals)
            else:
                totals = add_stage()
            if meanwhile is not None:
                meanwhile(step)
            return totals

        return lax.fori_loop(0, jnp.maximum(steps, least_steps), take_step, totals)

    def _take_step(
        self,
        accumulator: Any,
        used: jax.Array,
        steps: Any,
        multiply: Callable[[Any, jax.Array, jax.Array], None],
        meanwhile: Callable[[jax.Array], None] | None,
        may_be_past: bool,
        matmuls: int,
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
        # After this wait, all matmuls of the previous step are complete, and only those of this
        # step may still run. So the stage of the previous step is free.
        plgpu.wgmma_wait(matmuls)
        pl.when((step > 0) & (step <= steps))(lambda: self._free(used + (step - 1)))

    def _free(self, step: jax.Array) -> None:
        plgpu.barrier_arrive(self.empty.at[self.stage_of(step)])


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Base class of the grouped matmul kernels: warpgroup roles, and the order of output tiles.

    Attributes:
      tiles: the tile sizes. Has at least the attributes `block_n`, the number of columns of an
        output tile, and `band`, the number of columns of output tiles in a band; see
        `tile_position`.
      num_blocks: number of thread blocks of a wave, which is as many as run at the same time.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
      width: number of columns of the output.
      num_waves: number of waves of thread blocks; see `walk`.
    """

    tiles: Any
    num_blocks: int
    interpreted: bool
    width: int
    num_waves: int = dataclasses.field(default=1, kw_only=True)

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        """Runs as the kernel's body.

        `refs` are references to the operands and then to the outputs, and `scratch` are references
        to shared memory and barriers, by name.
        """
        raise NotImplementedError

    @property
    def all_blocks(self) -> int:
        """Returns the number of thread blocks of all waves."""
        return self.num_blocks * self.num_waves

    @property
    def tile_columns(self) -> int:
        """Returns the number of tiles, side by side, that cover the columns of the output.

        The last of them may reach past the last column.
        """
        return -(-self.width // self.tiles.block_n)

    def take_roles(self, load: Callable[[], None], compute: Callable[[jax.Array], None]) -> None:
        """Runs `load()` in the loader warpgroup, and `compute(number)` in both compute warpgroups.

        `number` is the index of the compute warpgroup, 0 or 1. The loader first gives most of its
        registers to the compute warpgroups.
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

        A wave of thread blocks has a range of tiles. Block b of a wave has the tiles b, b +
        num_blocks, b + 2 * num_blocks and so on of its wave's range. A GPU starts the blocks wave
        by wave, each as soon as a multiprocessor is free. If another kernel occupies some
        multiprocessors, the blocks that cannot start delay only the tiles of their own wave. Blocks
        of later waves start on the free multiprocessors. The next tile is looked up before the body
        runs on the current one, to hide the latency of the look-up.

        Args:
          total: int32, the number of output tiles of all blocks.
          look_up: maps a tile's index to the description of the tile that `body` takes.
          body: `body(look_up(tile), exists, carry)` computes a tile, and returns the carry that it
            takes for the next tile. `exists` is False only in the run that `once_more` adds, which
            has no tile to compute.
          carry: the carry that the body takes for the first tile.
          once_more: whether the body also runs once after the last tile. A body that stores the
            previous tile while it computes a tile can store the last tile in this run.

        Returns:
          The carry that the body returned last.
        """
        first, end = lax.axis_index("block"), total
        stride = jnp.int32(self.num_blocks)
        if self.num_waves > 1:
            wave, first = quotient_and_rest(first, stride)
            of_block = lax.div(total + (self.all_blocks - 1), jnp.int32(self.all_blocks))
            of_wave = jnp.maximum(of_block, _LEAST_TILES) * stride
            first += wave * of_wave
            end = jnp.minimum(total, (wave + 1) * of_wave)
        mine = lax.div(jnp.maximum(end - first + (stride - 1), 0), stride)

        def looked_up(i: Any) -> Any:
            return look_up(jnp.minimum(first + i * stride, jnp.maximum(total - 1, 0)))

        def turn(i: jax.Array, both: Any) -> Any:
            tile, carry = both
            following = looked_up(i + 1)
            return following, body(tile, i < mine if once_more else True, carry)

        return lax.fori_loop(0, mine + int(once_more), turn, (looked_up(0), carry))[1]

    def tile_position(self, index: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the position of an output tile: (index of its row of tiles, its first column).

        `index` is the number of the tile. Tiles are numbered band by band, and within a band row of
        tiles by row of tiles. A band is `tiles.band` adjacent columns of tiles, over all `rows`
        rows of tiles. The last band may have fewer columns.
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
    """Runs `functions[index]` in a kernel, where `index` is a traced scalar.

    Runs none of the functions if the index is past the last one.
    """
    # JAX lowers the first branch of a switch twice. To keep the code small, the first branch here
    # is an empty function.
    lax.switch(jnp.where(index < len(functions), index + 1, 0), [lambda: None, *functions])


# A register layout of a warpgroup, for arrays of 8 rows and 64 columns: each of the four warps
# holds two rows, and each thread holds four neighbouring values of a row.
EIGHT_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((ROW_ALIGNMENT, CHUNK), (2, 4))),
    warp_dims=(-4,),
    lane_dims=(-2, -3),
    vector_dim=-1,
)


def check_buffers(tiles: Any) -> None:
    """Raises ValueError if `tiles.num_stages` is less than 2, or `tiles.band` is less than 1."""
    if tiles.num_stages < 2 or tiles.band < 1:
        raise ValueError(
            f"num_stages must be at least 2 and band at least 1, but the tile sizes are {tiles}."
        )


def launch(
    kernel: Kernel,
    scratch_types: dict[str, Any],
    out_type: Any,
    name: str,
    interpret: Any,
) -> Callable[..., Any]:
    """Returns a function that launches `kernel`. It takes operand arrays and returns result arrays.

    Args:
      kernel: the kernel, which runs on `kernel.all_blocks` blocks of three warpgroups.
      scratch_types: types of shared memory and barriers, by the names under which the kernel takes
        the references to them.
      out_type: shape and dtype of the result, or a list of them.
      name: the kernel's name in profiles.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.
    """
    return mosaic.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(kernel.all_blocks,),
        grid_names=("block",),
        num_threads=COMPUTERS + 1,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name=name,
    )


def launch_into(
    kernel: Kernel,
    scratch_types: dict[str, Any],
    out_type: Any,
    name: str,
    interpret: Any,
    sums: Sequence[jax.Array] | None,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns a function like `launch`, whose kernel writes to new arrays or adds to `sums`.

    With `sums`, an array for each result, the outputs of the kernel are the memory of these arrays.
    An array that is still used elsewhere is copied first.
    """
    if sums is None:
        call = launch(kernel, scratch_types, out_type, name, interpret)
        return lambda *operands: tuple(call(*operands))
    call = launch(kernel, scratch_types, [], name, interpret)

    def add(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return update_in_place(sums, lambda refs: call(*operands, *refs))[0]

    return add


def store_or_add(buffer: Any, destination: Any, *, adds: bool, interpreted: bool) -> None:
    """Starts a bulk copy to `destination`, of a buffer that a warpgroup has written.

    The buffer is in shared memory, and `destination` is a reference to global memory. If `adds`,
    the numbers are added to those there.
    """
    if adds and interpreted:
        buffer[...] += destination[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        buffer, destination, reduction_op="add" if adds and not interpreted else None
    )


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """Returns the Mosaic transforms of an array in shared memory that tensor cores can read.

    By these transforms, the array is stored as tiles of 8 rows of 128 bytes, which are swizzled.
    `dtype` is the array's dtype.
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
    """Returns an array of zeros in registers.

    `layout` is its register layout, which an interpreted kernel does not need.
    """
    array = jnp.zeros(shape, dtype)
    return array if interpreted else plgpu.layout_cast(array, layout)
