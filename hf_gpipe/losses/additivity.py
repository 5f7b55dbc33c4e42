"""Checks that a loss of the user's own is a sum over units, so that a mini-batch may be cut between any two of them.

A loss that compares rows, or takes a mean over them, has other values for other numbers of micro-batches. It is found
by its values on real logits, cut in two ways. A micro-batch of a single unit is given a second unit, made from the
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from hf_gpipe.errors import UserError

LossValue = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits (B, ...), labels (B, ...)) -> the loss of these rows, ()."""

#: The least difference, relative to the sum, that is not explained by rounding in float64.
_TOLERANCE = 1e-4


@torch.no_grad()
def adds_up(value_of: LossValue, logits: torch.Tensor, labels: torch.Tensor, rows_per_unit: int) -> bool:
    """Compare the loss of all rows of a micro-batch with the sum of its parts, for two cuts.

    It waits for the device, so it belongs into the first micro-batches only.

    Args:
        value_of: the loss, which may change its arguments in place.
        logits: (B, ...).
        labels: (B, ...).
        rows_per_unit: rows next to each other that belong to one unit; B is a multiple of it.

    Returns:
        Whether the comparison says anything: not where a value is infinite or NaN, or all values are 0.

    Raises:
        UserError: the values differ by more than rounding explains.
    """
    is_conclusive = False
    for whole_logits, whole_labels in _trials(logits, labels, rows_per_unit):
        rows = len(whole_logits)
        whole = value_of(whole_logits.clone(), whole_labels)
        half = (rows // rows_per_unit + 1) // 2 * rows_per_unit
        for size in {rows_per_unit, half}:
            parts = [
                value_of(some_logits.clone(), some_labels)
                for some_logits, some_labels in zip(whole_logits.split(size), whole_labels.split(size), strict=True)
            ]
            is_conclusive |= _compare(whole, parts, size, logits.dtype)
    return is_conclusive


def _trials(
    logits: torch.Tensor, labels: torch.Tensor, rows_per_unit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits and labels of at least two units."""
    if len(logits) > rows_per_unit:
        yield logits, labels
        return
    # Smaller logits, and of other tokens: a loss that compares two equal rows could be 0.
    other = logits.roll(1, -1) * 0.5
    for other_labels in (labels, _other_labels(labels, logits.shape[-1])):
        yield torch.cat([logits, other]), torch.cat([labels, other_labels])


def _other_labels(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Labels of the same form with other values, for losses that compare rows with unlike labels only."""
    if labels.is_floating_point():
        return labels * 0.5
    return labels.roll(1, -1) if labels.dim() > 1 else (labels + 1) % num_classes


def _compare(whole: torch.Tensor, parts: list[torch.Tensor], size: int, dtype: torch.dtype) -> bool:
    """Whether the values say anything. Raises UserError where the whole is not the sum of the parts."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(whole.dtype).eps if whole.is_floating_point() else 0.0)
    # Both in float64: the sum shall round less than what it is compared with.
    of_all, *values = torch.stack([whole, *parts]).double().tolist()
    scale = max(abs(of_all), sum(map(abs, values)))
    if not math.isfinite(scale) or scale == 0:
        return False
    if abs(of_all - math.fsum(values)) > max(_TOLERANCE, eps**0.5) * scale:
        rows = "row" if size == 1 else f"{size} rows"
        raise UserError(
            f"compute_loss_func gave {of_all:.6g} for several rows at once, and its values for each {rows} of them add "
            f"up to {math.fsum(values):.6g}. It is called for each micro-batch, and the results are added up; so it "
            "must be a sum over tokens or rows, such as cross_entropy(..., reduction='sum') / num_items_in_batch; "
            "where neighbouring rows belong together, give LogitsLoss(function, rows_per_unit=...) in its place"
        )
    return True


def check_independent(losses: torch.Tensor, read: Sequence[torch.Tensor], rows_per_unit: int, name: str) -> None:
    """Raise UserError where the loss of the first unit depends on the rows of another one.

    Args:
        losses: of each unit, (B / rows_per_unit,), with a graph.
        read: the tensors (B, ...) with gradients from which they are computed.
        rows_per_unit, name: of the loss.
    """
    for gradient in torch.autograd.grad(losses[0], read, retain_graph=True, allow_unused=True):
        if gradient is not None and bool(gradient[rows_per_unit:].any()):
            raise UserError(
                f"the function of a {name} gave a loss of the first unit that depends on the rows of other units. It "
                f"is called for each micro-batch, which may have a single unit of {rows_per_unit} rows; compute the "
                "loss of each unit from its own rows, or give a larger rows_per_unit"
            )
