"""How many steps a training has, and where in the data it stands."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_gpipe.errors import UserError
from hf_gpipe.training.arguments import PipelineTrainingArguments


@dataclass(frozen=True)
class Position:
    """A place in the data: so many mini-batches of this epoch have been trained on.

    `place` is where an iterable dataset stands there (`MiniBatches.place`), in the main process; None: not known.
    """

    epoch: int = 0
    mini_batches: int = 0
    place: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Plan:
    """The steps of a training.

    Attributes:
        mini_batches_per_epoch: None where only reading an iterable dataset tells.
        steps_per_epoch: optimizer updates of an epoch; without a known length, those of the whole training.
        max_steps: optimizer updates of the training.
        num_epochs: epochs begun, the last one possibly not finished.
        accumulation: mini-batches of a step.
    """

    mini_batches_per_epoch: int | None
    steps_per_epoch: int
    max_steps: int
    num_epochs: int
    accumulation: int

    @classmethod
    def make(cls, args: PipelineTrainingArguments, mini_batches_per_epoch: int | None) -> Plan:
        """Counted as transformers' Trainer counts: `max_steps`, where given, goes before `num_train_epochs`.

        Raises:
            UserError: no mini-batch, or no length and no `max_steps`.
        """
        accumulation = args.gradient_accumulation_steps
        if mini_batches_per_epoch is None:
            if args.max_steps <= 0:
                raise UserError("max_steps: the training dataset has no length, so give the number of steps")
            return cls(None, args.max_steps, args.max_steps, sys.maxsize, accumulation)
        if mini_batches_per_epoch == 0:
            raise UserError(
                "the training dataset gives no mini-batch: it is empty, or dataloader_drop_last drops its only one"
            )
        steps_per_epoch = math.ceil(mini_batches_per_epoch / accumulation)
        if args.max_steps > 0:
            max_steps, num_epochs = args.max_steps, math.ceil(args.max_steps / steps_per_epoch)
        else:
            max_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
            num_epochs = math.ceil(args.num_train_epochs)
        return cls(mini_batches_per_epoch, steps_per_epoch, max_steps, num_epochs, accumulation)

    def fraction_of_epoch(self, mini_batches: int) -> float:
        """Which part of an epoch so many mini-batches are."""
        return mini_batches / (self.mini_batches_per_epoch or self.max_steps * self.accumulation)
