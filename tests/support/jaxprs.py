"""Counts what a traced function runs, read from its jaxpr."""

from __future__ import annotations

from typing import Any

import jax


def executions(jaxpr: Any, name: str) -> int:
    """Counts how often a primitive runs; inside a scan it counts once for each step."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        )
        for each in inner:
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                total += times * executions(each, name)
    return total
