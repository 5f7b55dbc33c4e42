"""The number of steps of a training, and the rows that steps are made of."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from hf_gpipe.errors import UserError
from hf_gpipe.training.arguments import PipelineTrainingArguments

#: The settings that decide which rows a place in the data means.
_DATA_FACTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "train_sampling_strategy",
    "dataloader_drop_last",
    "batch_tokens",
    "sampling_temperature",
)
#: The settings that older checkpoints do not mention, with their values at that time.
OLDER_DATA_FACTS = {"batch_tokens": None, "sampling_temperature": 1.0}


@dataclass(frozen=True)
class TrainingLength:
    """The number of steps of a training.

    Attributes:
        mini_batches_per_epoch: the mini-batches of an epoch; None where only reading an iterable dataset tells.
        max_steps: the number of optimizer steps of the training.
        num_epochs: the number of epochs that are begun; the last may not be finished.
        accumulation: the number of mini-batches of a step.
    """

    mini_batches_per_epoch: int | None
    max_steps: int
    num_epochs: int
    accumulation: int

    @classmethod
    def make(cls, args: PipelineTrainingArguments, mini_batches_per_epoch: int | None) -> TrainingLength:
        """Count the steps as transformers' Trainer does: `max_steps`, where given, replaces `num_train_epochs`.

        Raises:
            UserError: there is no mini-batch, or neither a length nor `max_steps`.
        """
        accumulation = args.size.accumulation
        if mini_batches_per_epoch is None:
            if args.max_steps <= 0:
                raise UserError("max_steps: the training dataset has no length, so give the number of steps")
            return cls(None, args.max_steps, sys.maxsize, accumulation)
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
        return cls(mini_batches_per_epoch, max_steps, num_epochs, accumulation)

    def fraction_of_epoch(self, mini_batches: int) -> float:
        """The part of an epoch that a number of mini-batches is."""
        return mini_batches / (self.mini_batches_per_epoch or self.max_steps * self.accumulation)


def data_seed(args: PipelineTrainingArguments) -> int:
    """The seed of the order of the rows."""
    return args.seed if args.data_seed is None else args.data_seed


def data_facts(args: PipelineTrainingArguments, length: TrainingLength) -> dict[str, Any]:
    """The settings that decide which rows a place in the data means."""
    return {name: getattr(args, name) for name in _DATA_FACTS} | {
        "data_seed": data_seed(args),
        "mini_batches_per_epoch": length.mini_batches_per_epoch,
    }
