"""The JAX that the kernels need, and the mark of the tests that need it."""

from __future__ import annotations

import jax
import pytest

KERNELS_RUN = jax.__version_info__ >= (0, 11)
WHY_NOT = f"the kernels need JAX 0.11 or newer, and this is {jax.__version__}"

needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason=WHY_NOT)
