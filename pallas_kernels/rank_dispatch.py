"""Dispatch into the rank layout: each row at the place of its (source rank, token).

The place of a token at a peer is rank · T + token, known without counting anything, and it gets one
row there however many of its experts live there. So nothing is exchanged before the rows leave, and
nothing is copied after they have arrived. Two warpgroups to a block:

  sender    as in `dispatch`; its lists hold local expert ids (or none) and, if asked for, weights;
  receiver  reads the lists as they arrive, and writes zeros where a token has no expert here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import fabric as fb
from pallas_kernels.dispatch import _PUT, Payload, _Dispatch, payload
from pallas_kernels.plan import Plan, Tiling


def rank_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    fabric: fb.Fabric,
    plan: Plan,
    wire_dtype: Any = None,
) -> tuple[Payload, jax.Array, jax.Array | None]:
    """Moves the rows. With a stacked fabric every array has a leading rank axis.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      topk_idx: [T, K] int32.
      topk_weights: [T, K] float32, or None.
      num_experts: E.
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the ring.
      wire_dtype: as in `dispatch`.

    Returns:
      tokens [N · T, H], or with a wire_dtype rows and scales as in `dispatch`;
      local_topk_idx [N, T, K] int32 (-1 where the choice is not of this rank),
      and topk_weights [N, T, K] (0 there), or None.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    choices = topk_idx
    if topk_weights is not None:
        bits = lax.bitcast_convert_type(topk_weights, jnp.int32)
        choices = jnp.concatenate([topk_idx, bits], axis=-1)
    width = choices.shape[-1]
    kernel = _RankDispatch.of(
        x, (num_ranks, num_tokens, width), num_experts, num_ranks * num_tokens, 1, fabric, plan,
        count_dtype=jnp.int32, routes_known=False, stage="all", wire_dtype=wire_dtype,
    )  # fmt: skip
    kernel = dataclasses.replace(kernel, num_choices=top_k)
    flat = choices.reshape(*lead, num_tokens * width)
    *parts, lists = kernel.call(x, kernel.window.pad(flat, fb.NOWHERE))
    tokens = payload(parts)
    lists = lists[..., : num_tokens * width].reshape(*lead, num_ranks, num_tokens, width)
    if topk_weights is None:
        return tokens, lists, None
    weights = lax.bitcast_convert_type(lists[..., top_k:], jnp.float32)
    return tokens, lists[..., :top_k], weights


@dataclasses.dataclass(frozen=True)
class _RankDispatch(_Dispatch):
    """The kernel. Its `top_k` is the words of a list, the first `num_choices` of them experts."""

    num_choices: int = 0

    def call(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return fb.kernel(
            self.fabric,
            self,
            name="ep_rank_dispatch",
            num_blocks=self.plan.num_blocks,
            num_warpgroups=2,
            out_type=[
                *(jax.ShapeDtypeStruct((self.capacity, width), t) for width, t in self.parts),
                jax.ShapeDtypeStruct((self.num_ranks, self.window.total), jnp.int32),
            ],
            scratch_types=self._scratch_types(),
            num_channels=1,
        )(*operands)

    def _scratch_types(self) -> dict[str, Any]:
        slots, ranks = self.plan.num_slots, self.num_ranks
        return dict(
            choices=plgpu.SMEM((1, self.window.width), jnp.int32),
            **self._row_types(),
            lists=plgpu.SMEM((slots, ranks, self.top_k), jnp.int32),
            step_rows=plgpu.SMEM((ranks, self.step_window.width), jnp.int32),
            zeros=[plgpu.SMEM((Tiling.of(width, t).padded,), t) for width, t in self.parts],
            full=plgpu.Barrier(num_barriers=(slots,)),
        )

    def __call__(self, *refs: Any, semaphores: Any, **scratch: Any) -> None:
        x, choices, *tokens, lists = refs
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def _sender():
            self.fabric.stage(0)
            self._fetch_first(x, **scratch)
            self.fabric.touch(*tokens, lists)
            self._open_window(choices, 0, **scratch)
            self._make_ready(x, 0, **scratch)
            self._send(x, choices, tokens, lists, semaphores, **scratch)

        @pl.when(warpgroup == 1)
        def _receiver():
            self._receive_lists(lists, tokens, semaphores, **scratch)

    def _rows_at_peers(self, entry, peers, *, choices, **_):
        """[N][words]: this token's list for each rank, in the order of `peers`."""
        words = [choices[0, entry + i] for i in range(self.top_k)]
        experts, weights = words[: self.num_choices], words[self.num_choices :]
        per_rank = jnp.int32(self.num_local_experts)
        lists = []
        for peer in peers:
            local = [expert - peer * per_rank for expert in experts]
            here = [
                (expert >= 0) & (expert < self.num_experts) & (i >= 0) & (i < per_rank)
                for expert, i in zip(experts, local, strict=True)
            ]
            ids = [jnp.where(h, i, fb.NOWHERE) for h, i in zip(here, local, strict=True)]
            ids += [jnp.where(h, w, 0) for h, w in zip(here, weights, strict=False)]
            lists.append(ids)
        return lists

    def _place(self, words, i):
        first_token, _ = self._range()
        token = self.fabric.rank() * self.num_tokens + first_token + i
        return jnp.where(self._any_expert(words), token, fb.NOWHERE)

    def _any_expert(self, words):
        return fb.any_of(words[: self.num_choices])

    def _receive_lists(self, lists_ref, tokens, semaphores, *, step_rows, zeros, **_):
        fabric, window, width = self.fabric, self.step_window, self.top_k
        first_token, num_tokens = self._range()
        for part in zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()

        def receive_step(step, carry):
            fabric.wait(semaphores, _PUT, step + 1, "dispatch")
            fabric.stage(2)
            step_token = first_token + step * self.step_tokens
            start = window.start(step_token * width)
            values = [
                fabric.mine(lists_ref).at[source, pl.ds(start, window.width)][...]
                for source in range(self.num_ranks)
            ]
            fabric.barrier()  # the step before this one has been read
            for source, value in enumerate(values):
                step_rows[source] = value
            fabric.barrier()

            def fill_pair(pair, carry):
                source, i = lax.rem(pair, self.num_ranks), lax.div(pair, self.num_ranks)
                entry = (step_token + i) * width - start
                words = [step_rows[source, entry + word] for word in range(self.num_choices)]
                row = source * self.num_tokens + step_token + i
                for part, ref, (columns, _) in zip(zeros, tokens, self.parts, strict=True):
                    fb.put_if(
                        fabric,
                        ~self._any_expert(words),
                        part.at[pl.ds(0, columns)],
                        fabric.mine(ref).at[row],
                    )
                return carry

            pairs = jnp.minimum(num_tokens - step * self.step_tokens, self.step_tokens)
            lax.fori_loop(0, pairs * self.num_ranks, fill_pair, None)
            plgpu.commit_smem_to_gmem_group()
            return carry

        num_steps = self._num_steps()
        lax.fori_loop(0, num_steps, receive_step, None)

        @pl.when(num_steps == 0)
        def _():  # nothing comes, but peers may not leave before their last signal is heard
            fabric.wait(semaphores, _PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)
