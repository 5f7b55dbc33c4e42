"""The training steps of `Pipeline`, each a table that the executor runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hf_gpipe.adapters.modules.autocast import keeping_weights
from hf_gpipe.errors import UserError
from hf_gpipe.pipeline.forwards import Forwards
from hf_gpipe.pipeline.variant import Variant
from hf_gpipe.runtime.batches import share
from hf_gpipe.runtime.cutting import make_micro_batches
from hf_gpipe.runtime.gradient_norm import (
    LossAndNorm,
    begin_loss_and_norm,
    begin_losses_and_norms,
    gradients_of,
    sums_of_squares,
)
from hf_gpipe.runtime.micro_batch import Batch, MicroBatch, StepOptions
from hf_gpipe.runtime.step import StepResult
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule.named import window_schedules
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.updates import updates_beside

logger = logging.getLogger(__name__)

Update = Callable[[torch.Tensor, torch.Tensor], None]
"""(the loss of the mini-batch, the norm of the whole model's gradient) -> None: uses the complete gradients in `.grad`.

Both are float64 scalars on the CPU, the same on every process; in the norm each tied parameter counts once."""

UpdateStage = Callable[[int, int, torch.Tensor], None]
"""(stage, number of the step in the window, norm of the stage's gradient) -> None: uses the stage's complete gradients
in `.grad`, and no others. The norm is a float64 scalar on the stage's device."""


@dataclass(eq=False)
class Steps:
    """The part of a pipeline that trains.

    Attributes:
        forwards: runs the same stages without gradients.
        step, window, stash_bytes, loss_scale: as of `Pipeline`.
    """

    forwards: Forwards
    step: int = 0
    window: Schedule | None = None
    stash_bytes: int = 0
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        self.decision, self.parameters = self.forwards.decision, self.forwards.parameters
        self.executor, self.cutting = self.forwards.executor, self.forwards.cutting
        self.adapter, self.world = self.decision.adapter, self.decision.world
        self._is_packing_verified = self.cutting.packing
        has_one = self.decision.config.num_stages > 1 and self.decision.given.num_micro_batches == 1
        self._may_lack_overlap = self.world.is_main and has_one and not self.decision.runs_windows

    def train_step(
        self,
        batch: Batch | Sequence[Batch] | None,
        times: list[ActionTime] | None = None,
        update: Update | None = None,
    ) -> torch.Tensor:
        """Run forward and backward of one mini-batch, and add the gradients to `.grad`.

        Every process calls it. The main process gives the mini-batch; the others may pass None.

        Args:
            batch: a dict of tensors with N rows each: input_ids (N, T), attention_mask (N, T), labels (N, T), -100
                where there is no target. For a model that does not read text: labels, and the arguments of its forward.
                A sequence of such mini-batches is accumulated in one pass.
            times: list to which the times of this process's actions are appended.
            update: a function that updates the weights, for example clips and steps an optimizer. It is called in every
                process with the loss and the norm of the gradient, once the gradients are complete, and is the action U
                of the table; its errors are raised here. None: the caller updates after `train_step`.

        Returns:
            The mean loss per target token of the whole mini-batch, a float tensor on every process.
        """
        batches = [batch] if isinstance(batch, Mapping) else batch
        return self.train_on(share(batches, self.world), times, update)

    def train_on(
        self,
        batches: Sequence[Batch],
        times: list[ActionTime] | None = None,
        update: Update | None = None,
        update_stage: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """`train_step` for mini-batches that every process already has; `update_stage` is that of `train_ahead`."""
        waiting: Callable[[LossAndNorm], None] | None = None if update is None else lambda numbers: update(*numbers())
        return self._train(batches, times, waiting, waits=True, update_stage=update_stage)()[0]

    def train_window(
        self,
        steps: Sequence[Sequence[Batch]],
        update: UpdateStage,
        times: list[ActionTime] | None = None,
    ) -> torch.Tensor:
        """Run the steps of a window, in which each stage updates its weights by itself after each step.

        No micro-batch is in the pipeline before or after the call, and every weight then has the updates of all steps.
        The call drops gradients that are there before it, and those of each step after their update.

        Args:
            steps: the mini-batches of each step, which every process has.
            update: the action U of the table. It is called for each stage of this process and each step. Every replica
                of a stage calls it, with the same gradients.
            times: list to which the times of this process's actions are appended.

        Returns:
            The loss and the 2-norm of the whole gradient of each step: (steps, 2), float64, the same on every process.

        Raises:
            UserError: the schedule is synchronous.
        """
        if not self.decision.runs_windows:
            raise UserError(
                f"train_window: the schedule {self.decision.config.schedule!r} updates all stages together; call "
                f"train_step, or use one of {', '.join(window_schedules())}"
            )
        self.parameters.zero_grad()
        micro_batches: list[MicroBatch] = []
        sizes: list[int] = []
        for number, batches in enumerate(steps):
            own = self._micro_batches(batches, self.step + number, len(micro_batches))
            sizes.append(len(own))
            micro_batches += own
        squares: list[list[torch.Tensor]] = [[] for _ in sizes]

        def update_stage(stage: int, step: int) -> None:
            parameters = list(self.parameters.models[stage].parameters.values())
            square = sum(sums_of_squares(gradients_of(parameters)), torch.zeros((), dtype=torch.float64))
            if self.world.leads(stage):
                squares[step].append(square)
            update(stage, step, square.sqrt())
            for parameter in parameters:
                parameter.grad = None

        table = self.decision.schedule(sizes)
        with self.forwards.keeping_random_state():
            result = self.executor.run(table, micro_batches, update_stage=update_stage, is_measured=times is not None)
        losses: list[list[torch.Tensor]] = [[] for _ in sizes]
        for index, outputs in result.outputs.items():
            losses[table.step_of[index]].append(outputs["loss"])
        numbers = begin_losses_and_norms(losses, squares, self.world)()
        self.step += len(sizes)
        self.window, self.stash_bytes = table, result.stash_bytes
        if times is not None:
            times.extend(result.times)
        return numbers

    def train_ahead(
        self,
        batches: Sequence[Batch],
        times: list[ActionTime] | None,
        update: Callable[[], None],
        update_stage: Callable[[int], None] | None = None,
    ) -> LossAndNorm:
        """Run `train_on` with an update that needs neither the loss nor the norm of the gradient.

        This process does not wait for the others: it updates as soon as its own gradients are complete, and can begin
        the next step. Only copies of tied parameters wait for their owner.

        Args:
            batches, times: as of `train_on`.
            update: called once the gradients of this process are complete.
            update_stage: only where `can_update_beside`. It is called for each stage of this process when the stage's
                gradients are complete, in a thread, while other stages run their backwards; `update` comes after all
                of these calls.

        Returns:
            A function, to be called before or soon after the end of the next step. It waits until every process has
            updated, and returns the loss and the norm of the gradient, (2,).
        """
        return self._train(batches, times, lambda _: update(), waits=False, update_stage=update_stage)

    @property
    def can_update_beside(self) -> bool:
        """Whether `train_ahead` takes `update_stage`."""
        return updates_beside(self.decision.full_table) is not None

    def _train(
        self,
        batches: Sequence[Batch],
        times: list[ActionTime] | None,
        update: Callable[[LossAndNorm], None] | None,
        *,
        waits: bool,
        update_stage: Callable[[int], None] | None = None,
    ) -> LossAndNorm:
        if self.decision.runs_windows:
            raise UserError(
                f"the schedule {self.decision.config.schedule!r} updates each stage by itself, after each step of a "
                "window: call train_window, or use a synchronous schedule, such as 1f1b"
            )
        self.parameters.replicas.begin()
        self.parameters.ties.begin()
        micro_batches = self.forwards.compared(self._micro_batches(batches, self.step))
        numbers: list[LossAndNorm] = []
        squares: list[torch.Tensor] = []
        table = self.decision.table_of_step(len(micro_batches), micro_batches[0].group_size, update_stage is not None)

        def update_beside(stage: int, _: int) -> None:
            assert update_stage is not None, "the table has no H"
            squares.extend(sums_of_squares(self.parameters.counted(stage)))
            update_stage(stage)

        def reduce(result: StepResult) -> None:
            entered.close()
            self.parameters.replicas.finish()
            self.parameters.ties.reduce_gradients()
            gradients = () if update is None or update_stage is not None else self.parameters.counted()
            loss = result.loss if self.world.place == 0 else None  # the ranks of a worker have the same
            numbers.append(begin_loss_and_norm(loss, gradients, self.world, squares))
            if waits:
                numbers[0]()
                if times is not None:  # the update after it starts in all processes at the same time
                    self.world.barrier()

        with ExitStack() as entered:
            entered.enter_context(keeping_weights(self.adapter.autocast))
            entered.enter_context(self.forwards.keeping_random_state())
            result = self.executor.run(
                table,
                micro_batches,
                StepOptions(loss_scale=self.loss_scale),
                reduce=reduce,
                update=None if update is None else lambda: update(*numbers),
                update_stage=update_beside,
                is_measured=times is not None,
            )
        if times is not None:
            times.extend(result.times)
        self.step += 1
        return numbers[0]

    def _micro_batches(self, batches: Sequence[Batch], step: int, first: int = 0) -> list[MicroBatch]:
        """The micro-batches of a training step, whose indices begin with `first`."""
        self.parameters.trainable.check(self.parameters.models)
        self.parameters.ties.refresh_copies()
        how, loss = (self.cutting, self.parameters.seed, step), self.decision.loss
        passes = self.forwards.log_probs, self.forwards.reference_log_probs
        batches = [loss.with_passes(batch, *passes) for batch in batches]
        micro_batches = make_micro_batches(self.adapter, batches, *how, first=first, loss=loss)
        if self._may_lack_overlap:
            self._may_lack_overlap = False
            if len(micro_batches) == 1:
                num_stages = self.decision.config.num_stages
                logger.warning(
                    f"num_micro_batches is 1 and num_stages is {num_stages}: one stage works at a time, and nothing "
                    f"overlaps; give num_micro_batches={4 * num_stages}, say, or 'auto' with an example of a mini-batch"
                )
        if not self._is_packing_verified and any(micro_batch.is_packed for micro_batch in micro_batches):
            self.decision.probe.require(self.adapter, Variant(packing=True))
            self.decision.verify_modes(packing=True)
            self._is_packing_verified = True
        return micro_batches
