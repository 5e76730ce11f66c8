"""Kernel of the router's logits for a few tokens: x @ gate, in float32.

In decoding, this product takes the time to read the gate, and XLA needs two launches for it. Here a
thread block computes 4 columns of the logits for all tokens. Its 256 threads divide the H rows of
the gate among them: in each step, a thread reads 4 numbers of one row.

          gate [H, E]                          logits [T, E]
          4 columns
         +--+--+--+--+
  row 0  |  thread 0 |   the sums of all threads, added up
  row 1  |  thread 1 |   -------------------------------->   +--+--+--+--+
  ...    |           |                                       |           |  T rows
         +--+--+--+--+                                       +--+--+--+--+
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import compiler, mosaic
from pallas_kernels.fabric.hardware import WARP, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm

_THREADS = 256
_WARPS = _THREADS // WARP
# A thread reads this many numbers of a row of the gate at a time.
_COLUMNS = 4
# A thread loads at most this many numbers of tokens, and of the gate, before it multiplies, so that
# the loads overlap.
_AHEAD = 32
# The most tokens; their sums are in registers.
MOST_TOKENS = 16


def unavailable_reason(num_tokens: int, hidden: int, num_experts: int) -> str | None:
    """Returns why the kernel does not support tokens [T, H] and E experts, or None if it does."""
    if not 0 < num_tokens <= MOST_TOKENS:
        return f"it supports 1 to {MOST_TOKENS} tokens, not {num_tokens}"
    # The kernel's code grows with `hidden`, since its steps are unrolled: 2**14 gives 64 steps.
    if num_experts % _COLUMNS or not 0 < hidden <= 2**14:
        return f"it does not support a gate [{hidden}, {num_experts}]"
    return None


def logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Multiplies tokens by the router's gate; products and sums are float32.

    Args:
      x: [T, H] bfloat16, T from 1 to 16.
      gate: [H, E] float32 or bfloat16; 4 divides E.

    Returns:
      [T, E] float32.
    """
    (num_tokens, hidden), num_experts = x.shape, gate.shape[1]
    body = _Logits(num_tokens, hidden, num_experts, jnp.dtype(gate.dtype))

    def kernel(x_ref: Any, gate_ref: Any, out: Any, shared: Any) -> None:
        mosaic.inline(body.emit, [x_ref, gate_ref, out, shared, lax.axis_index("block")])

    return compiler.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((body.num_tokens, body.num_experts), jnp.float32),
        scratch_types=dict(shared=plgpu.SMEM((_WARPS * body.block_logits,), jnp.float32)),
        num_blocks=body.num_experts // _COLUMNS,
        num_warpgroups=_THREADS // WARPGROUP,
        auto_barriers=False,
        kernel_name="router_logits",
    )(x, gate)


@dataclasses.dataclass(frozen=True)
class _Logits:
    num_tokens: int
    hidden: int
    num_experts: int
    dtype: Any  # of the gate

    @property
    def block_logits(self) -> int:
        return self.num_tokens * _COLUMNS

    def emit(
        self, x_ref: Value, gate_ref: Value, out: Value, shared: Value, block: mosaic.Array
    ) -> None:
        """Emits the code of a thread; `shared` is [_WARPS * block_logits] float32."""
        thread = mosaic.thread()
        column = mosaic.mul(mosaic.scalar(block), _COLUMNS)
        sums = self.sums_of_thread(x_ref, gate_ref, thread, column)
        self.add_up(sums, shared, out, thread, column)

    def sums_of_thread(
        self, x_ref: Value, gate_ref: Value, thread: Value, column: Value
    ) -> list[list[Value]]:
        """Returns a thread's sums over its rows: [token][j] is its part of logit column + j."""
        sums = [[mosaic.f32(0.0)] * _COLUMNS for _ in range(self.num_tokens)]
        steps = -(-self.hidden // _THREADS)
        steps_at_once = _AHEAD // max(self.num_tokens, _COLUMNS)
        for start in range(0, steps, steps_at_once):
            of_steps = range(start, min(start + steps_at_once, steps))
            rows = [self.row(thread, step) for step in of_steps]
            loaded = [self.load(x_ref, gate_ref, row, exists, column) for row, exists in rows]
            for numbers, gate in loaded:
                for token, x in enumerate(numbers):
                    pairs = zip(gate, sums[token], strict=True)
                    sums[token] = [llvm.intr_fma(x, w, total) for w, total in pairs]
        return sums

    def add_up(
        self, sums: list[list[Value]], shared: Value, out: Value, thread: Value, column: Value
    ) -> None:
        """Stores to `out` the logits of the block: the sums of all its threads."""
        f32 = mosaic.float_type()
        # Each warp adds up its threads' sums, and its first lane writes them to `shared`, an array
        # [_WARPS, block_logits].
        warp, lane = mosaic.divided(thread, WARP)
        totals = [mosaic.warp_sum(each, WARP) for of_token in sums for each in of_token]
        base = mosaic.pointer(shared)
        with mosaic.when(mosaic.equal(lane, 0)):
            for i, total in enumerate(totals):
                at = mosaic.add(mosaic.mul(warp, self.block_logits), i)
                llvm.store(total, mosaic.element_pointer(base, at, f32))
        mosaic.block_barrier()
        # Thread i then adds up the warps' sums of the block's logit i.
        with mosaic.when(mosaic.below(thread, self.block_logits)):
            places = (mosaic.add(thread, i * self.block_logits) for i in range(_WARPS))
            parts = [llvm.load(f32, mosaic.element_pointer(base, at, f32)) for at in places]
            token, number = mosaic.divided(thread, _COLUMNS)
            at = mosaic.add(mosaic.mul(token, self.num_experts), mosaic.add(column, number))
            total = functools.reduce(arith.addf, parts)
            llvm.store(total, mosaic.pointer_at(out, at, f32))

    def row(self, thread: Value, step: int) -> tuple[Value, Value | None]:
        """Returns the row of the gate that a thread reads in a step, and whether it exists."""
        # None means that the rows of all threads exist. Past the last row, a thread reads row 0.
        row = mosaic.add(thread, step * _THREADS)
        if (step + 1) * _THREADS <= self.hidden:
            return row, None
        exists = mosaic.below(row, self.hidden)
        return arith.select(exists, row, mosaic.i32(0)), exists

    def load(
        self, x_ref: Value, gate_ref: Value, row: Value, exists: Value | None, column: Value
    ) -> tuple[list[Value], list[Value]]:
        """Loads x[:, row] and gate[row, column : column + 4] as float32; 0 if `exists` is false."""
        f32, zero = mosaic.float_type(), mosaic.f32(0.0)
        element = mosaic.element_type(self.dtype)
        at = mosaic.add(mosaic.mul(row, self.num_experts), column)
        pointer = mosaic.pointer_at(gate_ref, at, element)
        gate = mosaic.load_numbers(pointer, _COLUMNS, element)
        if self.dtype != jnp.float32:
            gate = [arith.extf(f32, each) for each in gate]
        numbers = []
        for token in range(self.num_tokens):
            at = mosaic.add(row, token * self.hidden)
            numbers.append(arith.extf(f32, mosaic.element_at(x_ref, at)))
        if exists is not None:
            gate = [arith.select(exists, each, zero) for each in gate]
            numbers = [arith.select(exists, each, zero) for each in numbers]
        return numbers, gate
