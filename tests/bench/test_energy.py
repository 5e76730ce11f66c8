"""Tests of `jax_ep.bench.energy`, with a fake of NVIDIA's management library."""

from __future__ import annotations

import types

import pytest

from jax_ep.bench import energy, report, runner
from jax_ep.runtime import cuda_driver


class FakeLibrary:
    """A library with two GPUs of 100 and 300 watts, whose time is that of a fake clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.status = 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus, handle):
        handle._obj.value = int(bus.decode()[-1]) + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, value):
        # GPU 0 uses 100 W and GPU 1 uses 300 W, in millijoules since some earlier time.
        value._obj.value = round({1: 100e3, 2: 300e3}[handle.value] * self.now) + 12345
        return self.status

    def nvmlDeviceGetClockInfo(self, handle, kind, value):
        assert kind.value == 1, "the clock of the multiprocessors"
        value._obj.value = {1: 1980, 2: 1410}[handle.value]
        return 0


class FakeLoop:
    """A loop of 5 iterations of 10 ms on two GPUs."""

    iterations = 5

    def __init__(self, library: FakeLibrary, platform: str = "gpu"):
        self.library = library
        gpus = [types.SimpleNamespace(platform=platform, local_hardware_id=i) for i in range(2)]
        self.mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=gpus))

    def run(self) -> float:
        self.library.now += 0.05
        return 1e4


@pytest.fixture
def library(monkeypatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(energy, "_nvml", lambda: fake)
    monkeypatch.setattr(energy.time, "monotonic", lambda: fake.now)
    monkeypatch.setattr(cuda_driver, "pci_bus_id", lambda ordinal: f"0000:00:00.{ordinal}")
    return fake


def test_the_energy_of_an_iteration_and_the_power_of_a_gpu(library):
    found = energy.measure(FakeLoop(library))
    # Both GPUs together use 400 W, in 10 ms 4 J.
    assert found["millijoules"] == pytest.approx(4000)
    assert found["watts"] == pytest.approx(200)
    assert found["megahertz"] == (1980 + 1410) / 2
    assert library.now >= energy.LEAST_SECONDS


def test_a_row_has_the_energy_or_says_why_not(library):
    row = runner.energy_used(FakeLoop(library))
    cells = [column.cell(row) for column in report.WALL]
    assert cells[2:] == ["4000.00", "200", "1695"]
    library.status = 3
    row = runner.energy_used(FakeLoop(library))
    assert row == {"energy_error": "nvmlDeviceGetTotalEnergyConsumption failed with status 3"}
    row |= {"wall": {"low_us": 1.0, "high_us": 2.0}}
    (_, line) = report.notes([row], lambda row: "row")
    assert line.startswith("no energy: nvmlDeviceGetTotalEnergyConsumption failed")


def test_cpus_have_no_energy(library):
    row = runner.energy_used(FakeLoop(library, "cpu"))
    assert row == {"energy_error": "energy is measured on GPUs only, and the devices here are cpu"}


def test_a_machine_without_the_library_says_so(monkeypatch):
    energy._nvml.cache_clear()

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(energy.ctypes, "CDLL", missing)
    try:
        reason = energy.unavailable_reason(FakeLoop(FakeLibrary()).mesh.devices.flat)
        assert "libnvidia-ml.so.1 is not installed" in reason
    finally:
        energy._nvml.cache_clear()
