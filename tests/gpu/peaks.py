"""The peak rates of GPUs in bfloat16, dense, by what torch calls them.

Data sheets often give twice as much, "with sparsity". Each rate has its source: NVIDIA's data sheet or whitepaper, of
which a copy or a quotation was read.
"""

from __future__ import annotations

import re

from hf_gpipe.planner.machines.devices import DEVICES

#: (a part of the device's name, 10^12 operations a second or the name of the planner's device); the first that fits.
#: GPUs for which no source was found, such as GH200 and H200 NVL, are left out.
_PEAKS: tuple[tuple[str, float | str], ...] = (
    # NVIDIA H200, nvidia.com/en-us/data-center/h200: 1,979 with sparsity (SXM).
    (r"\bH200(?! NVL)", "h200"),
    # NVIDIA H100, nvidia.com/en-us/data-center/h100: with sparsity 1,513 (PCIe), 1,671 (NVL), 1,979 (SXM).
    (r"\bH100 PCIe", 756),
    (r"\bH100 NVL", 835),
    (r"\bH100", "h100"),
    # NVIDIA A100 data sheet (nvidia-a100-datasheet-us-nvidia-1758950-r4): 312, SXM and PCIe.
    (r"\bA100", "a100-80"),
    # NVIDIA A40 data sheet: 149.7, with float32 accumulation.
    (r"\bA40\b", 149.7),
    # NVIDIA Ampere GA102 whitepaper (nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2): with float32 accumulation.
    (r"RTX A6000", "rtxa6000"),
    (r"RTX 3090(?! Ti)", "rtx3090"),
    # NVIDIA L40 and L40S data sheets (l40s-datasheet-28413): 181.05 and 362.05.
    (r"\bL40S", "l40s"),
    (r"\bL40\b", 181.05),
    # NVIDIA L4 data sheet: 242 with sparsity.
    (r"\bL4\b", "l4"),
    # NVIDIA Ada whitepaper (nvidia-ada-gpu-architecture): 165.2, with float32 accumulation.
    (r"RTX 4090(?! (D|Laptop))", "rtx4090"),
)


def peak_flops(name: str) -> float | None:
    """Operations a second of matrix products in bfloat16 with sums in float32; None for a device not in the table."""
    for pattern, peak in _PEAKS:
        if re.search(pattern, name):
            return DEVICES[peak].flops_for("bfloat16") if isinstance(peak, str) else peak * 1e12
    return None
