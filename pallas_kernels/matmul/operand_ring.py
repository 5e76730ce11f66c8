"""Ring of pipeline stages in shared memory, by which operand tiles reach the compute warpgroups.

A stage holds the operands of one step of a sum over the contraction dimension: a tile of the left
operand and a tile of each right operand. A thread block numbers the steps of all its output tiles,
and uses the stages in turn.

A third warpgroup, the *loader*, fills stages as soon as both computers have released them. If a
computer needs more registers than it has beside a loader, there is none, and each of 256 threads
may have 255. Computer 0 then *feeds* the ring: after it has released step n - 1, it starts the
copies of step n + stages - 1 to the same stage, while the tensor cores multiply step n:

              full: the copies have arrived                    both computers multiply step n
  memory ------> stages of the ring  ... n-1 | n | n+1 ... ------> its half of the output tile
              empty: both computers have released step n - 1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.fabric import drain
from pallas_kernels.matmul.kernel import COMPUTERS, BlockTiles, choose, stage_of, swizzled


@dataclasses.dataclass(frozen=True)
class TileSource:
    """Candidate tiles of an operand in global memory, and the int32 `index` of the one to copy."""

    # A copy's array and shape must be static, so `copy` branches on the index.
    candidates: Sequence[Any]
    index: Any = 0

    def copy(self, destination: Any, full: Any) -> None:
        """Starts to copy the tile to the first rows of `destination`; arrives at barrier `full`."""

        def start(tile: Any) -> None:
            plgpu.copy_gmem_to_smem(tile, destination.at[: tile.shape[0]], full)

        choose(self.index, [functools.partial(start, tile) for tile in self.candidates])


class Loader(Protocol):
    """Loads the operands of a kernel's output tiles, step by step."""

    def find(self, index: jax.Array) -> Any:
        """Returns what the other methods must know of output tile number `index`."""

    def steps_of(self, tile: Any) -> Any: ...

    def read_ahead(self, tile: Any, step: jax.Array) -> Any:
        """Reads what threads, not copies, load of a step; `step` may be past the last."""
        return ()

    # `ahead` is the result of `read_ahead` for this step, called two steps before: to hide latency.
    def load(self, tile: Any, step: jax.Array, number: jax.Array, ahead: Any) -> None:
        """Fills a stage by step `step` of a tile, which is step `number` of the thread block."""


class Feed(NamedTuple):
    """The next step to load: step number `step` of the block's tile number `turn`, int32."""

    turn: jax.Array
    step: jax.Array
    # The result of `Loader.find`.
    tile: Any
    # The results of `Loader.read_ahead` for this step and the one after it.
    ahead: tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Feeder:
    """Loads all steps of the thread block, in order, by `loader`.

    A loader warpgroup calls `run`. Where there is none, `start` and `follow` load in computer 0.
    """

    loader: Loader
    tiles: BlockTiles
    # [stages] barriers, at which both computers arrive to release a stage.
    empty: Any
    num_stages: int
    has_loader: bool

    def run(self) -> None:
        """Fills stages as soon as they are released, and waits until all are released again."""
        read_ahead = self.loader.read_ahead

        def one_tile(tile: Any, _: Any, number: jax.Array) -> jax.Array:
            def one_step(step: jax.Array, carry: Any) -> Any:
                # `now` and `following`: what is read ahead for this step and for the next one.
                number, (now, following) = carry
                after_following = read_ahead(tile, step + 2)
                self.load_released(tile, step, number, now)
                return number + 1, (following, after_following)

            ahead = read_ahead(tile, jnp.int32(0)), read_ahead(tile, jnp.int32(1))
            number, _ = lax.fori_loop(0, self.loader.steps_of(tile), one_step, (number, ahead))
            return number

        num_steps = self.tiles.walk(self.loader.find, one_tile, jnp.int32(0))
        drain(self.empty, num_steps, self.num_stages)

    def finish(self, used: jax.Array) -> None:
        """Waits in computer 0, if it feeds the ring, until all `used` steps are released."""
        if not self.has_loader:
            is_first = lax.axis_index("warpgroup") == 0
            pl.when(is_first)(lambda: drain(self.empty, used, self.num_stages))

    def load_released(self, tile: Any, step: jax.Array, number: jax.Array, ahead: Any) -> None:
        """Calls `loader.load` once the stage of step `number` is released."""

        @pl.when(number >= self.num_stages)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[stage_of(number, self.num_stages)])

        self.loader.load(tile, step, number, ahead)

    def start(self) -> Feed | None:
        """Fills all stages but one, which begin empty; returns the feed, None with a loader."""
        if self.has_loader:
            return None
        # Computer 1 loads nothing: its feed begins past the last tile.
        is_first = lax.axis_index("warpgroup") == 0
        feed = self._first_step_of(jnp.where(is_first, 0, self.tiles.count))
        return lax.fori_loop(0, self.num_stages - 1, self._load, feed)

    def follow(self, number: jax.Array, feed: Feed | None) -> Feed | None:
        """Loads step `number` + stages - 1, to the stage of step `number` - 1; returns the feed."""
        # A computer calls it in each step `number`, once it has released step `number` - 1.
        if feed is None:
            return None
        return self._load(number + (self.num_stages - 1), feed)

    def _load(self, number: jax.Array, feed: Feed) -> Feed:
        """Loads the feed's step in computer 0, if any step is left; returns the feed after it."""

        def load(feed: Feed) -> Feed:
            now, following = feed.ahead
            next_step = feed.step + 1
            self.load_released(feed.tile, feed.step, number, now)

            def of_same_tile() -> Feed:
                after_following = self.loader.read_ahead(feed.tile, next_step + 1)
                return feed._replace(step=next_step, ahead=(following, after_following))

            def of_next_tile() -> Feed:
                return self._first_step_of(feed.turn + 1)

            is_left = next_step < self.loader.steps_of(feed.tile)
            return lax.cond(is_left, of_same_tile, of_next_tile)

        return lax.cond(feed.turn < self.tiles.count, load, lambda feed: feed, feed)

    def _first_step_of(self, turn: jax.Array) -> Feed:
        tile = self.loader.find(self.tiles.index(turn))
        zero, read_ahead = jnp.int32(0), self.loader.read_ahead
        return Feed(turn, zero, tile, (read_ahead(tile, zero), read_ahead(tile, zero + 1)))


class Steps(NamedTuple):
    """The ring's next steps, over which a compute warpgroup sums products."""

    used: jax.Array  # the number of steps that this block has multiplied before
    count: Any  # the number of steps to multiply: at least `least`, or 0 past the block's last tile
    # `feeder` loads another step while one is multiplied; see `Feeder.follow`.
    feeder: Feeder
    feed: Feed | None
    # `meanwhile(step)` runs during a step's matmuls and, if `count` is 0, `least` times without.
    meanwhile: Callable[[jax.Array], None] | None = None
    least: int = 0


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["left", "right", "full", "empty"],
    meta_fields=["num_stages", "num_matrices"],
)
@dataclasses.dataclass(frozen=True)
class OperandRing:
    """A ring of pipeline stages in shared memory, each with the operand tiles of one step.

    Outside the kernel's body, the first four attributes are types of scratch; inside, references.
    """

    # [stages, ...] tiles of the left operand, and of the right operand; [stages, num_matrices, ...]
    # if a stage has tiles of several right operands.
    left: Any
    right: Any
    # [stages] barriers: the copies into a stage have arrived; copies may overwrite it.
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
        """Returns a ring of scratch types, for tiles of the shapes `left` and `right`."""
        operand = functools.partial(plgpu.SMEM, dtype=dtype, transforms=swizzled(dtype))
        several = (num_matrices,) if num_matrices > 1 else ()
        # Each operand's copy arrives at `full`, and each computer at `empty`.
        return cls(
            left=operand((num_stages, *left)),
            right=operand((num_stages, *several, *right)),
            full=plgpu.Barrier(num_arrivals=1 + num_matrices, num_barriers=num_stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=num_stages),
            num_stages=num_stages,
            num_matrices=num_matrices,
        )

    def stage_of(self, number: jax.Array) -> jax.Array:
        return stage_of(number, self.num_stages)

    def right_tile(self, stage: jax.Array, matrix: Any) -> Any:
        tile = self.right.at[stage]
        return tile if self.num_matrices == 1 else tile.at[matrix]

    def fill(self, number: jax.Array, left: TileSource, rights: Sequence[TileSource]) -> None:
        """Starts the copies of the operand tiles of step `number`, whose stage is empty."""
        stage = self.stage_of(number)
        full = self.full.at[stage]
        left.copy(self.left.at[stage], full)
        for i, right in enumerate(rights):
            right.copy(self.right_tile(stage, i), full)

    def accumulate(
        self,
        steps: Steps,
        matmuls: int,
        shape: tuple[int, int],
        multiply: Callable[[Any, jax.Array, jax.Array], None],
    ) -> tuple[jax.Array, Feed | None]:
        """Sums products over steps, and releases their stages.

        Returns the sums in registers, float32 of shape `shape`, and the new feed.

        Args:
          matmuls: how many of its asynchronous matmuls `multiply` may leave running.
          multiply: `multiply(accumulator, stage, step)` starts the matmuls of a stage's operands,
            which may still run when those of the next stage begin.
        """
        used, count = steps.used, steps.count

        def release_before(step: jax.Array) -> None:
            # Releases the stage of the step before `step`. If `count` is 0, none was multiplied.
            pl.when((step > 0) & (step <= count))(lambda: self._release(used + (step - 1)))

        def all_steps_into(accumulator: Any) -> tuple[jax.Array, Feed | None]:
            def take_step(step: jax.Array, feed: Feed | None) -> Feed | None:
                def multiply_stage() -> None:
                    stage = self.stage_of(used + step)
                    plgpu.barrier_wait(self.full.at[stage])
                    multiply(accumulator, stage, step)

                # Without `least`, no step checks that it is below `count`. The check would cost up
                # to 7 % of the time of the kernel for the gradients of matrices.
                if steps.least > 0:
                    pl.when(step < count)(multiply_stage)
                else:
                    multiply_stage()
                if steps.meanwhile is not None:
                    steps.meanwhile(step)
                # After this wait, only this step's matmuls may still run, and read its own stage.
                plgpu.wgmma_wait(matmuls)
                release_before(step)
                return steps.feeder.follow(used + step, feed)

            all_steps = jnp.maximum(count, steps.least)
            feed = lax.fori_loop(0, all_steps, take_step, steps.feed)
            # Reading the accumulator waits for all matmuls.
            total = accumulator[...]
            release_before(all_steps)
            return total, feed

        return pl.run_scoped(all_steps_into, plgpu.ACC(shape))

    def _release(self, number: jax.Array) -> None:
        plgpu.barrier_arrive(self.empty.at[self.stage_of(number)])
