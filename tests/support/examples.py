"""Example programs as modules."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples"


@functools.cache  # a program's flags may be defined once
def example(name: str) -> Any:
    """Imports an example as its neighbours do."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
