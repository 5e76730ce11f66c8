"""Tests that where kernels run is decided before tracing: what JAX lacks is a reason, no error."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.kernels import needs_kernels, on_ranks, program_for_cuda
from support.meshes import cuda_mesh, mesh

import jax_ep
from jax_ep.matmul import pallas
from jax_ep.matmul.backend import Problem
from jax_ep.runtime import availability, jax_compat

S = jax.ShapeDtypeStruct


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="GPUs are the default backend here")
def test_gpus_that_are_not_the_default_backend_are_refused(monkeypatch):
    """GPUs must be refused if they are not the default backend, as with JAX_PLATFORMS=cpu,cuda."""
    program = program_for_cuda()
    assert availability.Lowered(program).unavailable_reason(()) is None
    monkeypatch.setattr(jax_compat, "gpus", lambda: ["a GPU"])
    reason = availability.Lowered(program).unavailable_reason(())
    assert reason == "it needs GPUs as JAX's default backend, which is cpu (see JAX_PLATFORMS)"


@needs_kernels
@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        # Each device of a partitioned program would run kernels for all rows.
        (dict(is_of_one_device=False), "shard_map over all axes of the mesh"),
        (dict(platforms=("cpu", "cuda")), "NVIDIA GPUs alone, and this one is for cpu, cuda"),
        (dict(for_export=True), "addresses of this machine, so it cannot be exported"),
    ],
    ids=str,
)
def test_programs_without_kernels(facts, reason):
    assert reason in availability.Lowered(program_for_cuda(**facts)).unavailable_reason(("expert",))


@needs_kernels
def test_kernels_of_matmuls_are_for_hopper_alone(monkeypatch):
    """Matmuls' kernels must be refused on a B200; the kernels of the exchange compile for it."""
    b200: Any = types.SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA B200",
        compute_capability="10.0",
        shared_memory_per_block_optin=232448,
    )
    assert availability.unavailable_reason([b200]) is None
    assert availability.never_run([b200]) == ["10.0"]
    monkeypatch.setattr(jax, "devices", lambda: [b200])
    for dtype, has_scales in ((jnp.bfloat16, False), (jnp.float8_e4m3fn, True)):
        problem = Problem((128, 128), dtype, "cuda", has_scales=has_scales)
        reason = pallas.unavailable_reason(problem)
        assert reason == (
            "its kernels need an NVIDIA GPU of compute capability 9 (Hopper), and this one has 10.0"
        )
    b200.compute_capability = "9.0"
    assert pallas.unavailable_reason(problem) is None and availability.never_run([b200]) == []


def exchanged(implementation: str | None) -> Callable[..., jax.Array]:
    def of_rank(x, topk_idx):
        options: Any = dict(implementation=implementation)
        got = jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name="expert", **options)
        return jax_ep.combine(got.tokens, got.handle, **options)

    return of_rank


def reduced(algorithm: str | None) -> Callable[..., jax.Array]:
    return lambda x, topk_idx: jax_ep.all_reduce(x, "expert", algorithm=algorithm)


def trace(function: Callable[..., Any], platform: str) -> Any:
    """Traces a function of x [8, 128] and topk_idx [8, 2] on two ranks of the platform."""
    small = cuda_mesh((2,), ("expert",)) if platform == "cuda" else mesh((2,), ("expert",))
    return on_ranks(function, small).trace(S((8, 128), jnp.bfloat16), S((8, 2), jnp.int32))


def lower(function: Callable[..., Any], platform: str) -> str:
    """Traces `function` by `trace` and lowers it for `platform`; returns the program's text."""
    return trace(function, platform).lower(lowering_platforms=(platform,)).as_text()


def multiplied(implementation: str | None, platform: str) -> str:
    shapes = S((64, 128), jnp.bfloat16), S((2, 128, 64), jnp.bfloat16), S((2,), jnp.int32)
    product = lambda *operands: jax_ep.grouped_matmul(*operands, implementation=implementation)  # noqa: E731
    return jax.jit(product).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def routed(platform: str) -> str:
    logits = S((64, 32), jnp.float32)
    choose = lambda logits: jax_ep.top_k_routing(logits, 4).topk_idx  # noqa: E731
    return jax.jit(choose).trace(logits).lower(lowering_platforms=(platform,)).as_text()


def programs(platform: str) -> dict[str, str]:
    """Returns the lowered programs of operations whose implementation jax_ep chooses."""
    return {
        "exchange": lower(exchanged(None), platform),
        "collectives": lower(reduced(None), platform),
        "matmul": multiplied(None, platform),
        "top_k": routed(platform),
    }


@contextlib.contextmanager
def asked_anew() -> Iterator[None]:
    """Clears the caches of what JAX offers and of lowered programs, before and after the body."""
    from pallas_kernels.fabric import requirements

    def forget() -> None:
        requirements.unavailable_reason.cache_clear()
        availability.mosaic_unavailable_reason.cache_clear()
        jax.clear_caches()

    forget()
    try:
        yield
    finally:
        forget()


@needs_kernels
def test_where_jax_lacks_a_name_of_mosaic_xla_runs_and_pallas_refuses(monkeypatch):
    with asked_anew(), monkeypatch.context() as patch:
        patch.delattr("jaxlib.mlir.dialects.scf.yield_")
        for what, text in programs("cuda").items():
            assert "mosaic_gpu" not in text, what
        lacks = f"it needs Mosaic, and JAX {jax.__version__} lacks jaxlib.mlir.dialects.scf.yield_"
        for named in (
            lambda: lower(exchanged("pallas"), "cuda"),
            lambda: multiplied("pallas", "cuda"),
            lambda: trace(reduced("one_shot"), "cuda"),
        ):
            with pytest.raises(ValueError, match=f"cannot run here: {lacks}"):
                named()


@needs_kernels
def test_where_the_kernels_cannot_be_imported_there_is_a_reason(monkeypatch):
    import pallas_kernels.fabric

    with asked_anew(), monkeypatch.context() as patch:
        patch.delitem(sys.modules, "pallas_kernels.fabric.mosaic")
        patch.delattr(pallas_kernels.fabric, "mosaic")
        patch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
        patch.delattr("jax.experimental.pallas.mosaic_gpu")
        reason = availability.mosaic_unavailable_reason()
        assert reason.startswith(f"it needs Mosaic, and JAX {jax.__version__} lacks a part of it")
        assert "mosaic_gpu" in reason
        assert "mosaic_gpu" not in lower(exchanged(None), "cuda")


def test_programs_for_cpus_do_not_ask_for_mosaic(monkeypatch):
    def loads_mosaic() -> None:
        raise AssertionError("this loads Mosaic")

    monkeypatch.setattr(availability, "mosaic_unavailable_reason", loads_mosaic)
    jax.clear_caches()
    assert programs("cpu")
