"""The peak rates of GPUs in bfloat16, dense, from their makers' data sheets, by what torch calls them."""

from __future__ import annotations

import re

from hf_gpipe.planner.devices import DEVICES

#: (a part of the device's name, 10^12 operations a second or the name of the planner's device); the first that fits.
_PEAKS: tuple[tuple[str, float | str], ...] = (
    (r"H200|GH200", "h200"),
    (r"H100 PCIe", 756),
    (r"H100 NVL", 835),
    (r"H100", "h100"),
    (r"A100", "a100-80"),
    (r"A40\b", 149.7),
    (r"RTX A6000", 154.8),
    (r"L40S", 362),
    (r"L40\b", 181),
    (r"L4\b", "l4"),
    (r"RTX 4090", "rtx4090"),
    (r"RTX 3090(?! Ti)", "rtx3090"),
)


def peak_flops(name: str) -> float | None:
    """Operations a second of matrix products in bfloat16 with sums in float32; None for a device not in the table."""
    for pattern, peak in _PEAKS:
        if re.search(pattern, name):
            return DEVICES[peak].flops_for("bfloat16") if isinstance(peak, str) else peak * 1e12
    return None
