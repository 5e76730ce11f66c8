"""Ring of pipeline stages in shared memory, by which operand tiles reach the compute warpgroups.

A stage holds the operands of one step of a sum over the contraction dimension: a tile of the left
operand and a tile of each right operand. A thread block numbers the steps of all its output tiles,
and uses the stages in turn.

A third warpgroup, the *loader*, fills stages as soon as both computers have released them. If a
computer needs more registers than it has beside a loader, there is none, and each of 256 threads
may have 255. The computers then *feed* the ring: once step n - 1 is released, one of them starts
the copies of step n + stages - 1 to the same stage, while the tensor cores multiply step n.
Computer 0 loads the even steps, and computer 1 the odd ones:

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
from pallas_kernels.matmul.kernel import COMPUTERS, BlockTiles, stage_of, swizzled


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

        def choose(tiles: Sequence[Any], first: int) -> None:
            if len(tiles) == 1:
                return start(tiles[0])
            half = len(tiles) // 2
            lower, upper = (tiles[:half], first), (tiles[half:], first + half)
            # `kernel.choose` clamps the index, which Pallas lacks in a loader of one warp.
            is_lower = self.index < first + half
            lax.cond(is_lower, lambda: choose(*lower), lambda: choose(*upper))

        choose(self.candidates, 0)


class Slot(NamedTuple):
    """The stage that a step's operands fill, and which of the operands are loaded."""

    number: jax.Array  # of the step among all steps of the block, int32; selects the stage
    # Only float8 kernels load the left operand and the right ones apart.
    left: bool = True
    right: bool = True


class Loader(Protocol):
    """Loads the operands of a kernel's output tiles, step by step."""

    def find(self, index: jax.Array) -> Any:
        """Returns what the other methods must know of output tile number `index`."""

    def steps_of(self, tile: Any) -> Any: ...

    def read_ahead(self, tile: Any, step: jax.Array) -> Any:
        """Reads what threads, not copies, load of a step; `step` may be past the last."""
        return ()

    # `ahead` is the result of `read_ahead` for this step, called two steps before: to hide latency.
    def load(self, tile: Any, step: jax.Array, slot: Slot, ahead: Any) -> None:
        """Loads operands of step `step` of a tile to the stage of `slot`."""


class Feed(NamedTuple):
    """A computer's next step to load: step `step` of the block's tile number `turn`, int32."""

    computer: jax.Array  # 0 or 1; carried, since to ask for it takes a shuffle
    turn: jax.Array
    step: jax.Array
    # The results of `Loader.find` for this tile and the next: found a tile ahead, to hide latency.
    tile: Any
    next_tile: Any
    # The result of `Loader.read_ahead` for this step.
    ahead: Any


@dataclasses.dataclass(frozen=True)
class Feeder:
    """Loads the steps of the thread block by `loader`.

    A loader warpgroup calls `run`. Where there is none, `start` and `follow` load in the computers.
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
                self.load_released(tile, step, Slot(number), now)
                return number + 1, (following, after_following)

            ahead = read_ahead(tile, jnp.int32(0)), read_ahead(tile, jnp.int32(1))
            number, _ = lax.fori_loop(0, self.loader.steps_of(tile), one_step, (number, ahead))
            return number

        num_steps = self.tiles.walk(self.loader.find, one_tile, jnp.int32(0))
        drain(self.empty, num_steps, self.num_stages)

    def load_released(self, tile: Any, step: jax.Array, slot: Slot, ahead: Any) -> None:
        """Calls `loader.load`; before a left operand, waits until the stage is released."""
        if slot.left:
            pl.when(slot.number >= self.num_stages)(lambda: self._wait(slot.number))
        self.loader.load(tile, step, slot, ahead)

    def _wait(self, number: jax.Array) -> None:
        """Waits until the stage of step `number`, as it was filled before, is released."""
        plgpu.barrier_wait(self.empty.at[stage_of(number, self.num_stages)])

    def start(self) -> Feed | None:
        """Loads this computer's share of the first stages - 1 steps; returns the feed, or None."""
        if self.has_loader:
            return None
        # Each computer counts a barrier's phases by its own waits. So each stage has one computer
        # that always fills it, and waits for each of its releases.
        assert self.num_stages > 2 and self.num_stages % 2 == 0, self.num_stages
        computer, turn = lax.axis_index("warpgroup"), jnp.int32(0)
        first, second = (self.loader.find(self.tiles.index(turn + i)) for i in range(2))
        feed = self._at_existing_step(Feed(computer, turn, computer, first, second, None))
        return lax.fori_loop(0, self.num_stages - 1, lambda n, f: self._load(Slot(n), f), feed)

    def follow(self, slot: Slot, feed: Feed | None) -> Feed | None:
        """Loads step `number` + stages - 1, to the stage of step `number` - 1; returns the feed."""
        # A computer calls it in each step, once it has released step `number` - 1. It may call
        # twice: first for the left operand, then for the right ones.
        if feed is None:
            return None
        return self._load(slot._replace(number=slot.number + (self.num_stages - 1)), feed)

    def finish(self, used: jax.Array) -> None:
        """Waits in a computer, if it feeds the ring, until the steps it loaded are released."""
        if self.has_loader:
            return
        computer = lax.axis_index("warpgroup")

        def wait(i: jax.Array, _: None) -> None:
            # Earlier steps of the same stages were waited for before the stage was filled again.
            number = used - 1 - i
            pl.when(number & 1 == computer)(lambda: self._wait(number))

        lax.fori_loop(0, jnp.minimum(used, self.num_stages), wait, None)

    def _load(self, slot: Slot, feed: Feed) -> Feed:
        """Loads a step if it is this computer's, and exists; returns the new feed."""

        def load(feed: Feed) -> Feed:
            self.load_released(feed.tile, feed.step, slot, feed.ahead)
            following = feed._replace(step=feed.step + 2)
            return self._at_existing_step(following) if slot.right else feed

        is_own = (slot.number & 1 == feed.computer) & (feed.turn < self.tiles.count)
        return lax.cond(is_own, load, lambda feed: feed, feed)

    def _at_existing_step(self, feed: Feed) -> Feed:
        """Moves a feed that is past its tile's end to a later tile; reads ahead for its step."""

        def is_past(feed: Feed) -> jax.Array:
            return (feed.step >= self.loader.steps_of(feed.tile)) & (feed.turn < self.tiles.count)

        def in_next_tile(feed: Feed) -> Feed:
            step = feed.step - self.loader.steps_of(feed.tile)
            after_next = self.loader.find(self.tiles.index(feed.turn + 2))
            return Feed(feed.computer, feed.turn + 1, step, feed.next_tile, after_next, None)

        feed = lax.while_loop(is_past, in_next_tile, feed._replace(ahead=None))
        return feed._replace(ahead=self.loader.read_ahead(feed.tile, feed.step))


def stage_after(stage: jax.Array, num_stages: int) -> jax.Array:
    """Returns the stage of the step after that of `stage`, without a division."""
    return jnp.where(stage + 1 < num_stages, stage + 1, 0)


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
          multiply: `multiply(accumulator, stage, step)` waits for a stage's operands, and starts
            their matmuls, which may still run when those of the next stage begin.
        """
        used, count = steps.used, steps.count

        def release_before(step: jax.Array, stage: jax.Array) -> None:
            # Releases the stage before that of `step`. If `count` is 0, none was multiplied.
            before = jnp.where(stage > 0, stage, self.num_stages) - 1
            is_multiplied = (step > 0) & (step <= count)
            pl.when(is_multiplied)(lambda: plgpu.barrier_arrive(self.empty.at[before]))

        def all_steps_into(accumulator: Any) -> tuple[jax.Array, Feed | None]:
            def take_step(step: jax.Array, carry: Any) -> Any:
                stage, feed = carry

                # Without `least`, no step checks that it is below `count`. The check would cost up
                # to 7 % of the time of the kernel for the gradients of matrices.
                if steps.least > 0:
                    pl.when(step < count)(lambda: multiply(accumulator, stage, step))
                else:
                    multiply(accumulator, stage, step)
                if steps.meanwhile is not None:
                    steps.meanwhile(step)
                # After this wait, only this step's matmuls may still run, and read its own stage.
                plgpu.wgmma_wait(matmuls)
                release_before(step, stage)
                feed = steps.feeder.follow(Slot(used + step), feed)
                return stage_after(stage, self.num_stages), feed

            all_steps = jnp.maximum(count, steps.least)
            carry = self.stage_of(used), steps.feed
            stage, feed = lax.fori_loop(0, all_steps, take_step, carry)
            # Reading the accumulator waits for all matmuls.
            total = accumulator[...]
            release_before(all_steps, stage)
            return total, feed

        return pl.run_scoped(all_steps_into, plgpu.ACC(shape))
