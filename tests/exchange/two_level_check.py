"""Checks the exchange between processes, as one of them; see `--help`.

Each process passes for a host, with as many CPU devices as XLA_FLAGS says. It checks dispatch,
combine and their gradients against `jax_ep.reference`, with ranks along two mesh axes and along
one, and the gradients of a layer.
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

from jax_ep.moe.config import MoEConfig
from jax_ep.moe.layer import moe_layer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("process", type=int)
    parser.add_argument("num_processes", type=int)
    parser.add_argument("--small", action="store_true", help="one mesh, one routing, no layer")
    args = parser.parse_args()
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process)
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
        check_layer(meshes[0])
    print("checked")


def check_contract(mesh: Mesh, routings: Sequence[str]) -> None:
    case = contract.Case(mesh.size, 6, 24, 3, 2 * mesh.size, "bfloat16", 20)
    contract.check_ranks_here(case, mesh, routings)


def check_layer(mesh: Mesh) -> None:
    """Checks that a scan over `moe_layer` on the mesh computes what it does without a mesh."""
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


if __name__ == "__main__":
    main()
