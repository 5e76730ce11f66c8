"""Tests how the processes of a test run share GPUs, and how programs compile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from support import processes
from support.processes import (
    COMPILES_FAST,
    compile_fast,
    environment_of_program,
    take_share_of_gpus,
)

FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture
def environment():
    """Yields `os.environ` as it was before the tests; a test may change it."""
    with mock.patch.dict(os.environ):
        for name in (FRACTION, OLD_FRACTION, "JAX_EP_TEST_GPUS", "PYTEST_XDIST_WORKER_COUNT"):
            os.environ.pop(name, None)
        yield os.environ


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_all_workers_and_their_programs_fit_in_a_gpu(num_workers, environment):
    environment["PYTEST_XDIST_WORKER_COUNT"] = str(num_workers)
    take_share_of_gpus(environment)
    used = float(environment[FRACTION]) + float(environment_of_program()[FRACTION])
    assert 0.75 <= num_workers * used <= 0.81
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in environment_of_program()


def test_a_worker_with_gpus_of_its_own_has_all_their_memory(environment):
    environment["JAX_EP_TEST_GPUS"] = "2"
    environment["PYTEST_XDIST_WORKER_COUNT"] = "4"
    environment["PYTEST_XDIST_WORKER"] = "gw3"
    take_share_of_gpus(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert float(environment[FRACTION]) == processes.WORKERS_SHARE


@pytest.mark.parametrize("name", [FRACTION, OLD_FRACTION])
def test_a_fraction_that_the_user_sets_stays(name, environment):
    """A memory fraction that the user sets, under either name, must be the only one."""
    environment[name] = "0.5"
    take_share_of_gpus(environment)
    names = {FRACTION, OLD_FRACTION}
    assert environment[name] == "0.5" and len(names & set(environment)) == 1
    assert names & set(environment_of_program()) == {FRACTION}


FLAG = "--xla_force_host_platform_device_count=8"


def test_a_program_compiles_as_a_users_unless_it_is_to_compile_fast(environment):
    environment.pop(COMPILES_FAST, None)
    environment["XLA_FLAGS"] = FLAG
    assert COMPILES_FAST not in environment_of_program(fast=True)
    compile_fast(environment, "0.10.2")
    alone, fast = environment_of_program(), environment_of_program(fast=True, XLA_FLAGS="")
    assert COMPILES_FAST not in alone and alone["XLA_FLAGS"] == FLAG
    assert fast[COMPILES_FAST] == "1" and FLAG not in fast["XLA_FLAGS"]


def run_tests(*arguments: str, **environment: str) -> str:
    """Runs tests/test_flags.py in a process of its own; returns what pytest printed."""
    command = [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        [*command, "test_flags.py"],
        cwd=Path(__file__).parents[1],
        env=environment_of_program(**environment),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_what_there_is_no_time_for_is_skipped():
    """Tests after JAX_EP_TESTS_END must be skipped, and the summary must say why."""
    printed = run_tests(JAX_EP_TESTS_END=str(time.time() - 1))
    assert "no time is left" in printed
    assert "passed" not in printed.splitlines()[-1]
