"""Where LL serves, and why not where it doesn't; its regions, mapped by a driver that is a fake."""

from __future__ import annotations

import re
import struct
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.fake_cuda import FakeCuda, open_descriptors
from support.meshes import cuda_mesh, expert_mesh

from jax_ep.collectives import api as collectives
from jax_ep.collectives import selection
from jax_ep.collectives import table as collectives_table
from jax_ep.collectives.pallas import payload_unavailable_reason
from jax_ep.collectives.selection import Refusals
from jax_ep.runtime import availability, cuda_driver, jax_compat, symmetric_memory
from pallas_kernels.fabric import layout
from pallas_kernels.fabric import low_latency as ll
from pallas_kernels.fabric.sentinel_words import EMPTY, SLOT_BYTES, Regions

AXIS = "expert"
BY_LL = [
    ("all_reduce", "one_shot_ll"),
    ("all_reduce", "two_shot_ll"),
    ("all_gather", "ll"),
    ("reduce_scatter", "ll"),
    ("all_to_all", "ll"),
]
REGIONS = Regions(2**40, 2**30, 4, ll.NUM_COUNTERS, ll.num_slots(4))
MIB = 2**20


def lower(function: Any, shape: tuple[int, ...], dtype: Any, num_ranks: int = 2) -> str:
    return traced(function, shape, dtype, num_ranks).lower(lowering_platforms=("cuda",)).as_text()


def traced(function: Any, shape: tuple[int, ...], dtype: Any, num_ranks: int = 2) -> Any:
    mesh = cuda_mesh((num_ranks,), (AXIS,))
    return mapped(function, mesh).trace(jax.ShapeDtypeStruct(shape, dtype))


def mapped(function: Any, mesh: Any) -> Any:
    spec = P(AXIS)
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def collective(op: str, algorithm: str | None) -> Any:
    return lambda x: getattr(collectives, op)(x, AXIS, algorithm=algorithm)


# ------------------------------------------------------------------------------------------ policy


@pytest.mark.skipif(not availability.unavailable_reason(), reason="the kernels serve here")
@pytest.mark.parametrize(("op", "algorithm"), BY_LL)
def test_a_mesh_of_cpus_is_refused(op, algorithm):
    message = rf'{op}: algorithm="{algorithm}" cannot run here: it needs NVIDIA GPUs'
    with pytest.raises(ValueError, match=message):
        mapped(collective(op, algorithm), expert_mesh(2)).trace(jnp.zeros((8, 512)))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("op", "algorithm", "limit"),
    [
        ("all_reduce", "one_shot_ll", lambda n: 4 * MIB),
        ("all_reduce", "two_shot_ll", lambda n: 2 * MIB * n),
        ("all_gather", "ll", lambda n: 4 * MIB),  # of x, not of the result
        ("reduce_scatter", "ll", lambda n: 4 * MIB * n),
        ("all_to_all", "ll", lambda n: 4 * MIB * n),
    ],
    ids=lambda value: None if isinstance(value, str) else "limit",
)
def test_payloads_up_to_what_ll_holds(op, algorithm, limit, dtype, num_ranks):
    """The kernels lower for the largest; a bit more is refused, and the bytes say why."""
    dtype = jnp.dtype(dtype)
    per_rank = limit(num_ranks) // dtype.itemsize
    step = num_ranks * 8
    assert payload_unavailable_reason(op, algorithm, (per_rank,), dtype, num_ranks) is None
    reason = payload_unavailable_reason(op, algorithm, (per_rank + step,), dtype, num_ranks)
    assert (
        f"x, ({per_rank + step},) {dtype.name}, is more than the low-latency protocol has room for"
        in reason
    )

    if dtype.itemsize == 2:
        for of_rank in (per_rank, per_rank - num_ranks):
            text = lower(collective(op, algorithm), (num_ranks * of_rank,), dtype, num_ranks)
            assert "@mosaic_gpu" in text
        with pytest.raises(
            ValueError,
            match=f'{op}: algorithm="{algorithm}".*more than the low-latency protocol has room for',
        ):
            lower(collective(op, algorithm), (num_ranks * (per_rank + step),), dtype, num_ranks)


def test_payloads_of_other_kinds_are_refused():
    for op, algorithm in BY_LL:
        with pytest.raises(ValueError, match=f'"{algorithm}".*x is float8_e4m3fn, not one of bfl'):
            lower(collective(op, algorithm), (8, 512), jnp.float8_e4m3fn)
        with pytest.raises(ValueError, match=r"x is empty, its shape is \(4, 0\)"):
            lower(collective(op, algorithm), (8, 0), jnp.float32)
    with jax.enable_x64(True), pytest.raises(ValueError, match="x is float64, not one of bfloat16"):
        lower(collective("all_gather", "ll"), (8, 512), jnp.float64)
    with pytest.raises(ValueError, match="algorithm of all_gather must be .*'one_shot_ll'"):
        lower(collective("all_gather", "one_shot_ll"), (8, 512), jnp.float32)
    assert "@mosaic_gpu" in lower(collective("all_reduce", "one_shot_ll"), (2, 1), jnp.float16)


@pytest.mark.parametrize(("op", "algorithm"), BY_LL)
def test_a_program_to_export_has_no_addresses(op, algorithm):
    mesh, x = cuda_mesh((2,), (AXIS,)), jax.ShapeDtypeStruct((8, 512), jnp.float32)
    named = mapped(collective(op, algorithm), mesh)
    message = f'{op}: algorithm="{algorithm}".*holds addresses of this process, and is to be exp'
    with pytest.raises(ValueError, match=message):
        export.export(named, platforms=["cuda"])(x)
    exported = export.export(mapped(collective(op, None), mesh), platforms=["cuda"])(x)
    assert not re.search(r"ep_\w+_ll", exported.mlir_module())


@pytest.mark.parametrize("order", [1, -1])
def test_a_mesh_of_unknown_gpus_is_refused(monkeypatch, order):
    """An abstract mesh has no order of devices, and arrays may be on them in any."""
    found = []

    def note(op, algorithm, x, num_ranks, refusals):
        found.append(refusals.low_latency)
        return "xla"

    monkeypatch.setattr(selection, "choose", note)
    monkeypatch.setattr(availability, "program_unavailable_reason", lambda *_: None)
    mesh = Mesh(np.asarray(jax.devices()[::order]), (AXIS,))
    x = jax.device_put(jnp.zeros((mesh.size * 8, 4)), NamedSharding(mesh, P(AXIS)))
    for of_shard_map in (mesh, mesh.abstract_mesh):
        program = mapped(collective("all_gather", None), of_shard_map).trace(x)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "gpu")
            program.lower()
    assert found[0] is None and "order of the GPUs" in found[1]


class Chosen:
    """`choose` on a machine of GPUs, which there need not be."""

    def __init__(self, monkeypatch: Any) -> None:
        self._patch = monkeypatch.setattr
        self.asked = 0
        self._patch(jax, "default_backend", lambda: "gpu")
        self._patch(availability, "unavailable_reason", lambda: None)
        self._patch(availability, "tracing_unavailable_reason", lambda: None)
        self.table("ll")
        self.regions(REGIONS)

    def table(self, fastest: str) -> None:
        """Of the times in which "direct" is faster than "xla", and `fastest` than both."""
        times = {"xla": 30.0, "direct": 20.0, fastest: 10.0}
        measured = {"2": {"choices": [[None, fastest]], "us": {"1024": times}}}
        capability = getattr(jax.devices()[0], "compute_capability", "")
        table = {capability: {"all_gather": measured}}
        self._patch(collectives_table, "current", lambda: table)

    def regions(self, regions: Regions | str) -> None:
        def here() -> Regions | str:
            self.asked += 1
            return regions

        self._patch(symmetric_memory, "here", here)

    def __call__(self, algorithm: str | None = None, size: int = 1024, **options: Any) -> str:
        x = jax.ShapeDtypeStruct((size,), options.pop("dtype", jnp.bfloat16))
        return selection.choose("all_gather", algorithm, x, 2, Refusals(**options))


@pytest.fixture
def chosen(monkeypatch):
    return Chosen(monkeypatch)


def test_the_table_may_say_ll(chosen):
    assert chosen() == chosen("ll") == "ll"
    chosen.table("direct")
    assert chosen() == "direct" and chosen("ll") == "ll"


def test_without_ll_the_next_best_serves(chosen):
    assert chosen(size=2 * MIB) == "ll" and chosen(size=2 * MIB + 8) == "direct"
    assert chosen(dtype=jnp.float8_e4m3fn) == "direct"
    assert chosen(kernels="these are CPUs") == "xla"
    chosen.regions("the driver gives none")
    assert chosen() == "direct"
    with pytest.raises(ValueError, match='algorithm="ll" cannot run here: the driver gives none'):
        chosen("ll")


def test_programs_that_ll_cannot_serve_have_the_other_kernels(chosen):
    reason = "it is to be exported"
    assert chosen(low_latency=reason) == chosen("direct", low_latency=reason) == "direct"
    with pytest.raises(ValueError, match=f'"ll" cannot run here: {reason}'):
        chosen("ll", low_latency=reason)
    chosen.table("xla")
    assert chosen(low_latency=reason) == chosen() == "xla"


def test_memory_is_taken_by_programs_that_use_ll_only(chosen):
    """Every GPU gives some for as long as the process lives."""
    chosen("direct"), chosen("xla"), chosen(low_latency="it is to be exported")
    chosen.table("direct")
    chosen()
    assert chosen.asked == 0
    chosen("ll")
    assert chosen.asked == 1


# ----------------------------------------------------------------------------------------- regions


@pytest.fixture
def machine(monkeypatch):
    """Makes these GPUs of a fake driver what JAX has here, in its order."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)

    def make(*ordinals: int, **driver: Any) -> FakeCuda:
        library = FakeCuda(list(range(max(ordinals) + 1)), **driver)
        gpus = [
            types.SimpleNamespace(
                id=10 + i, local_hardware_id=ordinal, platform="gpu", process_index=0
            )
            for i, ordinal in enumerate(ordinals)
        ]
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda: gpus)
        pools = {gpu.id: library.pool(gpu.local_hardware_id, 2**20) for gpu in gpus}
        monkeypatch.setattr(symmetric_memory, "_array_address", lambda device: pools[device.id])
        monkeypatch.setattr(cuda_driver, "_libcuda", lambda: library)
        return library

    symmetric_memory._domain.cache_clear()
    yield make
    symmetric_memory._domain.cache_clear()


def words(ordinal: int, address: int, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}Q", cuda_driver.read(ordinal, address, 8 * count)))


def test_heaps_are_mapped_once_for_all_gpus(machine):
    library = machine(1, 0, 2)
    domain = symmetric_memory.domain()
    assert domain is symmetric_memory.domain()
    assert (domain.base, domain.stride, domain.num_gpus) == (layout.BASE, layout.STRIDE, 3)
    assert domain.heap_bytes == symmetric_memory.heap_bytes(3)
    assert domain.numbers == {10: 1, 11: 0, 12: 2} and domain.gpus_of_process == {0: 3}
    for gpu in domain.gpus:
        heap = library.mapping(domain.base + gpu.number * domain.stride)
        pool = library.mapping(gpu.pool_start)
        assert (heap.memory.gpu, pool.memory.gpu) == (gpu.number, gpu.number)
        assert (heap.start, pool.start) == (
            domain.base + gpu.number * domain.stride,
            gpu.pool_start,
        )
        assert heap.memory.size >= domain.heap_bytes and pool.memory.size == gpu.pool_bytes
        assert heap.access == pool.access == {0, 1, 2}
    assert not library.memories  # no handle is kept


def test_a_heap_begins_with_a_header_and_is_empty(machine):
    machine(0, 1)
    domain = symmetric_memory.domain()
    for g in range(2):
        heap = domain.base + g * domain.stride
        header = words(1 - g, heap, layout.HEADER_BYTES // 8)
        assert header[:3] == [layout.MAGIC_VALUE, *layout.ANY_ADDRESS] and not any(header[3:])
        contents = cuda_driver.read(g, heap, domain.heap_bytes)[layout.HEADER_BYTES :]
        counters = 4 * ll.NUM_COUNTERS
        assert contents[:counters] == bytes(counters)
        empty = EMPTY.to_bytes(4, "little")
        assert contents[counters:] == empty * (SLOT_BYTES * ll.num_slots(2) // 4)


def test_regions_are_behind_the_header(machine):
    machine(0, 1)
    regions = symmetric_memory.here()
    assert regions == symmetric_memory.elsewhere(2)
    assert regions.base == layout.BASE + layout.HEADER_BYTES and regions.stride == layout.STRIDE


def test_regions_have_room():
    """For all slots of all senders, apart from each other, on vectors' boundaries."""
    for num_devices in range(1, ll.MAX_DEVICES + 1):
        regions = symmetric_memory.elsewhere(num_devices)
        assert symmetric_memory.heap_bytes(num_devices) <= regions.stride
        assert regions.base % 128 == 0 and 4 * regions.num_counters % 16 == 0
        assert symmetric_memory.region_bytes(
            num_devices
        ) == 4 * ll.NUM_COUNTERS + SLOT_BYTES * ll.num_slots(num_devices)


def test_other_addresses_do_in_one_process(machine):
    machine(0, 1, taken=range(layout.BASE, layout.BASE + 1))
    domain, regions = symmetric_memory.domain(), symmetric_memory.here()
    assert domain.base != layout.BASE and regions.base == domain.base + layout.HEADER_BYTES
    assert words(0, domain.base + domain.stride, 1) == [layout.MAGIC_VALUE]


def test_too_many_gpus_are_refused(machine):
    library = machine(*range(9))
    assert symmetric_memory.here() == "LL is for up to 8 GPUs, and there are 9"
    assert not library.calls
    machine(*range(17))
    assert "up to 16 GPUs, and this host has 17" in symmetric_memory.domain()


@pytest.mark.parametrize("ordinals", [(1,), (0, 2), (1, 2, 3)])
def test_regions_of_gpus_that_are_not_the_first_are_refused(machine, ordinals):
    library = machine(*ordinals)
    reason = symmetric_memory.here()
    assert "from the first on" in reason and str(list(ordinals)) in reason
    assert not library.calls
    assert symmetric_memory.domain().numbers == {10 + i: i for i in range(len(ordinals))}


@pytest.mark.parametrize(
    "function",
    [
        "cuDeviceGetUuid_v2",
        "cuMemAddressReserve",
        "cuMemGetAllocationGranularity",
        "cuMemCreate 1",
        "cuMemMap",
        "cuMemSetAccess 0",
        "cuMemsetD32Async",
        "cuMemGetAddressRange_v2",
        "cuMemcpyHtoDAsync_v2",
    ],
)
def test_a_driver_that_refuses_is_a_reason_and_keeps_nothing(machine, function):
    library = machine(0, 1, refuses=function)
    before = open_descriptors()
    reason = symmetric_memory.here()
    assert f"{function.split()[0]}: out of memory" in reason
    assert len(library.mappings) == 2 and not library.memories and not library.reserved
    assert open_descriptors() == before
    num_calls = len(library.calls)
    assert symmetric_memory.here() == reason and len(library.calls) == num_calls


def test_gpus_without_peer_access_are_a_reason_where_they_meet(machine):
    machine(0, 1, 2, no_access={(2, 0)})
    gpus = jax.devices()
    assert symmetric_memory.unavailable_reason(gpus[:2]) is None
    assert symmetric_memory.unavailable_reason(gpus[1:]) is None
    reason = symmetric_memory.unavailable_reason(gpus[2::-2])
    assert reason == (
        "GPU 12 cannot address the memory of GPU 10: cuMemSetAccess: peer access is not supported"
    )
    assert symmetric_memory.here() == reason
    assert symmetric_memory.describe()[-1].startswith("GPU 2 cannot address GPU 0: cuMemSetAccess")


def test_gpus_of_another_host_are_a_reason(machine):
    machine(0, 1)
    there = types.SimpleNamespace(id=3, process_index=1)
    reason = symmetric_memory.unavailable_reason([*jax.devices(), there])
    assert reason == "GPU 3 of process 1 belongs to another host than GPU 10 of process 0"


def test_a_pool_of_another_kind_serves_one_process(machine):
    library = machine(0, 1)
    for mapping in library.mappings:
        mapping.virtual = False
    assert [gpu.pool_bytes for gpu in symmetric_memory.domain().gpus] == [0, 0]
    assert "pool not of the virtual-memory API" in symmetric_memory.describe()[1]


def test_kernels_that_overlap_are_refused(machine, monkeypatch):
    library = machine(0)
    flag = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
    monkeypatch.setenv("XLA_FLAGS", flag)
    assert "one at a time" in symmetric_memory.domain() and not library.calls


def test_other_platforms_are_refused():
    symmetric_memory._domain.cache_clear()
    if jax.default_backend() != "gpu":
        assert symmetric_memory.domain() == "symmetric memory needs NVIDIA GPUs"
        assert symmetric_memory.describe() == ["none: symmetric memory needs NVIDIA GPUs"]


def test_without_a_driver_there_is_a_reason(machine, monkeypatch):
    machine(0)
    monkeypatch.setattr(cuda_driver, "_libcuda", lambda: None)
    assert "there is no driver" in symmetric_memory.here()


def test_an_array_has_an_address_while_a_program_is_traced():
    """Programs are lowered within whatever the user has traced and set."""
    found = []

    def look(x: jax.Array) -> jax.Array:
        found.append(symmetric_memory._array_address(jax.devices()[0]))
        return x

    mesh = expert_mesh(1)
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
        jax.jit(jax.shard_map(look, in_specs=P(), out_specs=P())).trace(
            jax.ShapeDtypeStruct((2,), jnp.float32)
        )
    assert found and found[0] > 0


@pytest.mark.skipif(bool(availability.unavailable_reason()), reason="needs the kernels' GPUs")
def test_regions_of_this_machine():
    regions = symmetric_memory.here()
    assert isinstance(regions, Regions) and regions.num_devices == len(jax.local_devices())


@pytest.mark.parametrize("op", ["all_gather", "all_reduce_rms_norm"])
def test_programs_are_lowered_anew_for_other_devices(op, monkeypatch):
    """LL knows GPUs by number, and JAX would run what it lowered for some on others."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lowered_for = []

    def devices_by_place(mesh: Any) -> tuple[int, ...]:
        lowered_for.append([device.id for device in mesh.devices])
        return (0, 1)

    monkeypatch.setattr(jax_compat, "devices_by_place", devices_by_place)
    monkeypatch.setattr(collectives_table, "lookup", lambda *_, **__: "xla")

    def run(x: jax.Array) -> Any:
        if op == "all_gather":
            return collectives.all_gather(x, AXIS)
        return collectives.all_reduce_rms_norm(x, x, x[0], AXIS)[0]

    program = jax.jit(jax.shard_map(run, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    orders = [[0, 1], [1, 0], [0, 1]]
    for order in orders:
        mesh = Mesh(np.asarray(jax.devices())[order], (AXIS,))
        with jax.set_mesh(mesh):
            program(jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P(AXIS))))
    assert lowered_for == orders[:2]
