"""What must be settled before JAX starts: the tests' devices, workers and memory."""

import os
import time
from pathlib import Path

import pytest
from support import processes

pytest.register_assert_rewrite("support.collectives", "support.contract")

# Eight virtual CPU devices where there is no GPU.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()

# The simulator's threads wait for each other in XLA's pool, which has a thread for each core or for
# each of NPROC: of a kernel on four ranks more wait than a small machine has.
os.environ.setdefault("NPROC", "32")

processes.take_share_of_gpus(os.environ)

MOST_WORKERS = 8


def there_are_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def pytest_configure(config: pytest.Config) -> None:
    """A run without slow tests, on CPUs, spends little on compiling: that is where its time goes.

    Of LLVM's passes JAX then asks for the cheapest. With `-m ''` tests compile as users' programs.
    """
    if config.option.markexpr == "not slow" and not there_are_gpus():
        processes.compile_fast(os.environ)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what there is no time or not enough devices for.

    No test begins after JAX_EP_TESTS_END, seconds of the epoch: CI has so much time.
    """
    if time.time() > float(os.environ.get("JAX_EP_TESTS_END", "inf")):
        pytest.skip("no time is left")
    if needed := max((mark.args[0] for mark in item.iter_markers("needs_devices")), default=0):
        import jax  # not before the tests' devices are settled

        if jax.device_count() < needed:
            pytest.skip(f"needs {needed} devices, this machine has {jax.device_count()}")


@pytest.hookimpl(optionalhook=True)  # there may be no pytest-xdist
def pytest_xdist_auto_num_workers() -> int | None:
    """The workers of `-n auto`: one for each core, up to `MOST_WORKERS`.

    Where there are GPUs, all tests run in one process: kernels of several ranks keep all GPUs busy
    while they wait for each other, so another process would only slow them down.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # pytest-xdist reads it
    if there_are_gpus():
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST_WORKERS) if cores > 1 else 0
