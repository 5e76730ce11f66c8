"""Settles the tests' devices, workers and GPU memory, before JAX starts."""

import os
import time
from pathlib import Path

import pytest
from support import processes

pytest.register_assert_rewrite(
    "support.collectives", "support.contract", "support.kernels", "support.stacked"
)

# Without GPUs, tests run on eight virtual CPU devices.
_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()

# The simulator's threads wait for each other in XLA's thread pool, whose size is NPROC or the
# number of cores. A kernel on four ranks has more waiting threads than a small machine has cores.
os.environ.setdefault("NPROC", "32")

MOST_WORKERS = 8
# The programs of all tests would take 4 GB in each worker.
_MOST_BYTES_KEPT = 1.2e9


def there_are_gpus() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def pytest_configure(config: pytest.Config) -> None:
    """Takes a share of the GPUs; makes runs on CPUs compile little, and without slow tests fast.

    Compiling takes most of their time. LLVM then runs only its cheapest passes. With `-m ''`, tests
    compile as users' programs do, unless JAX_DISABLE_MOST_OPTIMIZATIONS is set, as CI does. What
    one test compiled, no other test of this or a later run compiles; `--cache-clear` removes it.
    """
    # The process that distributes tests runs none. Its workers inherit its environment, in which
    # the share of one process would look like a share that the user has set.
    if "PYTEST_XDIST_WORKER" in os.environ or config.getoption("dist", "no") == "no":
        processes.take_share_of_gpus(os.environ)
    if there_are_gpus():
        return
    if config.option.markexpr == "not slow":
        processes.compile_fast(os.environ)
    if hasattr(config, "cache"):
        processes.keep_compiled(os.environ, config.cache.mkdir("compiled"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that needs more devices than there are, or begins too late.

    No test begins after JAX_EP_TESTS_END, in seconds since the epoch; CI sets it as its time limit.
    """
    if time.time() > float(os.environ.get("JAX_EP_TESTS_END", "inf")):
        pytest.skip("no time is left")
    if needed := max((mark.args[0] for mark in item.iter_markers("needs_devices")), default=0):
        # Import JAX only here: conftest.py must set up the devices first.
        import jax

        if jax.device_count() < needed:
            pytest.skip(f"needs {needed} devices, this machine has {jax.device_count()}")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees the compiled programs after a file's last test, if the process has grown large."""
    resident = Path("/proc/self/statm")
    if (nextitem is not None and nextitem.path == item.path) or not resident.exists():
        return
    if int(resident.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > _MOST_BYTES_KEPT:
        import jax

        jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with test number JAX_EP_TESTS_FIRST, modulo their number, then runs the others.

    CI, which may not have time for all tests, begins with another one for each commit. Raises an
    error if a module's data is on a device: workers that only collect would need GPU memory.
    """
    import jax

    if arrays := jax.live_arrays():
        shapes = sorted({str(array.aval) for array in arrays})
        raise pytest.UsageError(f"test modules make JAX arrays when they are imported: {shapes}")
    first = int(os.environ.get("JAX_EP_TESTS_FIRST", "0")) % max(len(items), 1)
    items[:] = items[first:] + items[:first]


# The hook is optional, since pytest-xdist may not be installed.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Returns the number of workers for `-n auto`: one for each core, up to `MOST_WORKERS`.

    With GPUs, all tests run in one process. A kernel of several ranks keeps all GPUs busy while its
    ranks wait for each other, so a second process would only slow it down.
    """
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        # Returning None lets pytest-xdist read this variable itself.
        return None
    if there_are_gpus():
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, MOST_WORKERS) if cores > 1 else 0


@pytest.fixture
def exact_matmuls():
    """Sets exact float32 matmuls, since GPUs round float32 operands to fewer bits by default."""
    import jax

    with jax.default_matmul_precision("float32"):
        yield


@pytest.fixture
def strict_promotion():
    """Lets JAX refuse operands of other dtypes or ranks, as users may."""
    import jax

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
