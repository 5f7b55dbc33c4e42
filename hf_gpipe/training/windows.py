"""Asynchronous schedules in a training: windows of steps, and updates of one stage at a time.

The steps of a window run as one table, without a flush between them. A window ends at the next log, evaluation or
checkpoint, where every weight has had the same updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from hf_gpipe.checkpoint.state import options_of_groups
from hf_gpipe.errors import UserError
from hf_gpipe.libraries.transformers_trainer import IntervalStrategy, SaveStrategy
from hf_gpipe.runtime.shards import treats_elements_alone
from hf_gpipe.schedule import LONGEST_WINDOW
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.optim import step_stage, takes_metric
from hf_gpipe.training.trainer_interface import TrainerInterface

Group = Sequence[Batch]
"""The mini-batches of a step."""

#: The events in the middle of an update; an asynchronous schedule has an update for each stage.
_EVENTS_OF_UPDATE = ("on_pre_optimizer_step", "on_optimizer_step")


def windows(groups: Iterable[Group], trainer: TrainerInterface) -> Iterator[list[Group]]:
    """Yield the steps that run as one table: a step under a synchronous schedule, a window under an asynchronous one.

    Args:
        groups: the steps of an epoch.
        trainer: the trainer. Its arguments say where logs, evaluations and checkpoints come; its state is at the end of
            the window before.
    """
    window: list[Group] = []
    for group in groups:
        window.append(group)
        if len(window) >= (_steps_to_next_end(trainer) if trainer.pipe.is_asynchronous else 1):
            yield window
            window = []
    if window:
        yield window


def _steps_to_next_end(trainer: TrainerInterface) -> int:
    args, state = trainer.args, trainer.state
    every = [state.logging_steps] if args.logging_strategy == IntervalStrategy.STEPS else []
    every += [state.eval_steps] if args.eval_strategy == IntervalStrategy.STEPS else []
    every += [state.save_steps] if args.save_strategy == SaveStrategy.STEPS else []
    steps = [int(size - state.global_step % size) for size in every if size is not None and size > 0]
    if args.logging_first_step and state.global_step == 0:
        steps.append(1)
    return min([LONGEST_WINDOW, *steps])


def check_asynchronous(trainer: TrainerInterface) -> None:
    """Raise UserError for what needs the gradients of all stages before an update, under an asynchronous schedule."""
    if not trainer.pipe.is_asynchronous:
        return
    asked = f"the schedule is {trainer.pipe.schedule_name!r}"
    trainer.args.check_asynchronous(asked, scales_loss=trainer.scaler is not None)
    for callback, event in callbacks_of_update(trainer.callback_handler.callbacks):
        raise UserError(
            f"{asked} and the callback {type(callback).__name__} has {event}: each stage updates by itself, so "
            "a step has no such moment; remove it, or use a synchronous schedule, such as 1f1b"
        )
    treats_elements_alone(trainer.made_optimizer(), asked)


def callbacks_of_update(callbacks: Sequence[TrainerCallback]) -> Iterator[tuple[TrainerCallback, str]]:
    """Yield the callbacks that are called in the middle of an update, each with the name of the event."""
    for callback in callbacks:
        for event in _EVENTS_OF_UPDATE:
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                yield callback, event


class StageUpdates:
    """The updates of a window: the optimizer steps one stage at a time, at the learning rate of the stage's own step.

    The stages of a process reach a step at different times. The first of them moves the learning rate's schedule on.

    Args:
        trainer: the trainer, whose optimizer steps, and whose `max_grad_norm` counts for each stage.
        scheduler: the schedule of the learning rate; None: the rate stays.
    """

    def __init__(self, trainer: TrainerInterface, scheduler: Any) -> None:
        self._trainer, self._optimizer = trainer, trainer.made_optimizer()
        self._scheduler = None if scheduler is None or takes_metric(scheduler) else scheduler
        #: The settings of the optimizer's groups of parameters, for each step of the window.
        self._settings: list[list[dict[str, Any]]] = []

    def __call__(self, stage: int, step: int, norm: torch.Tensor) -> None:
        """Update a stage, as an `UpdateStage` of `Pipeline.train_window`."""
        is_first = step == len(self._settings)
        now = options_of_groups(self._optimizer)
        if is_first:
            self._settings.append(now)
        if max_norm := self._trainer.args.max_grad_norm:
            self._trainer.pipe.clip_stage_grad_norm_(stage, max_norm, norm)
        _set(self._optimizer, self._settings[step])
        step_stage(self._trainer, stage)
        if not is_first:
            _set(self._optimizer, now)
        elif self._scheduler is not None:
            self._scheduler.step()

    def rate(self, step: int) -> float:
        """The learning rate of a step of the window."""
        return float(self._settings[step][0]["lr"])


def _set(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
