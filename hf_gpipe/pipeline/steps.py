"""The steps of `Pipeline`: training, evaluation and generation, each a table that the executor runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters.autocast import keeping_weights
from hf_gpipe.adapters.dropout import default_generator
from hf_gpipe.adapters.peft import without_adapters
from hf_gpipe.errors import UserError
from hf_gpipe.model.packing import verify_packing
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.decision import Decision
from hf_gpipe.runtime.batches import share
from hf_gpipe.runtime.edges import Edges
from hf_gpipe.runtime.evaluation import Evaluation
from hf_gpipe.runtime.executor import Executor, StepResult
from hf_gpipe.runtime.first_pass import gathered_rows, with_comparison
from hf_gpipe.runtime.generation import Generator
from hf_gpipe.runtime.gradient_norm import (
    LossAndNorm,
    begin_loss_and_norm,
    begin_losses_and_norms,
    gradients_of,
    sums_of_squares,
)
from hf_gpipe.runtime.loss import Loss
from hf_gpipe.runtime.micro_batch import (
    Batch,
    LogitsCallback,
    MicroBatch,
    StepOptions,
    chunks_of,
    make_micro_batches,
)
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.runtime.visits import VisitingWeights
from hf_gpipe.schedule.asynchronous import ASYNCHRONOUS_SCHEDULES
from hf_gpipe.schedule.table import Schedule

logger = logging.getLogger(__name__)

Update = Callable[[torch.Tensor, torch.Tensor], None]
"""(the loss of the mini-batch, the norm of the whole model's gradient) -> None: uses the complete gradients in `.grad`.

Both are float64 scalars on the CPU, the same on every process; in the norm each tied parameter counts once."""

UpdateStage = Callable[[int, int, torch.Tensor], None]
"""(stage, number of the step in the window, norm of the stage's gradient) -> None: uses the stage's complete gradients
in `.grad`, and no others. The norm is a float64 scalar on the stage's device."""


@dataclass(eq=False)
class Steps:
    """The part of a pipeline that runs tables.

    Attributes:
        decision: the model, its cut, and the tables.
        parameters: of this process's stages.
        stages: of this process, by number.
        edges: at the ends of these stages.
        executor: of these stages.
        visits: of the weights of each of these stages.
        num_micro_batches: of a mini-batch.
        length_bucketing, packing: as of `Pipeline`.
        has_new_adapters: whether the model before its training is there, as the model without its PEFT adapters.
        step, window, stash_bytes, loss_scale: as of `Pipeline`.
    """

    decision: Decision
    parameters: StageParameters
    stages: dict[int, Stage]
    edges: Edges
    executor: Executor
    visits: Mapping[int, VisitingWeights]
    num_micro_batches: int
    length_bucketing: bool
    packing: bool
    has_new_adapters: bool
    step: int = 0
    window: Schedule | None = None
    stash_bytes: int = 0
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        self.adapter, self.world = self.decision.adapter, self.decision.world
        self._is_packing_verified = self.packing
        self._num_evaluations = 0
        has_one = self.decision.config.num_stages > 1 and self.decision.given.num_micro_batches == 1
        self._may_lack_overlap = self.world.is_reporter and has_one and not self.decision.is_asynchronous

    # ------------------------------------------------------------------ training

    def train_step(
        self,
        batch: Batch | Sequence[Batch] | None,
        times: list[ActionTime] | None = None,
        update: Update | None = None,
    ) -> torch.Tensor:
        """Forward and backward of one mini-batch; gradients are added to `.grad`, and `update` may use them.

        Every process calls it; the mini-batch of the main process is used and the others may pass None.

        Args:
            batch: tensors with the same number of rows: input_ids (N, T), attention_mask (N, T), labels (N, T), -100
                where there is no target; or a sequence of such mini-batches, accumulated in one pass. Of a model that
                does not read text: labels, and what its forward takes.
            times: list to which the times of this process's actions are appended.
            update: the action U of the table, such as to clip and to step an optimizer. It is called in every process
                with the loss and the norm of the gradient, once the gradients are complete; its errors are raised here.
                None: the caller updates.

        Returns:
            The mean loss per target token of the whole mini-batch, a float tensor on every process.
        """
        batches = [batch] if isinstance(batch, Mapping) else batch
        return self.train_on(share(batches, self.world), times, update)

    def train_on(
        self, batches: Sequence[Batch], times: list[ActionTime] | None = None, update: Update | None = None
    ) -> torch.Tensor:
        """`train_step` for mini-batches that every process already has."""
        numbers = self._train(batches, times, _waiting(update), waits=True)
        self.step += 1
        return numbers()[0]

    def train_window(
        self,
        steps: Sequence[Sequence[Batch]],
        update: UpdateStage,
        times: list[ActionTime] | None = None,
    ) -> torch.Tensor:
        """Run steps under an asynchronous schedule, in which each stage updates its weights after each step by itself.

        The pipeline is empty before it and after it, and every weight then has had the updates of all steps. Gradients
        that are there are dropped before, and those of each step after its update.

        Args:
            steps: the mini-batches of each step, which every process has.
            update: the action U of the table. It is called for each stage of this process and each step, on every
                replica of the stage, whose gradients are then the same.
            times: list to which the times of this process's actions are appended.

        Returns:
            Of each step the loss and the 2-norm of the whole gradient: (steps, 2), float64, the same on every process.

        Raises:
            UserError: the schedule is synchronous.
        """
        if not self.decision.is_asynchronous:
            raise UserError(
                f"train_window: the schedule {self.decision.config.schedule!r} updates all stages together; call "
                f"train_step, or use one of {', '.join(ASYNCHRONOUS_SCHEDULES)}"
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
        with self._keeping_random_state():
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
        self, batches: Sequence[Batch], times: list[ActionTime] | None, update: Callable[[], None]
    ) -> LossAndNorm:
        """`train_on` for an update that needs neither the loss nor the norm of the gradient.

        This process does not wait for the others: it updates as soon as its own gradients are complete, and can begin
        the next step. (Copies of tied parameters wait for their owner all the same.)

        Returns:
            Waits until every process has updated, and returns the loss and the norm of the gradient, (2,). It must be
            called before or soon after the end of the next step.
        """
        numbers = self._train(batches, times, lambda _: update(), waits=False)
        self.step += 1
        return numbers

    def measure_window(self, steps: Sequence[Sequence[Batch]], update: UpdateStage) -> list[ActionTime]:
        """Measure a window that does not count: `step` stays as it is. As `train_window`; the effects of `update` stay.

        Returns:
            When each action ran on this process.
        """
        times: list[ActionTime] = []
        self.train_window(steps, update, times)
        self.step -= len(steps)
        return times

    def measure_on(self, batches: Sequence[Batch], update: Update | None = None) -> list[ActionTime]:
        """Measure a training step that does not count: its gradients are dropped and `step` stays as it is.

        Args:
            batches: as for `train_on`.
            update: as for `train_step`; its effects stay.

        Returns:
            When each action ran on this process.
        """
        times: list[ActionTime] = []
        self._train(batches, times, _waiting(update), waits=True)
        self.parameters.zero_grad()
        return times

    def _train(
        self,
        batches: Sequence[Batch],
        times: list[ActionTime] | None,
        update: Callable[[LossAndNorm], None] | None,
        *,
        waits: bool,
    ) -> LossAndNorm:
        if self.decision.is_asynchronous:
            raise UserError(
                f"the schedule {self.decision.config.schedule!r} updates each stage by itself, after each step of a "
                "window: call train_window, or use a synchronous schedule, such as 1f1b"
            )
        self.parameters.replicas.begin()
        self.parameters.ties.begin()
        micro_batches = self._compared(self._micro_batches(batches, self.step))
        numbers: list[LossAndNorm] = []

        def reduce(result: StepResult) -> None:
            entered.close()
            self.parameters.replicas.finish()
            self.parameters.ties.reduce_gradients()
            gradients = () if update is None else self.parameters.counted()
            numbers.append(begin_loss_and_norm(self._own_loss(result), gradients, self.world))
            if waits:
                numbers[0]()
                if times is not None:  # the update after it starts in all processes at the same time
                    self.world.barrier()

        with ExitStack() as entered:
            entered.enter_context(keeping_weights(self.adapter.autocast))
            entered.enter_context(self._keeping_random_state())
            result = self.executor.run(
                self.decision.schedule(len(micro_batches), chunks=chunks_of(micro_batches)),
                micro_batches,
                StepOptions(loss_scale=self.loss_scale),
                reduce=reduce,
                update=None if update is None else lambda: update(*numbers),
                is_measured=times is not None,
            )
        if times is not None:
            times.extend(result.times)
        return numbers[0]

    def _own_loss(self, result: StepResult) -> torch.Tensor | None:
        """The share of the loss that this process adds; the ranks of a worker have the same."""
        return result.loss if self.world.place == 0 else None

    def _micro_batches(self, batches: Sequence[Batch], step: int, first: int = 0) -> list[MicroBatch]:
        """The micro-batches of a training step, whose indices begin with `first`."""
        self.parameters.trainable.check(self.parameters.models)
        self.parameters.ties.refresh_copies()
        micro_batches = make_micro_batches(
            self.adapter,
            [self._with_passes(batch) for batch in batches],
            self.num_micro_batches,
            self.parameters.seed,
            step,
            first=first,
            length_bucketing=self.length_bucketing,
            packing=self.packing,
            is_compiled=self.decision.config.torch_compile,
            sequence_chunks=self.decision.config.sequence_chunks,
            chunk_taper=self.decision.config.chunk_taper,
            loss=self.decision.loss,
        )
        if self._may_lack_overlap:
            self._may_lack_overlap = False
            if len(micro_batches) == 1:
                num_stages = self.decision.config.num_stages
                logger.warning(
                    f"num_micro_batches is 1 and num_stages is {num_stages}: one stage works at a time, and nothing "
                    f"overlaps; give num_micro_batches={4 * num_stages}, say, or 'auto' with an example of a mini-batch"
                )
        if not self._is_packing_verified and any(one.is_packed for one in micro_batches):
            verify_packing(self.adapter)
            if chunks_of(micro_batches) > 1:
                self.decision.verify_chunks(packing=True)
            self._is_packing_verified = True
        return micro_batches

    def _compared(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with what a first pass finds, if the loss needs one."""
        loss, last = self.decision.loss, self.decision.config.num_stages - 1
        if not loss.compares_units:
            return micro_batches
        with self._keeping_random_state():
            own = self._rows(micro_batches, StepOptions(is_first_pass=True))
        if last not in self.stages:
            return micro_batches
        rows = gathered_rows(own, micro_batches, partial(self.parameters.replicas.total, last))
        dtype = next((one.dtype for one in own.values()), rows.dtype)
        return with_comparison(micro_batches, rows.to(dtype), loss, self.stages[last].device)

    def _rows(self, micro_batches: list[MicroBatch], options: StepOptions) -> dict[int, torch.Tensor]:
        """The rows of each micro-batch as the loss reads them, (B, E), by its number, where this process has it."""
        table = self.decision.schedule(len(micro_batches), "forward_only")
        outputs = self.executor.run(table, micro_batches, options).outputs
        return {index: one["rows"] for index, one in outputs.items()}

    @contextmanager
    def _keeping_random_state(self) -> Iterator[None]:
        """Context manager after which the devices' generators are as before: dropout seeds them."""
        generators = [default_generator(device) for device in set(self.world.stage_devices.values())]
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    # ------------------------------------------------------------------ evaluation and generation

    def eval_step(self, batch: Batch | None) -> Evaluation:
        """Loss of a mini-batch without gradients, row by row. Every process calls it and gets the same result."""
        (rows,) = share(None if batch is None else [batch], self.world)
        return self.eval_on(rows)

    def eval_on(self, rows: Batch, on_logits: LogitsCallback | None = None) -> Evaluation:
        """`eval_step` for a mini-batch that every process already has.

        Args:
            rows: the mini-batch; the documents of a flattened one are its rows.
            on_logits: called in the process that has the micro-batch on the last stage, in order, with its logits
                (B, T, V) and its inputs; columns of padding are cut off from both.
        """
        return self._evaluate(self._with_passes(self.adapter.as_rows(rows)), StepOptions(on_logits=on_logits))

    def log_probs(self, rows: Batch, *, with_adapters: bool = True) -> torch.Tensor:
        """The log-probability of each row of a mini-batch that every process already has: the sum over its targets.

        Every process calls it and gets the same result. There is no dropout.

        Args:
            rows: the mini-batch.
            with_adapters: whether the PEFT adapters add to their layers; without them it is the base model's.

        Returns:
            (N,) in float64, on the CPU.
        """
        with self._adapters_off(not with_adapters):
            return self._evaluate(self.adapter.as_rows(rows), StepOptions(is_likelihood_only=True)).row_nll.neg()

    def embed(self, rows: Batch) -> torch.Tensor:
        """The embeddings of the rows of a mini-batch that every process already has, by an `EmbeddingLoss`.

        Every process calls it and gets the same result. There is no dropout.

        Returns:
            (N, D) in float64, on the CPU.

        Raises:
            UserError: the pipeline has another loss.
        """
        if type(self.decision.loss).embed is Loss.embed:
            raise UserError(
                f"embed: the loss is a {type(self.decision.loss).__name__}, which reads no embeddings; give the "
                "Pipeline loss=EmbeddingLoss() of hf_gpipe.training.embedding_loss"
            )
        micro_batches = self._in_micro_batches(rows)
        with self._in_evaluation():
            own = self._rows(micro_batches, StepOptions(is_first_pass=True))
        return gathered_rows(own if self.world.place == 0 else {}, micro_batches, self.world.all_reduce)

    def token_log_probs(self, rows: Batch, *, with_adapters: bool = True) -> torch.Tensor:
        """The log-probability of the target after each position of a mini-batch that every process already has.

        Every process calls it and gets the same result. There is no dropout.

        Args:
            rows: the mini-batch, of a decoder-only model.
            with_adapters: whether the PEFT adapters add to their layers.

        Returns:
            (N, T) in float64, on the CPU, 0 where there is no target; of logits as the loss sees them.
        """
        micro_batches = self._in_micro_batches(rows)
        with self._adapters_off(not with_adapters), self._in_evaluation():
            own = self._rows(micro_batches, StepOptions(is_of_tokens=True))
        length = rows["labels"].shape[1]
        own = {index: F.pad(one, (0, length - one.shape[1])) for index, one in own.items()}
        return gathered_rows(own if self.world.place == 0 else {}, micro_batches, self.world.all_reduce)

    @contextmanager
    def _adapters_off(self, is_off: bool) -> Iterator[None]:
        """Context manager in which the PEFT adapters, if any, add nothing."""
        with ExitStack() as disabled:
            if self.adapter.peft is not None and is_off:
                for stage in self.parameters.models.values():
                    disabled.enter_context(without_adapters(stage.model))
            yield

    def _with_passes(self, batch: Batch) -> Batch:
        """The mini-batch with what the loss reads of forwards before the step."""
        return self.decision.loss.with_passes(batch, self.log_probs, self._reference_log_probs)

    def _reference_log_probs(self, rows: Batch) -> torch.Tensor:
        if not self.has_new_adapters:
            raise UserError(
                "the loss needs the log-probabilities of the model before its training, and without new PEFT adapters, "
                "which could be turned off, that model is gone; compute them first, by Pipeline.log_probs, and give "
                "them as the entry 'ref_logps' of each mini-batch"
            )
        return self.log_probs(rows, with_adapters=False)

    def _in_micro_batches(self, rows: Batch) -> list[MicroBatch]:
        """The micro-batches of a mini-batch in evaluation."""
        self.parameters.ties.refresh_copies()
        # Its number names its mini-batch in metrics; there is no dropout to seed.
        self._num_evaluations += 1
        return make_micro_batches(
            self.adapter,
            [rows],
            self.num_micro_batches,
            self.parameters.seed,
            self._num_evaluations,
            loss=self.decision.loss,
        )

    def _evaluate(self, rows: Batch, options: StepOptions) -> Evaluation:
        micro_batches = self._in_micro_batches(rows)
        with self._in_evaluation():
            if not options.is_likelihood_only:
                with torch.no_grad():
                    micro_batches = self._compared(micro_batches)
            name = "vocab_forward_only" if self.decision.full_table.divides_head else "forward_only"
            table = self.decision.schedule(len(micro_batches), name)
            outputs = self.executor.run(table, micro_batches, options).outputs
        outputs = outputs if self.world.place == 0 else {}  # the ranks of a worker have the same
        return Evaluation.gathered(outputs, [one.num_rows for one in micro_batches], self.world)

    def generate(self, **inputs: Any) -> Any:
        """Generate token ids like the plain model's `generate`: by search or sampling, with a cache.

        Every process calls it, the arguments of the main process are used and the others may pass none, and every
        process gets the same result. Sampling continues the main process's random numbers.

        Args:
            inputs: keyword arguments of transformers' GenerationMixin.generate: input_ids (B, T), attention_mask
                (B, T), max_new_tokens, num_beams, do_sample, generation_config ...

        Returns:
            Token ids of (B * num_return_sequences, T'), or with return_dict_in_generate transformers' output object.

        Raises:
            UserError: an argument is unknown or not supported.
        """
        self.parameters.ties.refresh_copies()
        with self._in_evaluation():
            return self.generator.generate(inputs)

    @cached_property
    def generator(self) -> Generator:
        """Runs `generate` on the stages of this process."""
        models, partition = self.parameters.models, self.decision.partition
        heads = {number: stage.head for number, stage in self.stages.items() if stage.head is not None}
        return Generator(self.adapter, partition, models, self.edges, self.world, self.visits, heads)

    @contextmanager
    def _in_evaluation(self) -> Iterator[None]:
        """Context manager that sets all stages to evaluation mode, without dropout."""
        for stage in self.stages.values():
            stage.model.model.eval()
        try:
            yield
        finally:
            for stage in self.stages.values():
                stage.model.model.train()


def _waiting(update: Update | None) -> Callable[[LossAndNorm], None] | None:
    """An update that gets the loss and the norm once they are there."""
    return None if update is None else lambda numbers: update(*numbers())
