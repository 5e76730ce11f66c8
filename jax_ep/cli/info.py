"""`python -m jax_ep info`: prints versions, devices and which implementations run on them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.bench import report
from jax_ep.exchange.primitives import IMPLEMENTATIONS, Problem
from jax_ep.flags import Args, Error, Flags
from jax_ep.matmul import backend, primitives
from jax_ep.runtime import assembler, availability, environment, jax_compat, symmetric_memory

# The grouped matmul of which `info` reports: [rows, K] x [groups, K, N] in bfloat16.
_ROWS, _GROUPS, _K, _N = 4096, 8, 2048, 768
# Compiles this matmul's kernel, but does not run it.
_SAMPLE = f"""
import functools, jax, jax.numpy as jnp, jax_ep
shapes = ({_ROWS}, {_K}), ({_GROUPS}, {_K}, {_N}), ({_GROUPS},)
dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32
product = functools.partial(jax_ep.grouped_matmul, implementation="pallas")
jax.jit(product).lower(*map(jax.ShapeDtypeStruct, shapes, dtypes)).compile()
"""


def add_flags(flags: Flags) -> None:
    flags.json()


def run(args: Args) -> int:
    facts = collect()
    report.save_json(args.json, facts)
    print(render(facts))
    return 0 if "exchange" in facts else 1


def collect() -> dict[str, dict[str, Any]]:
    """Collects what `info` prints, by section and name. A value is a text, or a list of lines."""
    versions = {name: version or "none" for name, version in environment.versions().items()}
    try:
        devices = jax_compat.devices()
    except RuntimeError as error:
        return {"versions": versions, "machine": {"devices": f"none: {error}"}}
    sections = {"machine": _machine(devices), "exchange": _exchange(devices)}
    return {"versions": versions, **sections, "matmuls": _matmuls()}


def render(facts: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section in facts.values():
        for name, value in section.items():
            for i, line in enumerate(value if isinstance(value, list) else [value]):
                lines.append(f"{'' if i else name:<15}{line}")
        lines.append("")
    return "\n".join(lines[:-1])


def _machine(devices: list[jax.Device]) -> dict[str, Any]:
    """Describes the machine; raises `Error` if JAX_EP_DEVICES_PER_HOST is no positive integer."""
    try:
        counts = Counter(environment.hosts_of(devices))
    except ValueError as error:
        raise Error(str(error)) from error
    on_hosts = f"{len(counts)} with {' + '.join(map(str, counts.values()))} devices"
    if None in counts:
        on_hosts = f"unknown: {environment.NO_HOSTS}"
    kinds = Counter(map(_describe, devices)).items()
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds)
    # Why this JAX cannot run kernels. "JAX lacks" lists optional names, and what they change.
    of_jax = availability.jax_unavailable_reason(), availability.mosaic_unavailable_reason()
    missing = "; ".join(filter(None, (*of_jax, jax_compat.devices_unavailable_reason())))
    return {
        "devices": f"{listed} on {jax.default_backend()}",
        "processes": jax.process_count(),
        "hosts": on_hosts,
        "shared memory": symmetric_memory.describe(),
        "kernels need": missing or "no name that this JAX lacks",
        "JAX lacks": jax_compat.optional_names_missing(),
    }


def _describe(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", None)
    return device.device_kind + (f" (compute capability {capability})" if capability else "")


def _exchange(devices: list[jax.Device]) -> dict[str, Any]:
    """Says which implementations of the exchange run on the devices, and which is the default."""
    problem = Problem(availability.Machine(devices))
    found: dict[str, Any] = {}
    # In the order in which implementation=None tries them; the last, "xla", runs everywhere.
    default, *slower = available = IMPLEMENTATIONS.available(problem)
    for each in IMPLEMENTATIONS:
        reason = each.unavailable_reason(problem)
        # A `Machine` does not say that devices are on several hosts.
        inside = (each.name, default) == ("pallas", "two_level")
        runs = "runs inside each host" if inside else "runs here"
        found[each.name] = runs if reason is None else f"does not run: {reason}"
    if "pallas" in available and (never := availability.never_run(devices)):
        compiles = f"pallas compiles, but has never run on compute capability {', '.join(never)}"
        found["pallas"] = [found["pallas"], compiles]
    if default == "two_level":
        default = f"two_level between hosts, {slower[0]} inside each"
    return found | {"default": f"{default} (implementation=None)"}


def _matmuls() -> dict[str, Any]:
    """Says which grouped matmul is the default, why others do not run, and how it is compiled."""
    platform = primitives.default_platform()
    problem = backend.Problem((_K, _N), jnp.bfloat16, platform, _ROWS)
    default = primitives.IMPLEMENTATIONS.select(None, problem).name
    reasons = {each.name: each.unavailable_reason(problem) for each in primitives.IMPLEMENTATIONS}
    lines = [f"{default} (implementation=None, bfloat16)"]
    lines += [f"{name} does not run: {why}" for name, why in reasons.items() if why is not None]
    if platform != "cuda":
        return {"matmuls": lines, "assembler": "none: JAX has no NVIDIA GPU here"}
    expected = f"{assembler.name()} {assembler.version() or 'of unknown version'}"
    if reasons["pallas"] is not None:
        used, sample = expected, f"none: {reasons['pallas']}"
    else:
        used, sample = _compile_sample(expected)
    return {"matmuls": lines, "assembler": used, "sample kernel": sample}


def _compile_sample(expected: str) -> tuple[str, str]:
    """Compiles the sample; describes the assembler, `expected` or another one, and the kernel."""
    succeeded, log = assembler.run_reporting(_SAMPLE)
    kernels = [each for each in assembler.reported(log) if "matmul" in each.name]
    if not succeeded or not kernels:
        (*_, why) = log.splitlines() or ["nothing is reported"]
        return expected, f"not compiled: {why}"
    used = expected
    if assembler.author(log) != assembler.name():
        used = f"{assembler.author(log)} (expected was {expected})"
    kernel = max(kernels, key=lambda each: each.spilled)
    spills = f"spills {kernel.spilled} bytes, so it is slow" if kernel.spilled else "spills none"
    serialized = ", its tensor cores wait: it is slow" if kernel.serialized else ""
    return used, f"{kernel.name}: {kernel.registers} registers, {spills}{serialized}"
