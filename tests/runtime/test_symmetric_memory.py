"""Tests where low-latency collectives run, and why not; a fake driver maps the heaps."""

from __future__ import annotations

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
from support.domain_processes import Store, gpus_of_process
from support.fake_cuda import FakeCuda, open_descriptors
from support.kernels import lowered, needs_kernels, on_ranks, program_for_cuda
from support.meshes import cuda_mesh, expert_mesh
from support.selection import quick

from jax_ep.collectives import api as collectives
from jax_ep.collectives import table as collectives_table
from jax_ep.collectives.algorithms import Problem
from jax_ep.collectives.pallas import no_room_reason
from jax_ep.runtime import availability, cuda_driver, jax_compat, processes, symmetric_memory
from jax_ep.runtime.symmetric_memory import Domain, Gpu
from pallas_kernels.fabric import memory_map

AXIS = "expert"
BY_LL = [
    ("all_reduce", "one_shot_ll"),
    ("all_reduce", "two_shot_ll"),
    ("all_gather", "ll"),
    ("reduce_scatter", "ll"),
    ("all_to_all", "ll"),
]
MIB = 2**20


def lower(function: Any, size: int, dtype: Any, num_ranks: int) -> str:
    program = on_ranks(function, cuda_mesh((num_ranks,), (AXIS,)))
    return lowered(program, jax.ShapeDtypeStruct((size,), dtype))


def collective(op: str, algorithm: str | None) -> Any:
    return lambda x: getattr(collectives, op)(x, AXIS, algorithm=algorithm)


# -------------------------------------------------------------------- which collective is selected


@needs_kernels
@pytest.mark.parametrize("num_ranks", quick([2, 8], 8))
@pytest.mark.parametrize(("op", "algorithm"), BY_LL)
def test_payloads_up_to_what_ll_holds(op, algorithm, num_ranks):
    """The largest payload of the low-latency protocol must lower, and a larger one be refused."""
    dtype = jnp.bfloat16
    room = (4 if num_ranks <= 4 else 2) * MIB
    # The limit is on x, not on the result.
    limits = dict(one_shot_ll=room, two_shot_ll=room // 2 * num_ranks)
    limit = limits.get(algorithm, room if op == "all_gather" else room * num_ranks)
    per_rank, step = limit // jnp.dtype(dtype).itemsize, num_ranks * 8
    assert no_room_reason(op, algorithm, (per_rank,), dtype, num_ranks, num_ranks) is None
    reason = no_room_reason(op, algorithm, (per_rank + step,), dtype, num_ranks, num_ranks)
    assert f"x, ({per_rank + step},)" in reason and "too large for the buffers" in reason
    assert "@mosaic_gpu" in lower(collective(op, algorithm), num_ranks * per_rank, dtype, num_ranks)
    with pytest.raises(ValueError, match=f'{op}: algorithm="{algorithm}".*too large for the'):
        lower(collective(op, algorithm), num_ranks * (per_rank + step), dtype, num_ranks)


@needs_kernels
def test_a_program_to_export_holds_no_addresses(monkeypatch):
    op, algorithm = BY_LL[0]
    mesh, x = cuda_mesh((2,), (AXIS,)), jax.ShapeDtypeStruct((8, 512), jnp.float32)
    message = f'{op}: algorithm="{algorithm}".*holds addresses of this machine, so it cannot'
    with pytest.raises(ValueError, match=message):
        export.export(on_ranks(collective(op, algorithm), mesh), platforms=["cuda"])(x)
    taken_for_gpus(monkeypatch)
    monkeypatch.setattr(symmetric_memory, "domain", lambda: domain_of(2))
    monkeypatch.setattr(collectives_table, "lookup", fastest(algorithm))
    exported = export.export(on_ranks(collective(op, None), mesh), platforms=["cuda"])(x)
    assert "mosaic_gpu" not in exported.mlir_module()


def taken_for_gpus(monkeypatch: Any) -> None:
    """Makes this machine's devices pass for GPUs on which the kernels run."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(availability, "unavailable_reason", lambda: None)


def domain_of(num_gpus: int) -> Domain:
    gpus = tuple(Gpu(g, g, 0, f"0000:{g:02x}:00.0", 0, 0) for g in range(num_gpus))
    return Domain(memory_map.BASE, gpus)


FOUR_GPUS = domain_of(4)


def fastest(algorithm: str) -> Any:
    """Returns a stand-in for `table.lookup` that prefers `algorithm`, else "xla"."""
    return lambda *_, can_run: algorithm if can_run(algorithm) else "xla"


@pytest.fixture
def chosen(monkeypatch):
    """Returns a function that selects an algorithm of all_gather, as if devices were four GPUs.

    In its table of times `fastest` beats "direct", which beats "xla".
    """
    taken_for_gpus(monkeypatch)
    monkeypatch.setattr(jax, "device_count", lambda: 4)

    def choose(algorithm=None, *, size=1024, dtype=jnp.bfloat16, fastest="ll", domain=FOUR_GPUS):
        times = {"xla": 30.0, "direct": 20.0, fastest: 10.0}
        measured = {"2": {"choices": [[None, fastest]], "us": {"1024": times}}}
        capability = getattr(jax.devices()[0], "compute_capability", "")
        table = {capability: {"all_gather": measured}}
        monkeypatch.setattr(collectives_table, "current", lambda: table)
        monkeypatch.setattr(symmetric_memory, "domain", lambda: domain)
        anywhere = types.SimpleNamespace(unavailable_reason=lambda *_: None)
        x = jax.ShapeDtypeStruct((size,), dtype)
        problem = Problem("all_gather", (x,), 2, (AXIS,), anywhere)
        return collectives_table.select(algorithm, problem)

    return choose


def test_without_ll_the_next_best_serves(chosen):
    assert chosen() == chosen("ll") == chosen("ll", fastest="direct") == "ll"
    assert chosen(size=2 * MIB) == "ll" and chosen(size=2 * MIB + 8) == "direct"
    # In a domain of five GPUs, each sender has half as much room in a heap as in one of four.
    five = domain_of(5)
    assert chosen(size=MIB, domain=five) == "ll" and chosen(size=MIB + 8, domain=five) == "direct"
    assert chosen(dtype=jnp.float8_e4m3fn) == "direct"
    assert chosen(domain=domain_of(memory_map.MAX_LOW_LATENCY_GPUS)) == "ll"
    for domain, reason in (
        ("the driver gives none", "the driver gives none"),
        (domain_of(memory_map.MAX_LOW_LATENCY_GPUS + 1), "at most 8 GPUs, and this host has 9"),
    ):
        assert chosen(domain=domain) == "direct"
        with pytest.raises(ValueError, match=f'algorithm="ll" cannot run here: .*{reason}'):
            chosen("ll", domain=domain)


# ---------------------------------------------------------------------------- the heaps of a domain


@pytest.fixture
def machine(monkeypatch):
    """Returns a function that makes a fake driver's GPUs JAX's devices, in a given order."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)

    def make(*ordinals: int, first_id: int = 10, **driver: Any) -> FakeCuda:
        library = FakeCuda(list(range(max(ordinals) + 1)), **driver)
        gpus = [
            types.SimpleNamespace(
                id=first_id + i, local_hardware_id=ordinal, platform="gpu", process_index=0
            )
            for i, ordinal in enumerate(ordinals)
        ]
        for name in ("devices", "local_devices"):
            monkeypatch.setattr(jax, name, lambda: gpus)
        monkeypatch.setattr(jax, "device_count", lambda: len(gpus))
        pools = {gpu.id: library.pool(gpu.local_hardware_id, 2**20) for gpu in gpus}
        monkeypatch.setattr(symmetric_memory, "_array_address", lambda device: pools[device.id])
        monkeypatch.setattr(cuda_driver, "_libcuda", lambda: library)
        return library

    symmetric_memory._domain.cache_clear()
    yield make
    symmetric_memory._domain.cache_clear()


def words(ordinal: int, address: int, count: int) -> list[int]:
    return list(struct.unpack(f"<{count}Q", cuda_driver.read(ordinal, address, 8 * count)))


@pytest.mark.parametrize("taken", [range(0), range(memory_map.BASE, memory_map.BASE + 1)])
def test_a_heap_begins_with_a_header_and_is_empty(machine, taken):
    """One process may have its heaps at other addresses if the usual ones are taken."""
    machine(0, 1, taken=taken)
    domain = symmetric_memory.domain()
    assert (domain.base == memory_map.BASE) == (not taken)
    for g in range(2):
        heap = domain.base + g * memory_map.STRIDE
        header = words(1 - g, heap, memory_map.HEADER_BYTES // 8)
        assert header[0] == memory_map.MAGIC_VALUE and not any(header[3:])
        assert tuple(header[1:3]) == memory_map.ANY_ADDRESS or taken
        contents = cuda_driver.read(g, heap, memory_map.heap_bytes(domain.num_gpus))[
            memory_map.HEADER_BYTES :
        ]
        buffers = memory_map.TILES + 4 * memory_map.NUM_COUNTERS - memory_map.HEADER_BYTES
        assert contents[:buffers] == bytes(buffers)
        empty = memory_map.EMPTY.to_bytes(4, "little")
        assert contents[buffers:] == empty * (
            memory_map.TILE_BUFFER_BYTES * memory_map.num_tile_buffers(2) // 4
        )


REFUSED = "cuDeviceGetUuid_v2", "cuMemAddressReserve", "cuMemCreate 1", "cuMemMap"
REFUSED += "cuMemSetAccess 0", "cuMemsetD32Async", "cuMemGetAddressRange_v2", "cuMemcpyHtoDAsync_v2"


@pytest.mark.parametrize("function", REFUSED)
def test_a_driver_that_refuses_is_a_reason_and_keeps_nothing(machine, function):
    library = machine(0, 1, refuses=function)
    before = open_descriptors()
    reason = symmetric_memory.domain()
    assert f"{function.split()[0]}: out of memory" in reason
    assert len(library.mappings) == 2 and not library.memories and not library.reserved
    assert open_descriptors() == before
    num_calls = len(library.calls)
    assert symmetric_memory.domain() == reason and len(library.calls) == num_calls


def test_gpus_without_peer_access_are_a_reason_where_they_meet(machine):
    machine(0, 1, 2, no_access={(2, 0)})
    gpus = jax.devices()
    assert symmetric_memory.unavailable_reason(gpus[:2]) is None
    assert symmetric_memory.unavailable_reason(gpus[1:]) is None
    reason = symmetric_memory.unavailable_reason(gpus[2::-2])
    assert reason == (
        "GPU 12 cannot address the memory of GPU 10: cuMemSetAccess: peer access is not supported"
    )
    assert symmetric_memory.describe()[-1].startswith("GPU 2 cannot address GPU 0: cuMemSetAccess")
    there = types.SimpleNamespace(id=3, process_index=1)
    reason = symmetric_memory.unavailable_reason([*gpus, there])
    assert reason == "GPU 3 of process 1 belongs to another host than GPU 10 of process 0"


@needs_kernels
def test_programs_are_refused_where_gpus_that_share_no_memory_meet(machine, monkeypatch):
    """Programs must be refused if two GPUs along the ranks' axis share no memory."""
    machine(0, 1, 2, 3, no_access={(3, 1)})
    taken_for_gpus(monkeypatch)
    devices = np.empty((2, 2), object)
    # Devices 11 and 13 are neighbours along "a", in its second group.
    devices.flat = jax.devices()

    def reason(*axis_name: str) -> str | None:
        mesh = types.SimpleNamespace(size=4, axis_names=("a", "b"), shape={"a": 2, "b": 2})
        program = program_for_cuda(mesh=mesh, mesh_devices=devices)
        return availability.Lowered(program).unavailable_reason(axis_name)

    assert reason("b") is None
    refused = "it needs GPUs that share memory, and GPU 13 cannot address the memory of GPU 11: "
    for axis_name in (("a",), ("a", "b"), ("b", "a")):
        assert (reason(*axis_name) or "").startswith(refused)


@pytest.mark.parametrize("refuses", [None, "cuMemCreate"])
def test_processes_of_other_hosts_are_told(machine, monkeypatch, tmp_path, refuses):
    store = Store(str(tmp_path))
    monkeypatch.setattr(jax_compat, "distributed_client", lambda: store)
    monkeypatch.setenv("JAX_EP_TIMEOUT_SECONDS", "0.1")
    machine(0, 1, **({} if refuses is None else dict(refuses=refuses)))
    with pytest.raises(RuntimeError, match="process 0 has not said within 0.1 s"):
        symmetric_memory.unavailable_reason_of(0)
    found = symmetric_memory.domain()
    assert isinstance(found, str) == (refuses is not None)
    assert symmetric_memory.unavailable_reason_of(0) == (None if refuses is None else found)
    monkeypatch.setattr(jax_compat, "distributed_client", lambda: None)
    assert "only after jax.distributed.initialize()" in symmetric_memory.unavailable_reason_of(0)


@needs_kernels
def test_kernels_run_on_all_hosts_or_none(monkeypatch, tmp_path):
    """If the kernels cannot run on one host, no host may run them, or hosts would wait forever."""
    store = Store(str(tmp_path))
    monkeypatch.setattr(jax_compat, "distributed_client", lambda: store)
    taken_for_gpus(monkeypatch)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: None)
    devices = np.empty(4, object)
    devices[:] = [types.SimpleNamespace(process_index=i // 2, id=i) for i in range(4)]
    mesh = types.SimpleNamespace(size=4, axis_names=("a",), shape={"a": 4})
    program = program_for_cuda(mesh=mesh, mesh_devices=devices)
    processes.report(store, 1, "the driver gives none")
    reason = availability.Lowered(program).unavailable_reason(("a",), 2)
    assert reason == "it needs GPUs that share memory on every host, and the driver gives none"
    processes.report(store, 1, None)
    assert availability.Lowered(program).unavailable_reason(("a",), 2) is None


def test_a_pool_of_another_kind_serves_one_process(machine):
    library = machine(0, 1)
    for mapping in library.mappings:
        mapping.virtual = False
    assert [gpu.pool_bytes for gpu in symmetric_memory.domain().gpus] == [0, 0]
    assert "pool not allocated by the virtual-memory API" in symmetric_memory.describe()[1]


def test_kernels_that_overlap_are_refused(machine, monkeypatch):
    library = machine(0)
    flag = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
    monkeypatch.setenv("XLA_FLAGS", flag)
    assert "one at a time" in symmetric_memory.domain() and not library.calls


def test_other_platforms_are_refused(machine, monkeypatch):
    if jax.default_backend() != "gpu":
        assert symmetric_memory.domain() == "symmetric memory needs NVIDIA GPUs"
        assert symmetric_memory.describe() == ["none: symmetric memory needs NVIDIA GPUs"]
    symmetric_memory._domain.cache_clear()
    machine(0)
    monkeypatch.setattr(cuda_driver, "_libcuda", lambda: None)
    assert "there is no driver" in symmetric_memory.domain()


def test_an_array_has_an_address_while_a_program_is_traced():
    """An array's address must be found during tracing, under the user's mesh and transfer guard."""
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
def test_the_domain_of_this_machine():
    domain = symmetric_memory.domain()
    assert isinstance(domain, Domain)
    assert gpus_of_process(domain)[jax.process_index()] == len(jax.local_devices())
    assert symmetric_memory.unavailable_reason(jax.local_devices()) is None


@needs_kernels
@pytest.mark.needs_devices(2)
def test_programs_are_lowered_anew_for_other_devices(monkeypatch):
    """A program must be lowered anew for other devices, since kernels contain the GPUs' numbers."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lowered_for = []

    def note(lowered: availability.Lowered, *_: Any) -> None:
        lowered_for.append([device.id for device in lowered.program.mesh_devices.flat])

    monkeypatch.setattr(availability.Lowered, "unavailable_reason", note)
    monkeypatch.setattr(collectives_table, "lookup", lambda *_, **__: "xla")

    gather = collective("all_gather", None)
    program = jax.jit(jax.shard_map(gather, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    orders = [[0, 1], [1, 0], [0, 1]]
    for order in orders:
        mesh = Mesh(np.asarray(jax.devices())[order], (AXIS,))
        with jax.set_mesh(mesh):
            program(jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P(AXIS))))
    assert lowered_for == orders[:2]
