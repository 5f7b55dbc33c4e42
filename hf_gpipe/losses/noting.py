"""`NotingLoss`: a loss with options of its own, which notes metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from hf_gpipe.losses.loss import Loss
from hf_gpipe.settings.section import Settings, keys_of, values_in


class NotingLoss(Loss):
    """A loss with options, which notes metrics: means over units or tokens.

    The options are keys of settings, each declared once: recipes and the arguments of the task's trainer have them too.

    Args:
        options: their values, in the order of the keys or by name.

    Attributes:
        options: those of the loss. A subclass says by its own, with all defaults, which options it has.
        metrics: the names of the metrics, in the order in which they are summed up.

    Raises:
        UserError: an option does not exist, or has a value that is not allowed.
    """

    options: Settings = Settings()
    metrics: ClassVar[tuple[str, ...]]

    def __init__(self, *options: Any, **by_name: Any) -> None:
        self.options = type(self.options)(*options, **by_name)
        #: The sums of the metrics and the number of values of each, in training (True) and in evaluation (False).
        self._sums: dict[bool, torch.Tensor] = {}

    @classmethod
    def of(cls, given: Any) -> Self:
        """The loss that the arguments of a trainer, or the section of a recipe, ask for by the names of its options."""
        return cls(**values_in(given, type(cls.options)))

    def replace(self, **options: Any) -> Self:
        """The loss with other values of options."""
        return type(self)(**{**vars(self.options), **options})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotingLoss) and type(self) is type(other) and self.options == other.options

    def __hash__(self) -> int:
        return hash((type(self), self.options))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options)})"

    if not TYPE_CHECKING:  # a type checker finds them in the options

        def __getattr__(self, name: str) -> Any:
            """The value of an option."""
            if name in keys_of(type(self.options)):
                return getattr(self.options, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
