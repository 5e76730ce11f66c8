"""Runs the tests of the exchange with each implementation that runs on this machine."""

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "implementation" in metafunc.fixturenames:
        # Import JAX only here: if pytest is given files of this folder, it loads this module before
        # tests/conftest.py settles the devices and their memory.
        from support.contract import implementations

        metafunc.parametrize("implementation", implementations())
