"""Reads values of tensors from devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Read tensors of any devices at once. The host waits for CUDA a single time.

    Args:
        parts: of any type and shape.

    Returns:
        Their values one after the other, on the CPU: a float64 tensor of one dimension.
    """
    device = next((part.device for part in parts if part.is_cuda), torch.device("cpu"))
    host = [part for part in parts if not part.is_cuda]
    if device.type == "cpu":
        return _joined(host)
    together = _joined([part.to(device, non_blocking=True) for part in parts if part.is_cuda])
    # A copy to memory that is not pinned would go through a buffer of the driver.
    arrived = torch.empty_like(together, device="cpu", pin_memory=True)
    arrived.copy_(together, non_blocking=True)
    torch.cuda.current_stream(device).synchronize()
    values = iter(arrived.split([part.numel() for part in parts if part.is_cuda]))
    return _joined([next(values) if part.is_cuda else part for part in parts])


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([part.detach().flatten().to(torch.float64) for part in parts])
