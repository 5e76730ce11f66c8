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


def test_all_workers_and_their_programs_fit_in_a_gpu(environment):
    environment["PYTEST_XDIST_WORKER_COUNT"] = "8"
    take_share_of_gpus(environment)
    used = float(environment[FRACTION]) + float(environment_of_program()[FRACTION])
    assert 0.75 <= 8 * used <= 0.81


def test_a_worker_with_gpus_of_its_own_has_all_their_memory(environment):
    environment["JAX_EP_TEST_GPUS"] = "2"
    environment["PYTEST_XDIST_WORKER_COUNT"] = "4"
    environment["PYTEST_XDIST_WORKER"] = "gw3"
    take_share_of_gpus(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert float(environment[FRACTION]) == processes.WORKERS_SHARE


def test_a_fraction_that_the_user_sets_stays(environment):
    """A memory fraction that the user sets, under the older name, must be the only one."""
    environment[OLD_FRACTION] = "0.5"
    take_share_of_gpus(environment)
    assert environment[OLD_FRACTION] == "0.5" and FRACTION not in environment
    assert FRACTION in environment_of_program() and OLD_FRACTION not in environment_of_program()


FLAG = "--xla_force_host_platform_device_count=8"


def test_a_program_compiles_as_a_users_unless_it_is_to_compile_fast(environment):
    environment.pop(COMPILES_FAST, None)
    environment["XLA_FLAGS"] = FLAG
    assert COMPILES_FAST not in environment_of_program(fast=True)
    compile_fast(environment, "0.10.2")
    alone, fast = environment_of_program(), environment_of_program(fast=True, XLA_FLAGS="")
    assert COMPILES_FAST not in alone and alone["XLA_FLAGS"] == FLAG
    assert fast[COMPILES_FAST] == "1" and FLAG not in fast["XLA_FLAGS"]


def test_what_there_is_no_time_for_is_skipped():
    """Tests after JAX_EP_TESTS_END must be skipped, and the summary must say why."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "test_flags.py"],
        cwd=Path(__file__).parents[1],
        env=environment_of_program(JAX_EP_TESTS_END=str(time.time() - 1)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "no time is left" in done.stdout, done.stdout
    assert "passed" not in done.stdout.splitlines()[-1]
