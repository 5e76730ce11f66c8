"""Lists the peak bfloat16 FLOP/s of GPUs, to report a share of the peak."""

from __future__ import annotations

# The peak dense bfloat16 FLOP/s of a device, by the beginning of its `device_kind`. NVIDIA's data
# sheets list figures with sparsity, which are twice as large.
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
    """Returns the peak dense bfloat16 FLOP/s of a device, or None if unknown.

    Uses the entry of PEAK_BFLOAT16 with the longest name that `device_kind` starts with.
    """
    fitting = [name for name in PEAK_BFLOAT16 if device_kind.startswith(name)]
    return PEAK_BFLOAT16[max(fitting, key=len)] if fitting else None
