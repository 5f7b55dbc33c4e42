"""Training in windows: updates of one stage at a time, and what goes with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_gpipe.checkpoint.state import options_of_groups
from hf_gpipe.errors import UserError
from hf_gpipe.modes.asynchronous.key import check_training
from hf_gpipe.runtime.shards import treats_elements_alone
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule import staleness
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.logs import Logs
from hf_gpipe.training.optim import step_stage, takes_metric
from hf_gpipe.training.trainer_interface import TrainerInterface
from hf_gpipe.training.updates import Updates, callbacks_of_update


def check(trainer: TrainerInterface) -> None:
    """Raise UserError for what needs the gradients of all stages before an update."""
    if not trainer.pipe.runs_windows:
        return
    what = f"the schedule is {trainer.pipe.schedule_name!r}"
    check_training(trainer.args, trainer.pipe.config.schedule, what, scales_loss=trainer.scaler is not None)
    for callback, event in callbacks_of_update(trainer.callback_handler.callbacks):
        raise UserError(
            f"{what} and the callback {type(callback).__name__} has {event}: each stage updates by itself, so "
            "a step has no such moment; remove it, or use a synchronous schedule, such as 1f1b"
        )
    treats_elements_alone(trainer.made_optimizer(), what)


def updates(trainer: TrainerInterface, logs: Logs) -> Updates | None:
    """The updates of windows; None: the schedule has none."""
    return WindowUpdates(trainer, logs) if trainer.pipe.runs_windows else None


class WindowUpdates(Updates):
    """Runs the steps of a training in windows, in which each stage updates by itself. Logs say how stale the gradients
    of each stage were, in updates."""

    def __init__(self, trainer: TrainerInterface, logs: Logs) -> None:
        super().__init__(trainer, logs)
        #: (loss, norm, learning rate) of each step of the last window.
        self._numbers: list[tuple[float, float, float]] = []

    @property
    def wait(self) -> bool:
        return True

    def _run(self, step: int, window: Sequence[Sequence[Batch]], times: list[ActionTime] | None) -> None:
        stages, pipe = StageUpdates(self.trainer, self.trainer.lr_scheduler), self.trainer.pipe
        numbers = pipe.train_window(window, stages, times).tolist()
        assert pipe.window is not None
        for stage in range(pipe.num_stages):
            self.logs.add_values(f"staleness_stage_{stage}", staleness(pipe.window, stage))
        self._numbers = [(loss, norm, stages.rate(number)) for number, (loss, norm) in enumerate(numbers)]

    def note_step(self, number: int, num_mini_batches: int) -> None:
        for _ in range(num_mini_batches - 1):
            self.trainer.fire("on_substep_end")
        loss, norm, self.rate = self._numbers[number]
        self.note(self.trainer.state.global_step + 1, loss, norm)


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
        _set_options(self._optimizer, self._settings[step])
        step_stage(self._trainer, stage)
        if not is_first:
            _set_options(self._optimizer, now)
        elif self._scheduler is not None:
            self._scheduler.step()

    def rate(self, step: int) -> float:
        """The learning rate of a step of the window."""
        return float(self._settings[step][0]["lr"])


def _set_options(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
