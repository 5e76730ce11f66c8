"""Tests of how the device times of timed loops follow from a profile."""

from __future__ import annotations

import jax
import pytest

from jax_ep.bench import timing

TRACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "put" } }
  event_metadata { key: 2 value { id: 2 name: "Memset" } }
  lines {
    name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 10000000 }
    events { metadata_id: 1 offset_ps: 20000000 duration_ps: 14000000 }
  }
  lines {
    name: "Stream #14(MemcpyD2D)"
    events { metadata_id: 2 offset_ps: 15000000 duration_ps: 2000000 }
  }
  lines {
    name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 34000000 }
  }
}
planes { name: "/device:GPU:1" }
planes { name: "/host:CPU" lines { name: "Stream" events { duration_ps: 5 } } }
"""


def test_a_trace_is_read_by_device_and_stream():
    profile = jax.profiler.ProfileData.from_text_proto(TRACE)
    (launches,) = timing.launches_by_device(profile)
    assert launches == [("put", 10.0), ("Memset", 2.0), ("put", 14.0)]
    time = timing.summarize([launches], calls=2)
    # In two calls, "put" took 10 and 14 microseconds, so 12 per call. The one memset took 2, so 1.
    assert time.median_us == time.slowest_us == pytest.approx(13.0)
    assert time.by_kernel_us == {"put": 12.0, "Memset": 1.0}


def test_the_slowest_rank_is_the_one_with_the_largest_median():
    fast, slow = [("put", 1.0), ("put", 2.0), ("put", 3.0)], [("put", 2.0), ("put", 9.0)] * 3
    time = timing.summarize([fast, slow], calls=3)
    # On the slow rank, a call has two launches of "put", of 2 and 9 microseconds.
    assert time.slowest_us == 11.0
    assert time.median_us == pytest.approx((3.0 + 11.0) / 2)
    assert time.by_kernel_us == {"put": (2.0 + 11.0) / 2}


def test_what_this_machine_can_measure():
    found = timing.measure_bandwidths(jax.devices())
    if jax.default_backend() != "gpu":
        assert found == (None, None)
    else:
        assert found.memory > 1e11
        assert (found.link is None) == (len(jax.devices()) == 1)
