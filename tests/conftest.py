"""Which devices the tests see; must run before JAX starts a backend.

Eight virtual CPU devices where there is no GPU. Where there are, JAX_EP_TEST_GPUS=n gives each
worker of pytest-xdist its own n of them.
"""

import os

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()

_gpus = int(os.environ.get("JAX_EP_TEST_GPUS", 0))
if _gpus:
    _worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    _first = _worker * _gpus
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(_first + i) for i in range(_gpus))
