"""`NotingLoss`: a loss with options of its own, which notes metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

import torch

from hf_gpipe.losses.loss import Loss
from hf_gpipe.settings.section import check_by


@dataclass(frozen=True)
class NotingLoss(Loss):
    """A loss that notes metrics, which are means over units or tokens.

    Attributes:
        metrics: their names, in the order in which they are summed up.
    """

    metrics: ClassVar[tuple[str, ...]]
    #: The section of a recipe whose keys are the options. It checks their values. None: recipes have no such section.
    section: ClassVar[type | None] = None
    #: The sums of the metrics and the number of values of each, in training (True) and in evaluation (False).
    _sums: dict[bool, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.section is not None:
            check_by(self.section, self)

    @classmethod
    def of(cls, options: Any) -> Self:
        """The loss that the arguments of a trainer, or the section of a recipe, ask for by the names of its fields."""
        names = [own.name for own in fields(cls) if own.init and hasattr(options, own.name)]
        return cls(**{name: getattr(options, name) for name in names})

    def _note(self, *metrics: torch.Tensor, counts: torch.Tensor | Sequence[torch.Tensor] | None = None) -> None:
        """Add the metrics of units, (U,) each, to the sums; nothing is read from the device.

        Args:
            metrics: the values.
            counts: over how many values they are sums in each unit, (U,), of all metrics or of each; None: one.
        """
        values = torch.stack([metric.detach().double() for metric in metrics])
        over = torch.ones((), device=values.device) if counts is None else counts
        over = over if isinstance(over, torch.Tensor) else torch.stack(list(over))
        is_training = torch.is_grad_enabled()
        sums = torch.stack([values.sum(dim=1), over.double().expand_as(values).sum(dim=1)])
        self._sums[is_training] = self._sums.get(is_training, 0.0) + sums

    def take(self, *, is_training: bool) -> torch.Tensor:
        """The sums of the metrics and the numbers of values since the last call, in this process; they begin anew.

        They are those of training or of evaluation, (2, len(metrics)) in float64, on the CPU.
        """
        sums = self._sums.pop(is_training, None)
        return torch.zeros(2, len(self.metrics), dtype=torch.float64) if sums is None else sums.cpu()

    def means(self, all_reduce: Callable[[torch.Tensor], torch.Tensor], *, is_training: bool) -> dict[str, float]:
        """The means of the metrics since the last call, of all processes; every process calls it.

        Args:
            all_reduce: adds up a tensor over the processes.
            is_training: whether they are those of training, or of evaluation.
        """
        sums, counts = all_reduce(self.take(is_training=is_training)).tolist()
        metrics = zip(self.metrics, sums, counts, strict=True)
        return {name: value / count for name, value, count in metrics if count}
