"""The operations that `bench matmul` times, with their sizes and operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.matmul.backend import Backend

OPERATIONS = ("product", "gated", "dlhs", "drhs", "sum_of_dlhs")
OF_TWO_PAIRS = ("gated", "sum_of_dlhs")  # the dense matmul they are compared with is of one


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of a grouped matmul: [num_rows, hidden] by num_groups matrices [hidden, mlp].

    `live` of the rows are in a group.
    """

    name: str
    num_rows: int
    hidden: int
    mlp: int
    num_groups: int
    live: int
    slow: bool = False  # time "xla" and "loop" too

    def flops(self, operation: str, rows: int) -> float:
        pairs = 2 if operation in OF_TWO_PAIRS else 1
        return 2.0 * pairs * rows * self.hidden * self.mlp


CASES = (
    Case("deepseek-v3 up", 32768, 7168, 2048, 32, 32768, slow=True),
    Case("deepseek-v3 down", 32768, 2048, 7168, 32, 32768),
    Case("dropless, 1/8 live", 262144, 7168, 2048, 32, 32768),
    Case("qwen3-moe up", 32768, 2048, 768, 16, 32768),
    Case("decode", 1024, 7168, 2048, 32, 1024),
    Case("mixtral up, 8 experts", 16384, 4096, 14336, 8, 16384),
    Case("mixtral up, 1 expert", 16384, 4096, 14336, 1, 16384),
    Case("qwen3-moe down", 32768, 768, 2048, 16, 32768),
    Case("qwen3-moe up, 2 ranks", 36864, 2048, 768, 64, 32768),
    Case("qwen3-moe down, 2 ranks", 36864, 768, 2048, 64, 32768),
    Case("qwen3-moe up, decode", 1152, 2048, 768, 64, 1024),
    Case("qwen3-moe down, decode", 1152, 768, 2048, 64, 1024),
)
SMALL_CASES = (  # for CPUs
    Case("small", 256, 64, 128, 4, 200, slow=True),
    Case("small, wide", 64, 128, 64, 2, 64, slow=True),
)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The operands of all operations; rhs_1 and grad_1 are those of a second product."""

    lhs: jax.Array  # [R, H]
    rhs: jax.Array  # [L, H, F]
    grad: jax.Array  # [R, F]
    rhs_1: jax.Array
    grad_1: jax.Array
    group_sizes: jax.Array  # [L]


jax.tree_util.register_dataclass(
    Operands, [field.name for field in dataclasses.fields(Operands)], []
)
Function = Callable[[Operands], jax.Array]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def operation(backend: Backend, op: str) -> Function:
    """Returns the function by which a backend computes one of OPERATIONS.

    "gated" computes the gated product, and returns it without the two products it is made of.
    """
    functions: dict[str, Function] = {
        "product": lambda o: backend.product(o.lhs, o.rhs, o.group_sizes, transpose_rhs=False),
        "gated": lambda o: backend.gated_product(
            o.lhs, (o.rhs, o.rhs_1), o.group_sizes, swiglu, False
        )[0],
        "dlhs": lambda o: backend.product(o.grad, o.rhs, o.group_sizes, transpose_rhs=True),
        "drhs": lambda o: backend.drhs(o.lhs, o.grad, o.group_sizes),
        "sum_of_dlhs": lambda o: backend.sum_of_products(
            [(o.grad, o.rhs), (o.grad_1, o.rhs_1)], o.group_sizes, transpose_rhs=True
        ),
    }
    return functions[op]


def dense_operation(operation: str) -> Function:
    """Returns a dense matmul of the size of an operation, to compare the operation with.

    It multiplies every row of lhs or grad by the first group's matrix. For "gated" and
    "sum_of_dlhs" it is one of the two products.
    """
    return {
        "product": lambda o: jnp.dot(o.lhs, o.rhs[0]),
        "gated": lambda o: jnp.dot(o.lhs, o.rhs[0]),
        "dlhs": lambda o: jnp.dot(o.grad, o.rhs[0].T),
        "drhs": lambda o: jnp.dot(o.lhs.T, o.grad),
        "sum_of_dlhs": lambda o: jnp.dot(o.grad, o.rhs[0].T),
    }[operation]


def random_operands(case: Case, dtype: Any, seed: int) -> Operands:
    """Draws the operands of a case from a normal distribution, with groups of random sizes.

    Every array has a leading axis of one rank. Each live row has the same chance for each group.
    """
    sizes = np.random.default_rng(seed).multinomial(
        case.live, np.full(case.num_groups, 1 / case.num_groups)
    )
    shape_of_rhs = (case.num_groups, case.hidden, case.mlp)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))

    def array(stream: int, *shape: int) -> jax.Array:
        return normal(jax.random.key(8 * seed + stream), (1, *shape), dtype)

    return Operands(
        lhs=array(0, case.num_rows, case.hidden),
        rhs=array(1, *shape_of_rhs),
        grad=array(2, case.num_rows, case.mlp),
        rhs_1=array(3, *shape_of_rhs),
        grad_1=array(4, case.num_rows, case.mlp),
        group_sizes=jnp.asarray(sizes[None], jnp.int32),
    )
