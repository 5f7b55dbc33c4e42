"""The steps of a training: each runs its mini-batches and makes the update that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import transformers
from transformers import TrainerCallback

from hf_gpipe.errors import NonFiniteError
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.runtime.gradient_norm import LossAndNorm
from hf_gpipe.runtime.shards import treats_parameters_alone
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.logs import Logs
from hf_gpipe.training.loss_scaling import SMALLEST
from hf_gpipe.training.optim import step_all, step_late, step_stage, takes_metric
from hf_gpipe.training.slow_machines import SlowMachines
from hf_gpipe.training.trainer_interface import TrainerInterface

logger = transformers.logging.get_logger(__name__)


#: The events in the middle of an update.
_EVENTS_OF_UPDATE = ("on_pre_optimizer_step", "on_optimizer_step")


def callbacks_of_update(callbacks: Sequence[TrainerCallback]) -> Iterator[tuple[TrainerCallback, str]]:
    """Yield the callbacks that are called in the middle of an update, each with the name of the event."""
    for callback in callbacks:
        for event in _EVENTS_OF_UPDATE:
            # The method may be of the class or of the instance.
            if getattr(getattr(callback, event), "__func__", None) is not getattr(TrainerCallback, event):
                yield callback, event


def updates_in_backward(trainer: TrainerInterface) -> bool:
    """Whether shared stages are updated beside backwards: where an update needs the gradients of its stage alone, and
    nothing reads all stages' gradients before it. Every process calls it, and all get the same answer."""
    if not trainer.pipe.steps.can_update_beside or trainer.updates_per_step > 1 or _needs_numbers(trainer):
        return False
    return all(trainer.pipe.world.gather_objects(_updates_stages_alone(trainer)))


def _updates_stages_alone(trainer: TrainerInterface) -> bool:
    """Whether this process may update one stage after another, because nothing sees the middle of an update."""
    return (
        trainer.optimizer is not None
        and treats_parameters_alone(trainer.optimizer)
        and not any(callbacks_of_update(trainer.callback_handler.callbacks))
    )


def make_update(trainer: TrainerInterface, step: int) -> None:
    """Step the optimizer; stages whose trained weights visit wait for the next step's forwards, where that is exact.

    Args:
        trainer: the trainer.
        step: the number of the step.
    """
    if trainer.pipe.weights.late.parameters and _updates_stages_alone(trainer):
        step_late(trainer, step)
    else:
        step_all(trainer)


def _needs_numbers(trainer: TrainerInterface) -> bool:
    """Whether an update needs the loss or the norm."""
    return trainer.args.needs_norm or trainer.scaler is not None


class Updates:
    """Runs the steps of a training in turn; the trainer's state has the number of the last step.

    Args:
        trainer: the trainer whose model is trained.
        logs: the logs that get the loss of each step.

    Attributes:
        norm, rate: the norm of the gradient and the learning rate of the last update whose norm is known.
        wait: whether an update needs the loss or the norm, which follow from the gradients of all stages. Where it does
            not, a process begins its next step as soon as its own update is done, and reads these numbers after the
            next step.
    """

    def __init__(self, trainer: TrainerInterface, logs: Logs) -> None:
        self.trainer, self.logs = trainer, logs
        self._args, self._pipe, self._world = trainer.args, trainer.pipe, trainer.pipe.world
        self.norm: float | None = None
        self.rate: float | None = None
        #: (number, loss and norm) of a step whose update did not wait for its loss and norm.
        self._late_numbers: tuple[int, LossAndNorm] | None = None
        self._has_warned = False
        #: Of any step so far.
        self._most_rows = 0
        self._slow_machines = SlowMachines(self._pipe, self._args.slow_machine_steps)
        #: The answer of all processes, whose tables must be the same.
        self._updates_in_backward = updates_in_backward(trainer)

    @property
    def wait(self) -> bool:
        if _needs_numbers(self.trainer):
            return True
        return self._world.num_processes == 1 and not self._updates_in_backward

    def run(self, window: Sequence[Sequence[Batch]]) -> None:
        """Make the update of a step from its mini-batches, or the updates of a window."""
        self._scale_loss()
        step = self.trainer.state.global_step + 1
        is_whole = self._is_whole(window)
        times = self.logs.meter.times(step, len(window), is_whole=is_whole)
        if times is None and is_whole:
            times = self._slow_machines.times(len(window))
        self._run(step, window, times)
        self._slow_machines.count(len(window), times)

    def _is_whole(self, window: Sequence[Sequence[Batch]]) -> bool:
        """Whether no step before had more rows: what is left over at the end of an epoch tells nothing of the speed."""
        rows = min(sum(len(batch["labels"]) for batch in group) for group in window)
        self._most_rows = max(self._most_rows, rows)
        return rows == self._most_rows or self._args.size.known_rows is None

    def note_step(self, number: int, num_mini_batches: int) -> None:
        """Note the numbers of a step of the window that has run. The numbers of a single step are noted when it runs.

        Args:
            number: of the step in the window.
            num_mini_batches: of the step.
        """

    def read_late_numbers(self) -> None:
        """Wait for the loss and the norm of a step whose update did not need them."""
        if self._late_numbers is not None:
            (step, numbers), self._late_numbers = self._late_numbers, None
            self.note(step, *numbers().tolist())

    def _scale_loss(self) -> None:
        """Let the next backwards use the present scale, which an update may have changed."""
        self._pipe.loss_scale = self._scale

    @property
    def _scale(self) -> float:
        return 1.0 if self.trainer.scaler is None else self.trainer.scaler.scale

    def _run(self, step: int, window: Sequence[Sequence[Batch]], times: list[ActionTime] | None) -> None:
        (group,) = window
        for _ in range(self.trainer.updates_per_step - 1):
            self._pipe.steps.train_on(group, None, self._update_between)
            self._pipe.zero_grad()
            self._scale_loss()
        if self.wait:
            self._pipe.steps.train_on(group, times, partial(self._update, len(group)))
        else:
            update = partial(self._update, len(group), is_done=self._updates_in_backward)
            of_stage = partial(step_stage, self.trainer) if self._updates_in_backward else None
            numbers = self._pipe.steps.train_ahead(group, times, update, of_stage)
            self.read_late_numbers()
            self._late_numbers = step, numbers
        self._pipe.zero_grad()

    def _update(
        self,
        num_mini_batches: int,
        loss: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        *,
        is_done: bool = False,
    ) -> None:
        """Update in the table's U, once the gradients are complete: clip, step, schedule the rate.

        Args:
            num_mini_batches: the number of mini-batches of the step.
            loss: the loss of the whole step; None: the loss and the norm are not known yet.
            norm: the norm of the whole gradient.
            is_done: whether the stages are updated already.
        """
        optimizer, scheduler = self.trainer.made_optimizer(), self.trainer.lr_scheduler
        for _ in range(num_mini_batches - 1):
            self.trainer.fire("on_substep_end")
        is_applied = True
        if loss is not None and norm is not None:
            is_applied = self.note(self.trainer.state.global_step + 1, float(loss), self._clipped(norm))
        self.trainer.fire("on_pre_optimizer_step")
        if is_applied and not is_done:
            make_update(self.trainer, self.trainer.state.global_step + 1)
        self.trainer.fire("on_optimizer_step")
        self.rate = float(optimizer.param_groups[0]["lr"])
        if is_applied and not takes_metric(scheduler):
            scheduler.step()

    def _update_between(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Make an update that is not the last of its step: the rate stays, and nothing is logged."""
        step = self.trainer.state.global_step + 1
        if self._is_applied(step, float(loss), self._clipped(norm)):
            make_update(self.trainer, step)

    def _clipped(self, norm: torch.Tensor) -> float:
        """Divide the gradients by the loss's scale and clip them. Returns the norm of the gradient before clipping."""
        own = float(norm) / self._scale
        masters, scaler = self.trainer.master_weights, self.trainer.scaler
        if scaler is not None and masters is not None and masters.in_float32:
            masters.loss_scale = scaler.scale
        elif scaler is not None:
            scaler.unscale_(self._pipe.parameters())
        if self._args.clips:
            self._pipe.clip_grad_norm_(self._args.max_grad_norm, own)
        return own

    def note(self, step: int, loss: float, norm: float) -> bool:
        """Note the loss and the norm of a step. Returns whether its gradients are applied."""
        is_applied = self._is_applied(step, loss, norm)
        if loss == norm == 0 and not self._has_warned and self._world.is_main:
            self._has_warned = True
            logger.warning(
                f"step {step}: the loss and its gradient are 0, so nothing was learnt; probably its mini-batches have "
                "no target (all labels are -100): look at the rows, and whether max_length cuts off the targets"
            )
        self.norm = norm
        self.logs.add_loss(loss, step - 1)
        return is_applied

    def _is_applied(self, step: int, loss: float, norm: float) -> bool:
        """Whether a step's gradients are applied. It follows from numbers that every process has, so that all agree."""
        scaler, reaction = self.trainer.scaler, self._args.on_nonfinite_loss
        has_overflowed = scaler is not None and not math.isfinite(norm)
        if scaler is not None and not (has_overflowed and scaler.scale <= SMALLEST):
            # An infinite gradient of a finite loss only says that the scale is too large.
            scaler.update(has_overflowed)
            if math.isfinite(loss):
                return not has_overflowed
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        if reaction == "stop":
            raise NonFiniteError(
                f"step {step}: the loss is {loss} and the gradient's norm {norm}; lower learning_rate or "
                "max_grad_norm, look at the data, or set on_nonfinite_loss to skip"
            )
        if (reaction == "skip" or has_overflowed) and self._world.is_main:
            logger.warning(f"step {step} is skipped: its loss is {loss}, its gradient's norm {norm}")
        return reaction == "ignore" and not has_overflowed


def updates_of(trainer: TrainerInterface, logs: Logs) -> Updates:
    """Runs the steps of a training as its mode does (`hf_gpipe.modes`)."""
    found = (make(trainer, logs) for make in functions_of_modes("training", "updates"))
    return next((updates for updates in found if updates is not None), None) or Updates(trainer, logs)
