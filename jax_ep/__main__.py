"""Runs the command-line interface of jax_ep: `python -m jax_ep <command>`."""

from __future__ import annotations

import sys

from jax_ep.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
