"""The norm of the gradient of a model whose parameters lie in several processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hf_gpipe.runtime.processes import Processes


def gradient_norm(parameters: Iterable[torch.nn.Parameter], processes: Processes) -> torch.Tensor:
    """The 2-norm over all processes, a float64 tensor, the same on each. Every process must call it."""
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            norm = _norm(parameter.grad)
            norms.setdefault(norm.device, []).append(norm)
    squares = sum(
        (torch.stack(ones).square().sum().cpu() for ones in norms.values()), torch.zeros((), dtype=torch.float64)
    )
    # Summed in a fixed order, so that every process gets the same norm.
    parts = torch.zeros(processes.num_processes, dtype=torch.float64)
    parts[processes.rank] = squares
    return processes.all_reduce(parts).sum().sqrt()


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """The 2-norm of one gradient in float64.

    On the CPU in pieces: torch would first copy all of it to float64, for an embedding the memory peak of a step.
    """
    if gradient.device.type != "cpu":
        return torch.linalg.vector_norm(gradient, dtype=torch.float64)
    pieces = gradient.flatten().split(1 << 16)
    norms = [float(torch.linalg.vector_norm(piece, dtype=torch.float64)) for piece in pieces]
    return torch.tensor(norms, dtype=torch.float64).norm()
