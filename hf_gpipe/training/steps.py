"""The number of steps of a training, and the rows that steps are made of."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_gpipe.checkpoint.state import DataPosition, RunState
from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.training.arguments import PipelineTrainingArguments

_ROWS, _ACCUMULATION, _PER_EPOCH = (
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    "mini_batches_per_epoch",
)
#: The settings that decide which rows a place in the data means.
_DATA_FACTS = (
    *(_ROWS, _ACCUMULATION),
    "train_sampling_strategy",
    "dataloader_drop_last",
    "batch_tokens",
    "sampling_temperature",
    "multi_dataset_batch_sampler",
)
#: The settings that older checkpoints do not mention, with their values at that time.
_OLDER_DATA_FACTS = {
    "batch_tokens": None,
    "sampling_temperature": 1.0,
    "multi_dataset_batch_sampler": "proportional",
}


@dataclass(frozen=True)
class TrainingLength:
    """The number of steps of a training.

    Attributes:
        mini_batches_per_epoch: the mini-batches of an epoch; None where only reading an iterable dataset tells.
        max_steps: the number of optimizer steps of the training.
        num_epochs: the number of epochs that are begun; the last may not be finished.
        accumulation: the number of mini-batches of a step.
        further_steps: how many more steps these are than steps of one size would be.
    """

    mini_batches_per_epoch: int | None
    max_steps: int
    num_epochs: int
    accumulation: int
    further_steps: int = 0

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

    def with_further_steps(self, steps: int) -> TrainingLength:
        """The length with so many more steps, since some that were made had another size."""
        return replace(self, max_steps=self.max_steps + steps, further_steps=steps)

    def steps_before(self, position: DataPosition) -> int:
        """The number of steps that lead to a position, in mini-batches and steps of this length's size."""
        assert self.mini_batches_per_epoch is not None
        steps_per_epoch = math.ceil(self.mini_batches_per_epoch / self.accumulation)
        return position.epoch * steps_per_epoch + position.mini_batches // self.accumulation

    def fraction_of_epoch(self, mini_batches: int) -> float:
        """The part of an epoch that a number of mini-batches is."""
        return mini_batches / (self.mini_batches_per_epoch or self.max_steps * self.accumulation)


def data_seed(args: PipelineTrainingArguments) -> int:
    """The seed of the order of the rows."""
    return args.seed if args.data_seed is None else args.data_seed


def data_facts(args: PipelineTrainingArguments, length: TrainingLength) -> dict[str, Any]:
    """The settings that decide which rows a place in the data means."""
    return {name: getattr(args, name) for name in _DATA_FACTS if hasattr(args, name)} | {
        "data_seed": data_seed(args),
        _PER_EPOCH: length.mini_batches_per_epoch,
    }


def resumed_position(checkpoint: Path, saved: RunState, now: Mapping[str, Any]) -> DataPosition:
    """The place in the data where a run with these facts goes on from a checkpoint.

    Mini-batches of another size begin at the last one that has the first row that was not trained on. Only orders that
    do not depend on the size have such a place.

    Args:
        checkpoint: the checkpoint, for the message.
        saved: what the checkpoint says of its run.
        now: the facts of the run that goes on, of `data_facts`.

    Raises:
        CheckpointError: the place means other rows now.
    """
    before: dict[str, Any] = {name: saved.data.get(name, _OLDER_DATA_FACTS.get(name)) for name in now}
    changed = [name for name, value in now.items() if before[name] != value and name != _ACCUMULATION]
    if not changed:
        return saved.position
    if _ROWS in changed and {*changed} <= {_ROWS, _PER_EPOCH} and _has_rows_of(before, now):
        rows = saved.position.mini_batches * before[_ROWS]
        return DataPosition(epoch=saved.position.epoch, mini_batches=rows // now[_ROWS])
    name = next((name for name in changed if name != _ROWS), _ROWS)
    raise CheckpointError(
        f"{checkpoint} was written with {name}={before[name]!r} and this run has {now[name]!r}, so its place in the "
        "data means other rows; use the same value, or ignore_data_skip=True to begin its epoch anew"
    )


def _has_rows_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether epochs in mini-batches of another size have the same rows in the same order, as far as the facts tell."""
    if now["train_sampling_strategy"] not in ("random", "sequential") or now["batch_tokens"] is not None:
        return False
    if "multi_dataset_batch_sampler" in now:  # mini-batches of several datasets, or without duplicates
        return False
    if before[_PER_EPOCH] is None or now[_PER_EPOCH] is None:
        return False
    one, other = _possible_rows(before), _possible_rows(now)
    return max(one.start, other.start) < min(one.stop, other.stop)


def _possible_rows(facts: Mapping[str, Any]) -> range:
    """The numbers of rows that make the facts' number of mini-batches."""
    rows, count = facts[_ROWS], facts[_PER_EPOCH]
    least = count * rows if facts["dataloader_drop_last"] else (count - 1) * rows + 1
    return range(least, least + rows)


def changed_sizes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How the steps of two runs with these facts differ in their size, in words; empty: they have the same size."""
    changed = [name for name in (_ROWS, _ACCUMULATION) if before.get(name, now[name]) != now[name]]
    return " and ".join(f"{name}={now[name]} in place of {before[name]}" for name in changed)
