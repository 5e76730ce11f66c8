"""`python -m jax_ep info`: prints versions, devices and which implementations run on them.

A bug report should include this output.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax

from jax_ep.bench import measuring
from jax_ep.exchange.selection import IMPLEMENTATIONS, Problem
from jax_ep.flags import Error, Flags
from jax_ep.runtime import availability, cuda_driver, hosts, jax_compat, symmetric_memory
from jax_ep.runtime.versions import versions

FLAGS = Flags()
_JSON = FLAGS.json()


def run() -> int:
    FLAGS.check_outputs()
    facts = collect()
    # The file is written first: printing fails if a pipe's reader, such as `head`, has ended.
    if _JSON.value:
        measuring.save_json(_JSON.value, facts)
    print(render(facts))
    return 0 if facts["backend_error"] is None else 1


def collect() -> dict[str, Any]:
    """Collects everything that `info` prints, as a dict of JSON-serializable values.

    "backend_error" is the reason why JAX finds no device, or None if it finds one. After an error,
    "versions" is the only other key. Raises `Error` if JAX_EP_DEVICES_PER_HOST is set to something
    other than a number of devices.
    """
    try:
        devices = jax_compat.devices()
    except RuntimeError as error:
        return {"versions": versions(), "backend_error": str(error)}
    problem = Problem(availability.Machine(devices))
    try:
        host_of_device = hosts.hosts_of(devices)
    except ValueError as error:
        raise Error(str(error)) from error
    return {
        "versions": versions(),
        "backend_error": None,
        "backend": jax.default_backend(),
        "processes": jax.process_count(),
        "devices": [
            {
                "id": device.id,
                "kind": device.device_kind,
                "process": device.process_index,
                "compute_capability": getattr(device, "compute_capability", None),
            }
            for device in devices
        ],
        "hosts": [None if host is None else str(host) for host in host_of_device],
        "peer_access": _peer_access(devices),
        "symmetric_memory": symmetric_memory.describe(),
        "names_missing": _names_missing(),
        "optional_names_missing": jax_compat.optional_names_missing(),
        "unavailable": {each.name: each.unavailable_reason(problem) for each in IMPLEMENTATIONS},
    }


def render(facts: dict[str, Any]) -> str:
    lines = [f"{name:<15}{value or 'none'}" for name, value in facts["versions"].items()]

    if facts["backend_error"] is not None:
        lines += ["", f"{'devices':<15}none: {facts['backend_error']}"]
        return "\n".join(lines)

    devices = facts["devices"]
    kinds = Counter(_describe(device) for device in devices)
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    lines += ["", f"{'devices':<15}{listed} on {facts['backend']}"]
    lines.append(f"{'processes':<15}{facts['processes']}")
    lines.append(f"{'hosts':<15}{_render_hosts(facts['hosts'])}")
    lines.append(f"{'peer access':<15}{_render_peers(facts)}")
    for i, line in enumerate(facts["symmetric_memory"]):
        lines.append(f"{'' if i else 'shared memory':<15}{line}")

    missing = facts["names_missing"]
    lines.append(f"{'kernels need':<15}{missing or 'no name that this JAX lacks'}")

    for i, line in enumerate(facts["optional_names_missing"]):
        lines.append(f"{'' if i else 'JAX lacks':<15}{line}")

    reasons = facts["unavailable"]
    lines.append("")
    for name, reason in reasons.items():
        lines.append(f"{name:<15}{'runs here' if reason is None else 'does not run: ' + reason}")
    default, *others = [name for name, reason in reasons.items() if reason is None]
    if default == "two_level":
        default = f"two_level between hosts, {others[0]} inside each"
    lines.append(f"{'default':<15}{default} (implementation=None)")
    return "\n".join(lines)


def _names_missing() -> str | None:
    """Names what the kernels need and this JAX lacks; returns None if it lacks nothing."""
    reasons = [
        availability.jax_unavailable_reason(),
        availability.mosaic_unavailable_reason(),
        jax_compat.devices_unavailable_reason(),
    ]
    return "; ".join(reason for reason in reasons if reason) or None


def _peer_access(devices: list[jax.Device]) -> tuple[tuple[bool, ...], ...] | None:
    local = [d for d in devices if d.process_index == jax.process_index()]
    if len(local) < 2 or local[0].platform != "gpu":
        return None
    return cuda_driver.peer_access([d.local_hardware_id for d in local])


def _render_hosts(host_of_device: list[str | None]) -> str:
    if None in host_of_device:
        return "unknown: JAX does not say which devices share a host; set JAX_EP_DEVICES_PER_HOST"
    counts = Counter(host_of_device)
    listed = " + ".join(str(count) for count in counts.values())
    return f"{len(counts)} with {listed} devices"


def _describe(device: dict[str, Any]) -> str:
    capability = device["compute_capability"]
    return device["kind"] + (f" (compute capability {capability})" if capability else "")


def _render_peers(facts: dict[str, Any]) -> str:
    peers = facts["peer_access"]
    if peers is None:
        if facts["backend"] == "gpu" and len(facts["devices"]) > 1:
            return "unknown: the driver does not say"
        return "not applicable: asked of two GPUs of one process"
    missing = [f"{i}->{j}" for i, row in enumerate(peers) for j, can in enumerate(row) if not can]
    return f"missing between GPUs {', '.join(missing)}" if missing else "between all GPUs"
