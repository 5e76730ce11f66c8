"""Replaces, in the simulator, what kernels of several ranks emit for each thread of a warpgroup.

Pallas' interpreter runs a warpgroup as one thread, and no emitted code. So each function here
computes by JAX operations what the function of its name emits for all threads. Padding that only
the registers of threads have is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange import quantized_rows
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import WARPGROUP, align_up


@contextlib.contextmanager
def warpgroups_of_one_thread() -> Iterator[None]:
    """Replaces the functions while the context is open."""
    replacements: dict[Any, dict[str, Any]] = {
        vectors: dict(
            load=_load,
            store=_store,
            load_each=_load_each,
            times=lambda value, factor, elements: value * factor,
            constant=lambda size, value, elements: jnp.full((size,), value, jnp.float32),
            _select=_select,
            partial_sums=_partial_sums,
        ),
        fb: dict(
            load=_load,
            put_if=_put_if,
            iota=lambda size, vector=1: jnp.arange(size, dtype=jnp.int32),
            count=_count,
        ),
        quantized_rows: dict(
            quantize_row=_quantize_row,
            put_row=_put_row,
            add_rows=_add_rows,
            store_each=_store_each,
            copy_listed=_copy_listed,
        ),
    }
    with replaced(replacements):
        yield


@contextlib.contextmanager
def replaced(replacements: dict[Any, dict[str, Any]]) -> Iterator[None]:
    """Replaces attributes of modules and classes, by their names, while the context is open."""
    with contextlib.ExitStack() as stack:
        for owner, attributes in replacements.items():
            stack.enter_context(mock.patch.multiple(owner, **attributes))
        yield


def _load(ref: Any, vector: int) -> jax.Array:
    return ref[...]


def _store(refs: Sequence[Any], value: jax.Array, elements: int) -> None:
    for ref in refs:
        ref[...] = value[: ref.shape[0]]


def _load_each(
    refs: Sequence[Any],
    wanted: Sequence[jax.Array],
    elements: int,
    *,
    fill: float = 0.0,
    read_only: bool = False,
) -> list[jax.Array]:
    size, dtype = refs[0].shape[0], refs[0].dtype
    padding = (0, align_up(size, WARPGROUP * elements) - size)
    return [
        jnp.pad(
            lax.cond(w, lambda ref=ref: ref[...], lambda: jnp.full((size,), fill, dtype)),
            padding,
            constant_values=fill,
        )
        for ref, w in zip(refs, wanted, strict=True)
    ]


def _select(
    predicate: jax.Array, yes: Sequence[jax.Array], no: Sequence[jax.Array], elements: int
) -> list[jax.Array]:
    return [jnp.where(predicate, a, b) for a, b in zip(yes, no, strict=True)]


def _partial_sums(value: jax.Array, ref: Any, elements: int) -> None:
    ref[...] = jnp.sum(value.reshape(vectors.SUMS_OF_WARPGROUP, -1), axis=1)


def _put_if(predicate: jax.Array, source: Any, destination: Any) -> None:
    @pl.when(predicate)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)


def _count(bins: Any, values: jax.Array, num_bins: int) -> None:
    found = jnp.sum(values[:, None] == jnp.arange(bins.shape[0]), axis=0, dtype=jnp.int32)
    bins[...] += jnp.where(jnp.arange(bins.shape[0]) < num_bins, found, 0)


def _quantize_row(wire: Any, source: Any, values: Any, scales: Any) -> None:
    values[...], scales[...] = wire.encode(source[...])


def _put_row(wire: Any, row: jax.Array, parts: Sequence[Any], elements: int) -> None:
    values, scales = parts
    values[...], scales[...] = wire.encode(row[: values.shape[0]])


def _add_rows(
    wire: Any, parts: Sequence[Sequence[Any]], sent: Sequence[jax.Array], dtype: Any
) -> jax.Array:
    values, scales = parts
    total = jnp.zeros(values[0].shape, jnp.float32)
    for row, of_blocks, was_sent in zip(values, scales, sent, strict=True):
        row = wire.decode((row[...], of_blocks[...]), jnp.float32)
        total = total + jnp.where(was_sent, row, 0)
    return total.astype(dtype)


def _store_each(source: Any, ref: Any, rows: Sequence[jax.Array]) -> None:
    for row in rows:

        @pl.when(row >= 0)
        def store(row=row) -> None:
            ref[row] = source[...]


def _copy_listed(ref: Any, lists: Any, count: jax.Array) -> None:
    def copy(i: jax.Array, _: None) -> None:
        first = jnp.int32(fb.NOWHERE)
        for choice in range(lists.shape[1]):
            row = lists[i, choice]

            @pl.when((first >= 0) & (row >= 0))
            def copy_row(first=first, row=row) -> None:
                ref[row] = ref[first]

            first = jnp.where(first >= 0, first, row)

    lax.fori_loop(0, count, copy, None)
