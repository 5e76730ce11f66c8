"""Tests what the CUDA driver, here a fake one, is asked for, and what follows from its answers."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
from support.fake_cuda import ERROR, FakeCuda
from support.kernels import needs_kernels

from jax_ep.runtime import availability, cuda_driver


@pytest.fixture
def install(monkeypatch):
    def install(library: Any) -> Any:
        monkeypatch.setattr(cuda_driver, "_libcuda", lambda: library)
        return library

    return install


def gpus(*ordinals: int, **attributes: Any) -> list[Any]:
    """Returns stand-ins for devices, with the attributes that the library reads."""
    hopper = dict(platform="gpu", process_index=0, compute_capability="9.0", device_kind="GPU")
    facts = hopper | {"shared_memory_per_block_optin": 227 * 1024} | attributes
    return [
        types.SimpleNamespace(id=id, local_hardware_id=ordinal, **facts)
        for id, ordinal in enumerate(ordinals)
    ]


@needs_kernels
def test_gpus_with_little_shared_memory_are_refused(install):
    install(FakeCuda([0]))
    small = dict(compute_capability="12.0", shared_memory_per_block_optin=99 * 1024)
    reason = availability.unavailable_reason(gpus(0, **small))
    assert reason is not None and "shared memory" in reason and "101376" in reason


def test_a_driver_that_fails_to_start_is_none(monkeypatch):
    broken = types.SimpleNamespace(cuInit=lambda flags: 999)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: broken)
    cuda_driver._libcuda.cache_clear()
    try:
        assert cuda_driver.cuda_version() is None
    finally:
        cuda_driver._libcuda.cache_clear()


@pytest.mark.parametrize("refused", ["cuStreamCreate", "cuMemsetD32Async"])
def test_a_fill_that_fails_leaves_the_context_as_it_was(install, refused):
    library = install(FakeCuda([0], refuses=refused))
    with pytest.raises(cuda_driver.Error, match=f"{refused}: out of memory"):
        cuda_driver.fill(0, 2**45, 0, 4096)
    assert library.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
    assert library.calls.count("cuStreamDestroy_v2") == (refused != "cuStreamCreate")


def test_errors_of_a_driver_that_is_not_there_or_has_no_words(install, monkeypatch):
    install(None)
    for function in (
        lambda: cuda_driver.fill(0, 2**44, 0, 4),
        lambda: cuda_driver.create(0, 1),
        lambda: cuda_driver.uuid(0),
    ):
        with pytest.raises(cuda_driver.Error, match="there is no driver"):
            function()
    library = install(FakeCuda([0], refuses="cuMemCreate"))
    monkeypatch.setattr(library, "cuGetErrorString", lambda *_: ERROR)
    with pytest.raises(cuda_driver.Error, match="cuMemCreate: unknown error"):
        cuda_driver.create(0, 1)
