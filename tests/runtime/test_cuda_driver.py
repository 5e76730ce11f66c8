"""Tests what the CUDA driver, here a fake one, is asked for, and what follows from its answers."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from typing import Any

import jax
import pytest
from support.fake_cuda import GRANULARITY, FakeCuda, open_descriptors
from support.kernels import needs_kernels

from jax_ep.runtime import availability, cuda_driver

SUCCESS, ERROR = 0, 1
# A device handle of the driver is deliberately not the device's ordinal.
FIRST_HANDLE = 100


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The attributes of a `jax.Device` that the library reads."""

    id: int
    local_hardware_id: int | None
    platform: str = "gpu"
    process_index: int = 0
    compute_capability: str = "9.0"
    device_kind: str = "GPU"
    shared_memory_per_block_optin: int = 227 * 1024


@dataclasses.dataclass
class Driver:
    """A stand-in for libcuda on a host with some GPUs."""

    num_gpus: int = 4
    answers: bool = True
    attributes: dict[int, int] = dataclasses.field(default_factory=dict)

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return SUCCESS

    def cuDeviceGet(self, handle: Any, ordinal: ctypes.c_int) -> int:
        handle._obj.value = FIRST_HANDLE + ordinal.value
        return SUCCESS if 0 <= ordinal.value < self.num_gpus else ERROR

    def cuDeviceGetAttribute(self, value: Any, number: ctypes.c_int, handle: ctypes.c_int) -> int:
        # This is CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h.
        assert number.value == 132
        value._obj.value = self.attributes.get(handle.value - FIRST_HANDLE, 1)
        return SUCCESS if self.answers else ERROR

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        return ERROR


@pytest.fixture
def install(monkeypatch):
    def install(library: Any) -> Any:
        monkeypatch.setattr(cuda_driver, "_libcuda", lambda: library)
        return library

    return install


def gpus(*ordinals: int | None) -> list[Any]:
    return [Gpu(id, ordinal) for id, ordinal in enumerate(ordinals)]


@needs_kernels
def test_gpus_with_little_shared_memory_are_refused(install):
    install(Driver())
    (small,) = gpus(0)
    small = dataclasses.replace(
        small, compute_capability="12.0", shared_memory_per_block_optin=99 * 1024
    )
    reason = availability.unavailable_reason([small])
    assert reason is not None and "shared memory" in reason and "101376" in reason


@pytest.mark.parametrize(
    ("library", "ordinal"),
    [(None, 0), (Driver(answers=False), 0), (Driver(), 9), (Driver(), None)],
    ids=["no driver", "no answer", "no such GPU", "no ordinal"],
)
def test_what_the_driver_does_not_say_is_none(install, library, ordinal):
    install(library)
    assert cuda_driver.attribute(ordinal, 132) is None


def test_a_driver_that_fails_to_start_is_none(monkeypatch):
    class Broken:
        def cuInit(self, flags: int) -> int:
            return 999

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Broken())
    cuda_driver._libcuda.cache_clear()
    try:
        assert cuda_driver.cuda_version() is None and cuda_driver.attribute(0, 132) is None
    finally:
        cuda_driver._libcuda.cache_clear()


def test_multicast_that_a_gpu_lacks_is_refused(install):
    install(Driver(attributes={2: 0}))
    assert availability.multicast_unavailable_reason(gpus(0, 1)) is None
    reason = availability.multicast_unavailable_reason(gpus(0, 2))
    assert reason is not None and "missing" in reason and "id=1" in reason


@pytest.mark.parametrize("library", [None, Driver(answers=False)])
def test_multicast_that_the_driver_does_not_speak_of_is_refused(install, library):
    install(library)
    assert "does not say" in (availability.multicast_unavailable_reason(gpus(0, 1)) or "")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="concerns machines without GPUs")
def test_multicast_is_a_feature_of_gpus():
    assert "feature of NVIDIA GPUs" in (availability.multicast_unavailable_reason() or "")


def test_multicast_is_a_matter_of_several_gpus(install):
    install(Driver())
    assert "several" in (availability.multicast_unavailable_reason(gpus(0)) or "")


PLACE, SIZE = 2**45, 2 * GRANULARITY


def mapped(ordinal: int = 0, *, exportable: bool = False, place: int = PLACE) -> int:
    """Maps memory of a GPU at `place`, accessible to that GPU alone; returns its size in bytes."""
    handle, size = cuda_driver.create(ordinal, GRANULARITY + 1, exportable=exportable)
    assert cuda_driver.reserve(2**30, alignment=2**30, address=place) == place
    cuda_driver.map_at(place, size, handle)
    cuda_driver.release(handle)
    cuda_driver.allow_access(place, size, [ordinal])
    return size


def test_memory_is_mapped_written_and_given_back(install):
    library = install(FakeCuda([0, 1, 2]))
    before = open_descriptors()
    assert mapped(2) == SIZE
    assert cuda_driver.read(2, PLACE, SIZE) == bytes(SIZE)
    cuda_driver.fill(2, PLACE + 8, 0x01020304, 16)
    cuda_driver.write(2, PLACE + 12, b"eight...")
    assert cuda_driver.read(2, PLACE, 24) == (bytes(8) + b"\4\3\2\1" + b"eight..." + b"\4\3\2\1")
    cuda_driver.unmap(PLACE, SIZE)
    cuda_driver.free_addresses(PLACE, 2**30)
    assert not library.mappings and not library.reserved and open_descriptors() == before


def test_access_is_given_gpu_by_gpu(install):
    install(FakeCuda([4, 5, 6], no_access={(6, 4)}))
    size = mapped()
    assert [cuda_driver.has_access(PLACE, i) for i in range(3)] == [True, False, False]
    cuda_driver.allow_access(PLACE, size, [1])
    assert [cuda_driver.has_access(PLACE, i) for i in range(3)] == [True, True, False]
    with pytest.raises(cuda_driver.Error, match="cuMemSetAccess: peer access is not supported"):
        cuda_driver.allow_access(PLACE, size, [2])


def test_memory_goes_through_a_file_descriptor(install):
    library = install(FakeCuda([0, 1]))
    mapped(1, exportable=True)
    handle = cuda_driver.retain(PLACE + 100)
    assert cuda_driver.is_exportable(handle)
    fd = cuda_driver.export_fd(handle)
    assert not os.get_inheritable(fd)
    cuda_driver.release(handle)
    imported, there = cuda_driver.import_fd(fd), cuda_driver.reserve(SIZE)
    os.close(fd)
    cuda_driver.map_at(there, SIZE, imported)
    cuda_driver.allow_access(there, SIZE, [0])
    cuda_driver.write(0, there + 5, b"from there")
    assert cuda_driver.read(1, PLACE + 5, 10) == b"from there"
    cuda_driver.release(imported)
    assert not library.memories


def test_memory_that_is_not_for_export(install):
    install(FakeCuda([0]))
    mapped()
    handle = cuda_driver.retain(PLACE)
    assert not cuda_driver.is_exportable(handle)
    with pytest.raises(cuda_driver.Error, match="cuMemExportToShareableHandle"):
        cuda_driver.export_fd(handle)


def test_the_allocation_of_an_array(install):
    library = install(FakeCuda([0, 1]))
    address = library.pool(1, 8 * GRANULARITY)
    start, num_bytes = cuda_driver.address_range(1, address)
    assert num_bytes == 8 * GRANULARITY and start <= address < start + num_bytes
    address = library.pool(1, GRANULARITY, virtual=False)
    with pytest.raises(cuda_driver.Error, match="cuMemRetainAllocationHandle"):
        cuda_driver.retain(address)


def test_gpus_have_names_that_hold_in_every_process(install):
    names = []
    for visible in ([2, 7], [7]):
        install(FakeCuda(visible))
        names.append((cuda_driver.pci_bus_id(len(visible) - 1), cuda_driver.uuid(len(visible) - 1)))
    assert names[0] == names[1] == ("0000:17:00.0", "0" * 31 + "7")


@pytest.mark.parametrize("refused", ["cuStreamCreate", "cuMemsetD32Async", "cuStreamSynchronize"])
def test_a_fill_that_fails_leaves_the_context_as_it_was(install, refused):
    library = install(FakeCuda([0]))
    mapped()
    library.refuses = refused
    with pytest.raises(cuda_driver.Error, match=f"{refused}: out of memory"):
        cuda_driver.fill(0, PLACE, 0, 4096)
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
    library = install(FakeCuda([0], refuses="cuMemMap"))
    monkeypatch.setattr(library, "cuGetErrorString", lambda *_: ERROR)
    with pytest.raises(cuda_driver.Error, match="cuMemMap: unknown error"):
        mapped()


def test_the_driver_here_agrees_with_jax():
    """On GPUs the driver must answer as JAX does; without GPUs, asking must not raise."""
    version = cuda_driver.cuda_version()
    assert version is not None or jax.default_backend() != "gpu"
