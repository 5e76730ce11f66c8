"""Tests of how grouped matmuls in blocks of rows choose blocks, and how much memory they take."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from support.matmuls import assert_close, expected, operands

from jax_ep.matmul import blocks


@pytest.mark.parametrize("num_rows", [32768, 1024])
def test_memory_of_temporaries_is_bounded(num_rows):
    """No intermediate array may need more than 512 MiB, where gathered matrices would need GiB."""
    depth, width, num_groups = 7168, 2048, 32
    shapes = (num_rows, depth), (num_groups, depth, width), (num_rows, width)
    lhs, rhs, grad = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jax.ShapeDtypeStruct((num_groups,), jnp.int32)
    names = {"bf16": "bfloat16", "f32": "float32", "i32": "int32"}
    for function, args in (
        (functools.partial(blocks.product_in_blocks, transpose_rhs=False), (lhs, rhs, sizes)),
        (functools.partial(blocks.product_in_blocks, transpose_rhs=True), (grad, rhs, sizes)),
        (blocks.drhs, (lhs, grad, sizes)),
    ):
        text = str(jax.make_jaxpr(function)(*args))
        arrays = {
            (*map(int, shape.split(",")), jnp.dtype(names[kind]).itemsize)
            for kind, shape in re.findall(r"(bf16|f32|i32)\[([\d,]+)\]", text)
        }
        steps = [(*dims, size) for *dims, size in arrays if tuple(dims) not in shapes]
        assert any(len(step) == 4 for step in steps)
        assert max(map(math.prod, steps)) <= 512 << 20


@pytest.mark.parametrize("most_bytes", [1, 1 << 18])
def test_little_memory_takes_more_steps(most_bytes, monkeypatch):
    monkeypatch.setattr(blocks, "_MOST_BYTES", most_bytes)
    args = operands(300, [1, 240, 0, 3, 7, 2], "float32")

    @jax.jit
    def compute(lhs, rhs, group_sizes, grad):
        return (
            blocks.product_in_blocks(lhs, rhs, group_sizes, transpose_rhs=False),
            blocks.product_in_blocks(grad, rhs, group_sizes, transpose_rhs=True),
            blocks.drhs(lhs, grad, group_sizes),
        )

    for got, want in zip(compute(*args), expected(*args), strict=True):
        assert_close(got, want, "float32")
