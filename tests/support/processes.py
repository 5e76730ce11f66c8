"""Programs that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]


def output_of_a_failure(program: str, beside: str, **environment: str) -> str:
    """What a program prints before it fails.

    The program may import `support`, and modules in the folder of the test file `beside`.
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(map(str, [Path(beside).parent, _TESTS, _TESTS.parent])),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # this process has memory of its own
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    return output
