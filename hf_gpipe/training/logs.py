"""The logs of a training: the mean loss since the last log, the last gradient norm and learning rate, and the speed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import transformers

from hf_gpipe.libraries.transformers_trainer import speed_metrics
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.meter import Meter
from hf_gpipe.training.steps import TrainingLength
from hf_gpipe.training.trainer_interface import TrainerInterface

#: The library's own logger, whose level the argument `log_level` sets.
logger = transformers.logging.get_logger()


class Logs:
    """Sums up the steps of one training. Every process has one and calls it in step with the others.

    Args:
        trainer: the trainer, at the beginning of this training.
        start_time: the start of this training, by `time.time`.

    Attributes:
        meter: measures the speed.
    """

    def __init__(self, trainer: TrainerInterface, start_time: float) -> None:
        self._trainer, self._args, self._start_time = trainer, trainer.args, start_time
        self.meter = Meter(trainer.pipe, self._args.timeline_steps if trainer.world.num_processes > 1 else None)
        self._first_step = self._logged_step = trainer.state.global_step
        #: The sums of the losses since the last log, and before it.
        self._loss = self._logged_loss = 0.0
        self._num_rows = 0
        #: The values of `add_values` since the last log.
        self._values: dict[str, list[float]] = {}

    def announce(self, length: TrainingLength) -> None:
        """Tell the size of the training as Trainer does; it is shown with `log_level="info"`."""
        if not logger.isEnabledFor(logging.INFO):
            return
        args, state, adapter = self._args, self._trainer.state, self._trainer.pipe.adapter
        logger.info("***** Running training *****")
        for name, value in {
            "Num epochs": length.num_epochs,
            "Mini-batches per epoch": length.mini_batches_per_epoch,
            "Rows of a step": args.size.rows_of_step,
            "Gradient accumulation steps": length.accumulation,
            "Total optimization steps": length.max_steps,
            "Number of trainable parameters": self._trainer.get_num_trainable_parameters(),
            "Number of parameters": adapter.num_parameters(),
            "Resuming from step": state.global_step or None,
        }.items():
            if value is not None:
                logger.info(f"  {name} = {value:,}")

    def add_values(self, name: str, values: Sequence[float]) -> None:
        """Note values of a metric, whose mean is in the next log."""
        self._values.setdefault(name, []).extend(values)

    def add_loss(self, loss: float, steps: int) -> None:
        """Add the loss of a step; `steps` is the number of steps before it."""
        if self._args.logging_nan_inf_filter and not math.isfinite(loss):
            # As in Trainer, the mean of the steps since the last log stands in for a loss that is not a number.
            loss = self._loss / (1 + steps - self._logged_step)
        self._loss += loss

    def count(self, group: Sequence[Batch]) -> int:
        """Note what a step has trained on. Returns the number of its tokens without padding."""
        self._num_rows += sum(len(batch["labels"]) for batch in group)
        return self.meter.count(group)

    def read(self, norm: float | None, rate: float | None) -> dict[str, Any] | None:
        """The metrics since the last call; None where there was no step.

        Args:
            norm: the norm of the last step's gradient.
            rate: the learning rate of the last step.
        """
        state = self._trainer.state
        step, steps = state.global_step, state.global_step - self._logged_step
        if steps == 0:
            return None
        logs: dict[str, Any] = {"loss": self._loss / steps, "grad_norm": norm, "learning_rate": rate}
        logs |= {name: sum(values) / len(values) for name, values in self._values.items()}
        self._values = {}
        self._logged_loss += self._loss
        self._loss, self._logged_step = 0.0, step
        logs |= self.meter.read()
        logs["seconds_left"] = logs["training_seconds"] / steps * (state.max_steps - step)
        return {name: value for name, value in logs.items() if value is not None}

    @property
    def has_more_steps(self) -> bool:
        """Whether there was a step since the last log."""
        return self._trainer.state.global_step > self._logged_step

    def summary(self) -> dict[str, float]:
        """The metrics of the whole training, for this process; `train_loss` is the mean loss."""
        state = self._trainer.state
        steps = state.global_step - self._first_step
        rows_of_step = self._args.size.rows_of_step
        rows = self._num_rows if rows_of_step is None else steps * rows_of_step
        metrics: dict[str, float] = speed_metrics("train", self._start_time, num_samples=rows, num_steps=steps)
        loss = (self._logged_loss + self._loss) / max(steps, 1)
        return metrics | {"total_flos": state.total_flos, "train_loss": loss}
