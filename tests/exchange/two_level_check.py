"""Checks the exchange between processes, as one of them; see `--help`.

Each process passes for a host, with as many CPU devices as XLA_FLAGS says. It checks dispatch,
combine and their gradients against `jax_ep.reference`, with ranks along two mesh axes and along
one. It also counts the bytes that the compiled program sends between hosts.
tests/exchange/test_two_level.py starts the processes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import contract, dense_moe
from support.hlo import received_from_other_hosts

import jax_ep
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.layer import moe_layer

# Number of hosts -> the most bytes that a rank may receive, in units of its T * H values.
MOST_BYTES = {2: 1.15, 4: 3.2}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--num_processes", type=int)
    parser.add_argument("--process_id", type=int)
    parser.add_argument("--small", action="store_true", help="one mesh, one routing, no bytes")
    args = parser.parse_args()
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    num_hosts, devices = args.num_processes, np.array(jax.devices())
    meshes = (
        Mesh(devices.reshape(num_hosts, -1), ("host", "expert")),
        Mesh(devices, ("expert",)),
    )
    if args.small:
        check_contract(meshes[0], ["skewed"])
    else:
        for mesh in meshes:
            check_contract(mesh, contract.ROUTINGS)
            check_bytes(mesh, num_hosts)
        check_layer(meshes[0])
    print("checked")


def check_contract(mesh: Mesh, routings: Sequence[str]) -> None:
    case = contract.Case(mesh.size, 6, 24, 3, 2 * mesh.size, "bfloat16", 20)
    contract.check_ranks_here(case, mesh, routings)


def check_layer(mesh: Mesh) -> None:
    """Checks that a scan over `moe_layer` on the mesh has the loss and gradients as without a mesh.

    The layer runs under jax.checkpoint.
    """
    params, x = dense_moe.make_params(), dense_moe.make_x()

    def loss(params: Any, x: Any, config: MoEConfig) -> Any:
        def step(x: Any, _: Any) -> Any:
            return jax.checkpoint(moe_layer, static_argnums=2)(params, x, config)[0], None

        return jnp.mean(lax.scan(step, x, None, length=2)[0] ** 2)

    def run(mesh: Mesh | None, *arrays: Any) -> Any:
        config = MoEConfig(
            num_experts=dense_moe.E,
            num_experts_per_token=dense_moe.K,
            mesh=mesh,
            expert_axis=("host", "expert"),
        )
        return jax.jit(jax.value_and_grad(functools.partial(loss, config=config), (0, 1)))(*arrays)

    everywhere = functools.partial(contract.shared, sharding=NamedSharding(mesh, P()))
    actual = run(mesh, *jax.tree.map(lambda a: everywhere(np.asarray(a)), (params, x)))
    expected = jax.device_get(run(None, params, x))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        one, other = contract.of_ranks_here(one, np.asarray(other)) if one.ndim else (one, other)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def check_bytes(mesh: Mesh, num_hosts: int) -> None:
    """Checks that a rank receives at most about (M - 1) * T * H values from M - 1 other hosts."""
    num_tokens, hidden, top_k, num_experts = 64, 1024, 8, 64
    capacity = 2 * num_tokens * top_k

    def dispatch(x, topk_idx):
        sent = jax_ep.dispatch(
            x, topk_idx, num_experts=num_experts, axis_name=mesh.axis_names, capacity=capacity
        )
        return sent.tokens, sent.handle

    def shape(*rest: int, dtype: str) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        return jax.ShapeDtypeStruct((mesh.size, *rest), dtype, sharding=sharding)

    send = jax.jit(contract.per_rank(dispatch, mesh.size, mesh=mesh))
    back = jax.jit(contract.per_rank(jax_ep.combine, mesh.size, mesh=mesh))
    x = shape(num_tokens, hidden, dtype="bfloat16")
    operands = x, shape(num_tokens, top_k, dtype="int32")
    tokens, handle = jax.eval_shape(send, *operands)
    programs = {
        "dispatch": send.lower(*operands),
        "combine": back.lower(tokens, handle, shape(num_tokens, top_k, dtype="float32")),
    }
    hosts = [device.process_index for device in mesh.devices.flat]
    for name, program in programs.items():
        received = received_from_other_hosts(program.compile().as_text(), hosts)
        units = received / (num_tokens * hidden * 2)
        assert num_hosts - 1 <= units <= MOST_BYTES[num_hosts], (name, mesh.axis_names, units)


if __name__ == "__main__":
    main()
