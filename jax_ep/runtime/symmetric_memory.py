"""The memory that LL writes messages to: a region of every GPU of this process, mapped once.

Programs know it by its addresses. So that they don't differ from one process to the next, and with
them what a compilation cache knows a program by, all of it is in one range of addresses, at a place
that is asked for and, as a rule, had.
"""

from __future__ import annotations

import functools
import os
import re
import threading

import jax

from jax_ep.runtime import cuda_driver
from pallas_kernels.fabric import low_latency as ll
from pallas_kernels.fabric.sentinel_words import EMPTY, SLOT_BYTES, Regions

_ADDRESS = 0x2A00_0000_0000  # of the first region, if the driver has no other use for it
_STRIDE = 1 << 30  # more than any region

# XLA's default is to run the kernels of a program one after the other.
_CONCURRENT = re.compile(r"xla_gpu_command_buffer_scheduling_mode=.?concurrent")

_lock = threading.Lock()


def elsewhere(num_devices: int) -> Regions:
    """Where the regions would be on a machine that is not here."""
    return _regions(_ADDRESS, num_devices)


def here() -> Regions | str:
    """Where those of this process are, mapped by the first call; or why there are none."""
    with _lock:
        return _here()


def region_bytes(num_devices: int) -> int:
    """What each GPU gives for as long as the process lives, once one of its programs uses LL."""
    return 4 * ll.NUM_COUNTERS + SLOT_BYTES * ll.num_slots(num_devices)


@functools.cache
def _here() -> Regions | str:
    if _CONCURRENT.search(os.environ.get("XLA_FLAGS", "").lower()):
        return "LL needs its calls one at a time, and XLA_FLAGS let the calls of a program overlap"
    ordinals = [device.local_hardware_id for device in jax.local_devices()]
    count = len(ordinals)
    if count > ll.MAX_DEVICES:
        return f"LL is for up to {ll.MAX_DEVICES} GPUs, and there are {count}"
    if sorted(ordinals) != list(range(count)):
        return f"LL needs all GPUs that the driver shows from the first on, and JAX has {ordinals}"
    try:
        base = cuda_driver.map_shared(count, region_bytes(count), stride=_STRIDE, address=_ADDRESS)
        for ordinal in ordinals:
            counters = base + ordinal * _STRIDE
            slots = counters + 4 * ll.NUM_COUNTERS
            cuda_driver.fill(ordinal, counters, 0, 4 * ll.NUM_COUNTERS)
            cuda_driver.fill(ordinal, slots, EMPTY, SLOT_BYTES * ll.num_slots(count))
    except cuda_driver.Error as error:
        return f"the CUDA driver gives no memory that all GPUs can write to: {error}"
    return _regions(base, count)


def _regions(base: int, num_devices: int) -> Regions:
    return Regions(base, _STRIDE, num_devices, ll.NUM_COUNTERS, ll.num_slots(num_devices))
