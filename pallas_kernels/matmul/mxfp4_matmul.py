"""Matrices in MXFP4, which the kernels of `grouped_matmul` and `gated_matmul` decode.

They are copied to shared memory as they are stored, in stages of one or more *pieces* of 64 of K.
The compute warpgroups decode columns in registers (`decoder`). Where groups have few rows, another
kernel is faster (`weight_only`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import Scaled, bitcast
from pallas_kernels.matmul.decoder import NUMBER_BYTES, Decoder, Staged, transforms_of_numbers
from pallas_kernels.matmul.grouped_matmul import Loader, Matrices, Product, RowTiles, Starts
from pallas_kernels.matmul.kernel import CHUNK, STEP, choose, transposed
from pallas_kernels.matmul.operand_ring import Feed, Slot, Steps


class Mxfp4Matrices(Matrices):
    """Matrices in MXFP4."""

    suffix: ClassVar[str] = "_mxfp4"
    # Decoding tiles of more rows leaves no registers for a finished tile's results.
    most_held_rows: ClassVar[float] = 128
    # All tiles that `jax_ep.matmul` chooses leave room for a loader.
    most_accumulators: ClassVar[float] = math.inf
    loads_in_one_warp: ClassVar[bool] = False  # each thread loads scales

    @classmethod
    def operands_of(cls, matrices: Scaled) -> list[jax.Array]:
        return [matrices.values, bitcast(matrices.scales, jnp.uint8)]

    @classmethod
    def types(cls, kernel: Product) -> dict[str, Any]:
        tiles, stages = kernel.tiles, kernel.tiles.num_stages
        several = (kernel.num_matrices,) if kernel.num_matrices > 1 else ()
        pieces = tiles.step // STEP
        # Of the values, two numbers a byte.
        shape = stages, *several, tiles.block_n, pieces * NUMBER_BYTES
        ring = super().types(kernel)["ring"]
        transforms = transforms_of_numbers(pieces)
        ring = dataclasses.replace(
            ring,
            right=plgpu.SMEM(shape, jnp.uint8, transforms=transforms),
            # The copies of rows and of values arrive, and the loader when it has stored the scales.
            full=plgpu.Barrier(num_arrivals=2 + kernel.num_matrices, num_barriers=stages),
        )
        staged = Staged.types(stages, pieces, kernel.num_matrices * tiles.block_n)
        return dict(ring=ring, staged=staged)

    @property
    def decoder(self) -> Decoder:
        _, *arrays = self.operands
        matrices = [Scaled(*arrays[i : i + 2]) for i in range(0, len(arrays), 2)]
        return Decoder(matrices, self.ring.right, self.staged, self.kernel.tiles.block_n)

    def loader(self, row_tiles: RowTiles) -> Loader:
        decoder = self.decoder
        operands = [self.operands[0], *(values for values, _ in decoder.matrices)]
        return _Loader(self.kernel, self.ring, row_tiles, operands, decoder)

    def begin(self, computer: jax.Array) -> None:
        self.decoder.fill_table(computer)

    def sum_products(
        self, starts: Starts, height_index: jax.Array, shape: tuple[int, int], steps: Steps
    ) -> tuple[jax.Array, Feed | None]:
        decoder, left, tiles = self.decoder, self.ring.left, self.kernel.tiles
        parts = [
            _Part(top, i * tiles.block_m, piece, matrix, first_column + top)
            for piece in range(tiles.step // STEP)
            for i, (matrix, first_column) in enumerate(starts)
            for top in range(0, tiles.part, CHUNK)
        ]

        def load(stage: jax.Array, part: _Part) -> jax.Array:
            return decoder.load(stage, part.piece, part.matrix, part.first_column)

        def multiply(accumulator: Any, stage: jax.Array, _: jax.Array) -> None:
            plgpu.barrier_wait(self.ring.full.at[stage])

            def of_height(height: int) -> None:
                """Decodes part by part, while the tensor cores multiply the part before."""
                loaded = load(stage, parts[0])
                for i, part in enumerate(parts):
                    # The tensor cores may read registers until their matmul is complete. Before a
                    # part is decoded to registers, all matmuls but the last one must be complete;
                    # with one part in a step also the last one, which reads the same registers.
                    plgpu.wgmma_wait(min(len(parts) - 1, 1))
                    columns = decoder.decode(loaded)
                    products = accumulator.at[
                        part.top : part.top + CHUNK, part.side : part.side + height
                    ]
                    inner = slice(part.piece * STEP, (part.piece + 1) * STEP)
                    plgpu.wgmma(products, columns, transposed(left.at[stage, :height, inner]))
                    if i + 1 < len(parts):
                        loaded = load(stage, parts[i + 1])

            choose(height_index, [functools.partial(of_height, each) for each in tiles.heights])

        # When `multiply` returns, the matmuls of its last two parts may still run.
        matmuls = min(len(parts), 2)
        return self.ring.accumulate(steps, matmuls, shape, multiply)


class _Part(NamedTuple):
    """A part of 64 columns by 64 of K of a matrix, and the place of its product."""

    # The first row and column of the product in the accumulator.
    top: int
    side: int
    piece: int  # of K
    matrix: Any
    first_column: Any


@dataclasses.dataclass(frozen=True)
class _Loader(Loader):
    """Copies values of matrices by bulk copies, and a few scales of each column by threads."""

    decoder: Decoder

    def stored_range(self, step: jax.Array, inner: Any) -> Any:
        num_bytes = self.kernel.tiles.step // STEP * NUMBER_BYTES
        return pl.ds(step * num_bytes, num_bytes)

    def read_ahead(self, tile: Any, step: jax.Array) -> jax.Array:
        """Starts to load a step's scales; past the last step, those of the last."""
        step = jnp.minimum(step, self.kernel.steps - 1)
        return self.decoder.load_scales(tile.group, tile.left_edge, step)

    def load(self, tile: Any, step: jax.Array, slot: Slot, ahead: Any) -> None:
        super().load(tile, step, slot, ahead)
        stage = self.ring.stage_of(slot.number)
        self.decoder.stage_scales(stage, ahead)
        plgpu.barrier_arrive(self.ring.full.at[stage])
