"""What the CUDA driver is asked for, and what follows from its answers; the driver is a fake."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import jax
import pytest

from jax_ep.cli import info
from jax_ep.exchange.primitives import pallas_unavailable_reason
from jax_ep.runtime import cuda_driver, multicast

SUCCESS, ERROR = 0, 1
GRANULARITY = 2**21
FIRST_HANDLE = 100  # the driver's names of GPUs are not their ordinals


@dataclasses.dataclass(frozen=True)
class Gpu:
    """As much of a `jax.Device` as is looked at."""

    id: int
    local_hardware_id: int | None
    platform: str = "gpu"
    process_index: int = 0
    compute_capability: str = "9.0"
    device_kind: str = "GPU"
    shared_memory_per_block_optin: int = 227 * 1024


@dataclasses.dataclass
class Driver:
    """libcuda of a host with some GPUs."""

    num_gpus: int = 4
    no_access: frozenset[tuple[int, int]] = frozenset()
    answers: bool = True
    attributes: dict[int, int] = dataclasses.field(default_factory=dict)
    asked: int = 0
    refuses: str = ""  # a function, or one and the GPU: "cuMemCreate 2"
    calls: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return SUCCESS

    def cuDeviceGet(self, handle: Any, ordinal: ctypes.c_int) -> int:
        handle._obj.value = FIRST_HANDLE + ordinal.value
        return SUCCESS if 0 <= ordinal.value < self.num_gpus else ERROR

    def cuDeviceCanAccessPeer(self, can: Any, one: ctypes.c_int, other: ctypes.c_int) -> int:
        self.asked += 1
        pair = one.value - FIRST_HANDLE, other.value - FIRST_HANDLE
        can._obj.value = pair not in self.no_access
        return SUCCESS if self.answers else ERROR

    def cuDeviceGetAttribute(self, value: Any, number: ctypes.c_int, handle: ctypes.c_int) -> int:
        assert number.value == 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h
        value._obj.value = self.attributes.get(handle.value - FIRST_HANDLE, 1)
        return SUCCESS if self.answers else ERROR

    def cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: Any) -> int:
        size._obj.value = GRANULARITY
        return self._call("cuMemGetAllocationGranularity", properties._obj.location.id)

    def cuMemAddressReserve(self, start: Any, size: Any, align: Any, at: Any, flags: Any) -> int:
        start._obj.value = at.value
        return self._call("cuMemAddressReserve", size.value, align.value, at.value)

    def cuMemCreate(self, memory: Any, size: Any, properties: Any, flags: Any) -> int:
        of = properties._obj
        assert (of.type, of.location.type, of.requested_handle_types) == (1, 1, 0)  # cuda.h
        memory._obj.value = 1000 + of.location.id
        return self._call("cuMemCreate", of.location.id, size.value)

    def cuMemMap(self, start: Any, size: Any, offset: Any, memory: Any, flags: Any) -> int:
        return self._call("cuMemMap", start.value, size.value, memory.value)

    def cuMemSetAccess(self, start: Any, size: Any, everyone: Any, count: Any) -> int:
        assert {(access.location.type, access.flags) for access in everyone} == {(1, 3)}  # cuda.h
        ordinals = [access.location.id for access in everyone[: count.value]]
        return self._call("cuMemSetAccess", start.value, size.value, ordinals)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 10 + device.value
        return self._call("cuDevicePrimaryCtxRetain", device.value)

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:
        stream._obj.value = 7
        return self._call("cuStreamCreate", flags.value)

    def cuMemsetD32Async(self, start: Any, word: Any, count: Any, stream: Any) -> int:
        assert stream.value == 7
        return self._call("cuMemsetD32Async", start.value, word.value, count.value)

    def cuGetErrorString(self, status: Any, text: Any) -> int:
        text._obj.value = b"out of memory" if status.value == ERROR else None
        return SUCCESS

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._call(name)

    def _call(self, name: str, *args: Any) -> int:
        self.calls.append((name, *args))
        return ERROR if self.refuses in (name, f"{name} {args[0] if args else None}") else SUCCESS

    def called(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


@pytest.fixture
def install(monkeypatch):
    def install(library: Driver | None) -> Driver | None:
        cuda_driver._peer_access.cache_clear()
        monkeypatch.setattr(cuda_driver, "_libcuda", lambda: library)
        return library

    yield install
    cuda_driver._peer_access.cache_clear()


def gpus(*ordinals: int | None) -> list[Any]:
    return [Gpu(id, ordinal) for id, ordinal in enumerate(ordinals)]


def test_peer_access_of_all_pairs_serves(install):
    install(Driver())
    assert pallas_unavailable_reason(gpus(0, 1, 2, 3)) is None
    assert cuda_driver.peer_access([0, 1]) == ((True, True), (True, True))


def test_gpus_with_little_shared_memory_are_refused(install):
    install(Driver())
    (small,) = gpus(0)
    small = dataclasses.replace(
        small, compute_capability="12.0", shared_memory_per_block_optin=99 * 1024
    )
    reason = pallas_unavailable_reason([small])
    assert reason is not None and "shared memory" in reason and "101376" in reason


def test_a_missing_pair_is_named(install):
    install(Driver(no_access=frozenset({(3, 1)})))
    reason = pallas_unavailable_reason(gpus(0, 1, 2, 3))
    assert reason is not None and "peer access" in reason and "from GPU 3 to GPU 1" in reason
    assert pallas_unavailable_reason(gpus(0, 1, 2)) is None  # the others can


def test_devices_are_asked_for_by_their_ordinals(install):
    """JAX may number the devices otherwise, say with jax_cuda_visible_devices."""
    install(Driver(no_access=frozenset({(3, 1)})))
    reason = pallas_unavailable_reason(gpus(1, 3))
    assert reason is not None and "from GPU 1 to GPU 0" in reason


def test_the_driver_is_asked_once(install):
    library = install(Driver())
    for _ in range(2):
        assert pallas_unavailable_reason(gpus(0, 1, 2)) is None
    assert library.asked == 6


@pytest.mark.parametrize(
    ("library", "ordinals"),
    [(None, (0, 1)), (Driver(answers=False), (0, 1)), (Driver(), (0, 9)), (Driver(), (0, None))],
    ids=["no driver", "no answer", "no such GPU", "no ordinal"],
)
def test_what_the_driver_does_not_say_is_assumed(install, library, ordinals):
    install(library)
    assert cuda_driver.peer_access(ordinals) is None
    assert pallas_unavailable_reason(gpus(*ordinals)) is None


def test_a_driver_that_fails_to_start_is_none(monkeypatch):
    class Broken:
        def cuInit(self, flags: int) -> int:
            return 999

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Broken())
    cuda_driver._libcuda.cache_clear()
    cuda_driver._peer_access.cache_clear()
    try:
        assert cuda_driver.cuda_version() is None and cuda_driver.attribute(0, 132) is None
        assert cuda_driver.peer_access([0, 1]) is None
    finally:
        cuda_driver._libcuda.cache_clear()
        cuda_driver._peer_access.cache_clear()


def test_info_and_the_reason_agree(install, monkeypatch):
    install(Driver(no_access=frozenset({(0, 2)})))
    monkeypatch.setattr(jax, "devices", lambda: gpus(0, 1, 2))
    facts = info.collect() | {"backend": "gpu"}
    text = info.render(facts)
    assert "(CUDA 13.0)" in text
    assert "missing between GPUs 0->2\n" in text
    assert "does not: it needs peer access" in text


def test_multicast_that_a_gpu_lacks_is_refused(install):
    install(Driver(attributes={2: 0}))
    assert multicast.unavailable_reason(gpus(0, 1)) is None
    reason = multicast.unavailable_reason(gpus(0, 2))
    assert reason is not None and "missing" in reason and "id=1" in reason


@pytest.mark.parametrize("library", [None, Driver(answers=False)])
def test_multicast_that_the_driver_does_not_speak_of_is_refused(install, library):
    install(library)
    assert "does not say" in (multicast.unavailable_reason(gpus(0, 1)) or "")


def test_multicast_is_a_matter_of_several_gpus(install):
    install(Driver())
    assert "several" in (multicast.unavailable_reason(gpus(0)) or "")


def test_memory_that_all_gpus_can_write_to(install):
    library = install(Driver())
    stride, address = 2**30, 2**44
    assert cuda_driver.map_shared(3, GRANULARITY + 1, stride=stride, address=address) == address
    size = 2 * GRANULARITY
    assert library.called("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess") == [
        ("cuMemAddressReserve", 3 * stride, stride, address),
        *(
            call
            for i, start in enumerate(range(address, address + 3 * stride, stride))
            for call in (
                ("cuMemCreate", i, size),
                ("cuMemMap", start, size, 1000 + i),
                ("cuMemSetAccess", start, size, [0, 1, 2]),
            )
        ),
    ]


@pytest.mark.parametrize(
    "refused",
    [
        "cuMemAddressReserve",
        "cuMemGetAllocationGranularity",
        "cuMemCreate 2",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_a_driver_that_gives_no_memory_says_which_function(install, refused):
    library = install(Driver(refuses=refused))
    name = refused.split()[0]
    with pytest.raises(cuda_driver.Error, match=f"{name}: out of memory"):
        cuda_driver.map_shared(4, 1, stride=2**30, address=2**44)
    named = [call[0] for call in library.calls]
    assert named.count("cuMemRelease") == len(set(library.called("cuMemCreate"))) - (
        name == "cuMemCreate"
    )
    reserved = name != "cuMemAddressReserve"  # and then nothing is kept
    assert named.count("cuMemAddressFree") == reserved
    kept = len(library.called("cuMemMap")) - (name == "cuMemMap")
    assert named.count("cuMemUnmap") == kept


def test_memory_is_filled(install):
    library = install(Driver())
    cuda_driver.fill(2, 2**44, 0xFFFFFFFF, 4096)
    device = FIRST_HANDLE + 2
    assert ("cuDevicePrimaryCtxRetain", device) == library.calls[0]
    (memset,) = library.called("cuMemsetD32Async")
    assert memset == ("cuMemsetD32Async", 2**44, 0xFFFFFFFF, 1024)
    names = [call[0] for call in library.calls]
    assert names.index("cuMemsetD32Async") < names.index("cuStreamSynchronize")
    assert names[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize("refused", ["cuStreamCreate", "cuMemsetD32Async", "cuStreamSynchronize"])
def test_a_fill_that_fails_leaves_the_context_as_it_was(install, refused):
    library = install(Driver(refuses=refused))
    with pytest.raises(cuda_driver.Error, match=f"{refused}: out of memory"):
        cuda_driver.fill(0, 2**44, 0, 4096)
    names = [call[0] for call in library.calls]
    assert names[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


def test_errors_of_a_driver_that_is_not_there_or_has_no_words(install, monkeypatch):
    install(None)
    for function in (
        lambda: cuda_driver.fill(0, 2**44, 0, 4),
        lambda: cuda_driver.map_shared(1, 1, stride=2**30, address=0),
    ):
        with pytest.raises(cuda_driver.Error, match="there is no driver"):
            function()
    library = install(Driver(refuses="cuMemMap"))
    monkeypatch.setattr(library, "cuGetErrorString", lambda *_: ERROR, raising=False)
    with pytest.raises(cuda_driver.Error, match="cuMemMap: unknown error"):
        cuda_driver.map_shared(1, 1, stride=2**30, address=0)


def test_the_driver_here_agrees_with_jax():
    """On GPUs it must answer; without them, it must not raise."""
    if jax.default_backend() != "gpu":
        assert cuda_driver.peer_access([0]) in (None, ((True,),))
        return
    ordinals = [device.local_hardware_id for device in jax.devices()]
    assert cuda_driver.cuda_version() is not None and len(cuda_driver.peer_access(ordinals)) == len(
        ordinals
    )
