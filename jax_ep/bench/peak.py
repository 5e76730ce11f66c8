"""Knows the peak FLOP/s of GPUs."""

from __future__ import annotations

# Dense bfloat16 FLOP/s of a device, by the beginning of its name. NVIDIA's data sheets have twice
# these figures, with sparsity.
PEAK_BFLOAT16 = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Returns the bfloat16 FLOP/s of a device, by the longest name that fits; None if unknown."""
    fitting = [name for name in PEAK_BFLOAT16 if device_kind.startswith(name)]
    return PEAK_BFLOAT16[max(fitting, key=len)] if fitting else None
