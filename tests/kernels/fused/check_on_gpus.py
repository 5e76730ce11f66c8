"""Compares `dispatch_up` on GPUs with a dispatch and a gated product, in bits and in time.

    python tests/kernels/fused/check_on_gpus.py --plans 64:2,64:3,48:2,32:2

A plan is the number of blocks that exchange rows, and the head start of those that multiply.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.bench import measuring
from jax_ep.bench.timing import Loop
from jax_ep.matmul.pallas import gated_tiles
from jax_ep.runtime.fabric import of_axis
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fused.dispatch_up import dispatch_up
from pallas_kernels.matmul.gated_matmul import gated_product

MODELS = {"qwen3-moe": (2048, 768, 128, 8), "deepseek-v3": (7168, 2048, 256, 8)}
SWIGLU = Elementwise(lambda gate, up: jax.nn.silu(gate) * up, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-moe")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--plans", default="64:2,64:3,48:2,32:2,32:3")
    parser.add_argument("--keep", action="store_true", help="the products, too, as in training")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--skew", action="store_true", help="half of the choices are one rank's")
    arguments = parser.parse_args()
    hidden, ffn, num_experts, top_k = MODELS[arguments.model]
    mesh = Mesh(np.asarray(jax.devices()), ("expert",))
    num_ranks, num_tokens, cores = mesh.size, arguments.tokens, jax.devices()[0].core_count
    per_rank = num_experts // num_ranks
    num_rows = num_ranks * num_tokens * min(top_k, per_rank)
    tiles = gated_tiles(num_rows, per_rank, ffn)
    row = plans.Row(hidden, jnp.bfloat16)
    sizes: Any = dict(
        num_tokens=num_tokens, num_ranks=num_ranks, top_k=top_k, num_experts=num_experts
    )
    layout: Any = dict(num_experts=num_experts, capacity=num_rows, expert_alignment=1)

    def prepare(seed: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(seed[0]), 4)
        x = jax.random.normal(keys[0], (num_tokens, hidden), jnp.bfloat16)
        scores = jax.random.uniform(keys[1], (num_tokens, num_experts))
        if arguments.skew:
            scores += 0.3 * (jnp.arange(num_experts) < per_rank)
        _, topk_idx = jax.lax.top_k(scores, top_k)
        shape = per_rank, hidden, ffn
        rhs = tuple(jax.random.normal(key, shape, jnp.bfloat16) * 0.02 for key in keys[2:])
        return x, topk_idx.astype(jnp.int32), rhs

    def both(state: Any) -> Any:
        x, topk_idx, rhs = state
        plan = plans.dispatch(row, **sizes)
        fabric = of_axis(("expert",), x)
        (tokens,), rows, counts, group_sizes, *rest = dispatch_kernel.dispatch(
            x, topk_idx, fabric=fabric, plan=plan, **layout
        )
        hidden, *products = gated_product(
            tokens, rhs, group_sizes, SWIGLU, keep=arguments.keep, tiles=tiles, num_blocks=cores
        )
        return tokens, rows, counts, group_sizes, *rest, hidden, *products

    def fused(num_blocks: int, head_start: int) -> Any:
        plan = plans.dispatch(row, num_blocks=num_blocks, **sizes)

        def step(state: Any) -> Any:
            x, topk_idx, rhs = state
            fabric = of_axis(("expert",), x, quiet=True)
            (tokens,), *described, products, _ = dispatch_up(
                x, topk_idx, rhs, SWIGLU, keep=arguments.keep, fabric=fabric, plan=plan,
                tiles=tiles, num_cores=cores, head_start=head_start, **layout,
            )  # fmt: skip
            return tokens, *described, *products

        return step

    seeds = [jnp.arange(num_ranks, dtype=jnp.int32)]
    unfused = Loop(prepare, both, seeds, mesh, arguments.iterations)
    expected = jax.tree.map(np.asarray, unfused.outputs())
    print(f"{'plan':<10}{'device':>9}{'wall':>9}  bits")
    report("two", unfused, "")
    for text in arguments.plans.split(","):
        loop = Loop(
            None, fused(*map(int, text.split(":"))), unfused.state, mesh, arguments.iterations
        )
        wrong = differing(loop.outputs(), expected)
        report(text, loop, "differ: " + ", ".join(wrong) if wrong else "the same")


def differing(outputs: Any, expected: Any) -> list[str]:
    pairs = zip(map(np.asarray, outputs), expected, strict=True)
    return [str(i) for i, (a, b) in enumerate(pairs) if a.tobytes() != b.tobytes()]


def report(name: str, loop: Loop, bits: str) -> None:
    found = measuring.times(loop, 3, "auto", spaced=False)
    device = (found["device"] or {}).get("slowest_us", float("nan"))
    print(f"{name:<10}{device:>9.1f}{found['wall']['median_us']:>9.1f}  {bits}", flush=True)


if __name__ == "__main__":
    main()
