"""Tests of symmetric memory between real processes and sockets, with a fake driver's memory."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import threading
from pathlib import Path

import jax
import pytest
from support.domain_processes import (
    INTRODUCE,
    Clock,
    Outcome,
    Process,
    Processes,
    Store,
    gpus_of_process,
    sockets,
)
from support.processes import HANG_SECONDS, outputs_of_processes

from jax_ep.runtime import processes
from jax_ep.runtime.symmetric_memory import Domain
from pallas_kernels.fabric import memory_map


@pytest.fixture(scope="module")
def run():
    started = Processes()
    yield started.run
    started.close()


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("d")


def reasons(outcomes: list[Outcome | None], folder: Path) -> list[str]:
    """Returns the reasons of the processes that still run; all must refuse."""
    found = []
    for outcome in outcomes:
        if outcome is not None:
            assert isinstance(outcome.domain, str), outcome.domain
            assert not outcome.left
            found.append(outcome.domain)
    assert not sockets(folder)
    return found


def shared(outcomes: list[Outcome | None], folder: Path) -> Domain:
    """Returns the domain that all processes have set up and written into."""
    domains = []
    for number, outcome in enumerate(outcomes):
        assert outcome is not None and isinstance(outcome.domain, Domain), outcome
        assert not outcome.left
        domain = outcome.domain
        domains.append(domain)
        own = [gpu.number for gpu in domain.gpus if gpu.process == number]
        assert sorted(outcome.received) == own
        denied = {(one, other) for one, other, _ in domain.no_access}
        for g, (heap, array) in outcome.received.items():
            for one in range(domain.num_gpus):
                if (one, g) not in denied:
                    assert heap[one] == array[one] == 100 * one + g
    assert all(domain == domains[0] for domain in domains)
    assert not sockets(folder)
    return domains[0]


@pytest.mark.parametrize("visible", [[[0, 1, 2]], [[3, 1], [0, 2]], [[0, 1], [2], [3, 4]]], ids=str)
def test_processes_write_to_each_others_heaps_and_arrays(visible, run, folder):
    domain = shared(run([Process(gpus) for gpus in visible], folder), folder)
    assert domain.base == memory_map.BASE
    physical = [gpu for process in visible for gpu in process]
    assert [gpu.bus_id for gpu in domain.gpus] == [
        f"0000:{0x10 + gpu:02x}:00.0" for gpu in sorted(physical)
    ]
    for number, gpus in enumerate(visible):
        for ordinal, gpu in enumerate(gpus):
            assert domain.numbers[10 * number + ordinal] == gpu
    assert gpus_of_process(domain) == {p: len(gpus) for p, gpus in enumerate(visible)}


def test_a_pair_without_peer_access_is_known_to_all(run, folder):
    members = [Process([0]), Process([1], driver={"no_access": {(1, 2)}}), Process([2])]
    domain = shared(run(members, folder), folder)
    assert [pair[:2] for pair in domain.no_access] == [(1, 2)]
    assert "peer access is not supported" in domain.no_access[0][2]


def test_each_host_has_a_domain_of_its_own(run, folder):
    there = {"processes.host_id": "there"}
    members = [Process([0]), Process([0], answers=there), Process([1]), Process([1], answers=there)]
    outcomes = run(members, folder)
    for here in ([0, 2], [1, 3]):
        domains = [outcomes[p].domain for p in here]
        assert domains[0] == domains[1] and list(gpus_of_process(domains[0])) == here
        assert domains[0].numbers == {10 * p: g for g, p in enumerate(here)}
    assert not sockets(folder)


# What is special about a process with GPU 1, and why it and another process share no memory.
CANNOT_SHARE = [
    ({"participant": {"jax_ep_version": "2"}}, "process 0 has jax_ep 1, and process 1 jax_ep 2"),
    ({"answers": {"os.getuid": 4711}}, "process 1 user 4711"),
    ({"gpus": [0, 1]}, "GPU 0000:10:00.0 belongs to process 0 and to process 1"),
    ({"gpus": range(1, 17)}, "at most 16 GPUs of a host can share memory, and this host has 17"),
    (
        {"driver": {"taken": range(memory_map.BASE, memory_map.BASE + 1)}},
        "the addresses from 0x2a0000000000 on are taken",
    ),
    ({"pool": {"virtual": False}}, "GPU 1 was not allocated by the virtual"),
    ({"pool": {"exportable": False}}, "GPU 1 was not made for sharing"),
    ({"memory_limit": None}, "GPU 1 may grow, from 1048576 bytes to any size"),
    ({"memory_limit": 2**30}, "GPU 1 may grow, from 1048576 bytes to 1073741824"),
]
REFUSED_CALLS = {
    "cuDeviceGetUuid_v2": "the GPUs of process 1 have no names",
    "cuMemCreate": "process 1 has no memory to share",
    "cuMemExportToShareableHandle": "process 1 has no memory to share",
    "cuMemImportFromShareableHandle": "process 1 cannot map the memory of GPU 0, of process 0",
}
CANNOT_SHARE += [
    ({"driver": {"refuses": call}}, f"{reason}: {call}") for call, reason in REFUSED_CALLS.items()
]


@pytest.mark.parametrize(("special", "reason"), CANNOT_SHARE)
def test_a_process_that_cannot_share_is_named_in_all(special, reason, run, folder):
    outcomes = run([Process([0]), Process(**{"gpus": [1], **special})], folder)
    found = reasons(outcomes, folder)
    assert len(found) == 2 and found[0] == found[1] and reason in found[0]


@pytest.mark.parametrize(
    "moment",
    [
        INTRODUCE,
        "processes.Meeting.exchange",
        "processes.Meeting._tell",
        "processes.Meeting._accept",
        "processes.Meeting._receive",
        "symmetric_memory._Sharing.accept",
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_is_named_in_all(moment, victim, run, folder):
    members = [Process([g], dies_in=moment if g == victim else "") for g in range(3)]
    outcomes = run(members, folder)
    assert outcomes[victim] is None
    named = reasons(outcomes, folder)
    # Processes that know of the victim see at once that it has ended; the others wait in vain.
    waits = moment == INTRODUCE
    reason = f"process {victim} has not begun" if waits else f"process {victim} ended"
    assert len(named) == 2 and all(reason in found for found in named), named
    waited = [outcome.waited_s for outcome in outcomes if outcome is not None]
    assert waited == [HANG_SECONDS if waits else 0] * 2


def test_nobody_waits_for_less_than_the_timeout():
    """The key-value service counts whole milliseconds, of which a timeout may be no multiple."""
    waited = []

    class Silent:
        def blocking_key_value_get(self, key, timeout_in_ms):
            waited.append(timeout_in_ms)
            raise RuntimeError("DEADLINE_EXCEEDED")

    with pytest.raises(RuntimeError, match=r"within 0\.0015 s"):
        processes.reported(Silent(), 1, 0.0015)
    assert waited == [2]


def test_a_late_process_and_the_others_refuse(run, folder):
    outcomes = run([Process([0]), Process([1]), Process([2], after=[0, 1])], folder)
    first, second, late = reasons(outcomes, folder)
    for reason in (first, second):
        assert f"process 2 has not begun to share memory within {HANG_SECONDS} s" in reason
    assert "process 0 ended, or had given up" in late


def test_who_began_first_waits_for_those_it_has_told(folder, monkeypatch):
    """The process that began first must wait for processes that began shortly before its timeout.

    The timeout of each process runs from its own beginning, so the later process may end after the
    first one's timeout. Here process 0 begins at 0 s, process 1 at 1500, and it is ready after
    2500, later than the 2000 s of process 0.
    """
    clock, found = Clock(), {}
    monkeypatch.setattr(processes, "time", clock)
    began, waits, left = threading.Event(), threading.Event(), []
    exchanged = threading.Barrier(2, action=lambda: setattr(clock, "now", 2500.0))

    def take_part(number: int) -> None:
        with processes.Meeting(Store(str(folder)), number, 2000.0) as meeting:
            began.set()
            meeting.exchange(meeting.introduce({"host": "here"}, range(2)), {})
            exchanged.wait(HANG_SECONDS)
            if number == 1:
                # A real process now maps the memory whose handles the other one has sent.
                waits.wait(HANG_SECONDS)
            else:
                receive = meeting._receive

                def watched(*args):
                    left.append(meeting._left())
                    waits.set()
                    return receive(*args)

                monkeypatch.setattr(meeting, "_receive", watched)
            found[number] = sorted(meeting.agree({"maps": number}))

    threads = [threading.Thread(target=take_part, args=(i,)) for i in range(2)]
    threads[0].start()
    assert began.wait(HANG_SECONDS)
    clock.now = 1500.0
    threads[1].start()
    for thread in threads:
        thread.join()
    assert found == {0: [0, 1], 1: [0, 1]} and left == [2000.0]


def test_a_socket_of_another_user_is_not_written_to(run, folder):
    outcomes = run([Process([0], answers={"processes.peer_uid": 4711}), Process([1])], folder)
    first, second = reasons(outcomes, folder)
    assert first == "the socket of process 1 belongs to user 4711"
    assert second.startswith("process 0 ended, or had given up")


@pytest.mark.parametrize(
    ("number", "uid", "taken"), [(1, 0, True), (1, 4711, False), (2, 0, False), (None, 0, False)]
)
def test_strangers_are_not_taken_for_processes(number, uid, taken, folder, monkeypatch):
    """Callers must be ignored: another user, a process that is not awaited, a silent one."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(processes, "peer_uid", lambda _: os.getuid() + uid)
    with (
        processes.Meeting(Store(str(folder)), 0, 20.0) as meeting,
        socket.socket(socket.AF_UNIX) as caller,
    ):
        path = meeting.introduce({}, [])[0]["socket"]
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
        caller.connect(path)
        if number is not None:
            caller.sendall(number.to_bytes(4, "little"))
        caller.shutdown(socket.SHUT_WR)
        meeting._accept_one([1])
        assert list(meeting._from) == [1] * taken
    assert not sockets(folder)


def test_no_service_is_a_reason(run, folder):
    outcomes = run([Process([0], participant={"store": None})], folder)
    # A single process needs no key-value service.
    shared(outcomes, folder)
    lonely = Process([0], participant={"store": None, "others": [1]})
    assert reasons(run([lonely], folder), folder) == [
        "several processes share memory only after jax.distributed.initialize(), in a JAX that has "
        f"jax._src.distributed.global_state.client; this is {jax.__version__}"
    ]


DISTRIBUTED = """
import pickle, sys, tempfile
from pathlib import Path
import jax
from support.domain_processes import Process, set_up
from support.fake_cuda import FakeCuda
from jax_ep.runtime import cuda_driver, jax_compat

address, number, tempfile.tempdir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
assert jax_compat.distributed_client() is None
jax.distributed.initialize(address, num_processes=2, process_id=number)
members = [Process([1, 2]), Process([0])]
library = FakeCuda(members[number].gpus)
cuda_driver._libcuda = lambda: library
outcome = set_up(number, members, jax_compat.distributed_client(), library)
outcome.left.clear()  # what is of jax.distributed
Path(sys.argv[4], str(number)).write_bytes(pickle.dumps(outcome))
"""


def test_processes_meet_through_jax_distributed(folder, tmp_path):
    outputs_of_processes(DISTRIBUTED, str(folder), str(tmp_path))
    outcomes = [pickle.loads((tmp_path / str(number)).read_bytes()) for number in range(2)]
    assert shared(outcomes, folder).numbers == {10: 0, 0: 1, 1: 2}
