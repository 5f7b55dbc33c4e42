"""The norm of the gradient of a model whose parameters lie in several processes, and clipping by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from hf_gpipe.job.world import World
from hf_gpipe.libraries.torch import multiply_all, norms
from hf_gpipe.runtime.host import read

#: The number of values of a CPU gradient that are converted at once, and the number of values that one thread sums.
_PIECE, _ROW = 1 << 20, 1 << 14
LossAndNorm = Callable[[], torch.Tensor]
"""Waits until every process has sent its part; returns the loss and the norm, (2,) in float64 on the CPU."""


def begin_loss_and_norm(
    loss: torch.Tensor | None,
    gradients: Iterable[torch.Tensor],
    world: World,
    squares: Sequence[torch.Tensor] = (),
) -> LossAndNorm:
    """Start one message for the loss and for the 2-norm of the whole model's gradient, without waiting for it.

    Every process must call it.

    Args:
        loss: of this process's micro-batches on the last stage, a scalar on any device; None where it has none.
        gradients: of this process, each of the model's in one process only; none where the norm is not needed. They are
            read here, and may change afterwards.
        squares: sums of squares of further gradients of this process, as `sums_of_squares` gives them.

    Returns:
        A function that waits for the message and returns the same numbers in every process.
    """
    losses = [[] if loss is None else [loss]]
    numbers = begin_losses_and_norms(losses, [[*squares, *sums_of_squares(gradients)]], world)
    return lambda: numbers()[0]


def begin_losses_and_norms(
    losses: Sequence[Sequence[torch.Tensor]], squares: Sequence[Sequence[torch.Tensor]], world: World
) -> LossAndNorm:
    """`begin_loss_and_norm` of several steps.

    Args:
        losses: for each step the parts of its loss that this process has, scalars on any device.
        squares: for each step the sums of squares of gradients that this process has, as `sums_of_squares` gives them.

    Returns:
        A function that waits, and returns the loss and the norm of each step, (steps, 2), the same in every process.
    """
    values = iter(read([value for parts in (*losses, *squares) for value in parts]).tolist())
    # Each process has its own place in the tensor, and all sum the places in one order: the same numbers everywhere.
    parts = torch.zeros(2, len(losses), world.num_processes, dtype=torch.float64)
    for row, of_steps in enumerate((losses, squares)):
        for step, own in enumerate(of_steps):
            parts[row, step, world.rank] = sum(next(values) for _ in own)
    begun = world.begin_sum(parts)

    def end() -> torch.Tensor:
        loss_sums, square_sums = begun().sum(dim=2)
        return torch.stack([loss_sums, square_sums.sqrt()], dim=1)

    return end


def gradient_norm(gradients: Iterable[torch.Tensor], world: World) -> torch.Tensor:
    """The 2-norm over all processes, a float64 tensor, the same on each. Every process must call it."""
    return begin_loss_and_norm(None, gradients, world)()[1]


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def sums_of_squares(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of squares of the gradients on each device, a float64 scalar on that device. Nothing is read."""
    return [torch.stack(_norms(of_device)).square().sum() for of_device in _groups(gradients)]


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: float) -> None:
    """Scale gradients as torch.nn.utils.clip_grads_with_norm_ does.

    Args:
        parameters: the parameters of this process.
        max_norm: the largest norm that stays as it is.
        norm: the norm of the whole model's gradient.
    """
    factor = max_norm / (norm + 1e-6)
    if factor >= 1:  # false for NaN, which is then multiplied into the gradients
        return
    for gradients in _groups(gradients_of(parameters)):
        multiply_all(gradients, factor)


def _groups(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The gradients of each device and type, for which torch has kernels that take many tensors at once."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    yield from groups.values()


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each of several gradients on one device, accumulated in float64.

    On CUDA a few kernels convert each value as they read it. On the CPU a gradient is converted in pieces: for an
    embedding, a float64 copy of the whole gradient would be the memory peak of a step. torch's vector_norm can convert
    too, but takes ten times as long on the CPU.
    """
    if gradients[0].is_cuda:
        return norms(gradients, torch.float64)
    return [_norm(gradient) for gradient in gradients]


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    values, num_rows = gradient.flatten(), -(-gradient.numel() // _ROW)
    # Every piece is converted into the same memory: new memory for each would take six times as long.
    rows = torch.empty(min(num_rows, _PIECE // _ROW), _ROW, dtype=torch.float64)
    flat, sums = rows.view(-1), torch.empty(num_rows, dtype=torch.float64)
    for piece, sums_of_piece in zip(values.split(_PIECE), sums.split(_PIECE // _ROW), strict=True):
        flat[: len(piece)].copy_(piece).square_()
        flat[len(piece) : len(sums_of_piece) * _ROW] = 0
        # One thread adds up a row, so the number of threads changes no digit.
        torch.sum(rows[: len(sums_of_piece)], 1, out=sums_of_piece)
    return sums.sum().sqrt()
