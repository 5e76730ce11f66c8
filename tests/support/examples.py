"""Imports the example programs as modules."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples"


@functools.cache
def example(name: str) -> Any:
    """Imports an example by its module name."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)
