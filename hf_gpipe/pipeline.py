"""`Pipeline`: a Hugging Face model, its partition over stages, and the executor that trains it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import is_known_exact
from hf_gpipe.adapters.autocast import Autocast, keeping_weights
from hf_gpipe.adapters.dropout import default_generator
from hf_gpipe.adapters.peft import without_adapters
from hf_gpipe.adapters.whole import refresh, whole_model
from hf_gpipe.building import ModelSource, Source, Trained, boundary_dtype, make_stages
from hf_gpipe.errors import UserError
from hf_gpipe.exactness import verify, verify_packing
from hf_gpipe.look import html_of, text_of
from hf_gpipe.partition import partition as cut
from hf_gpipe.planner.advice import advising
from hf_gpipe.planner.decide import Planning
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.preflight import compare_with_machines
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.recipe import ModelSection, PipelineConfig, TrainingSection
from hf_gpipe.runtime.batches import share
from hf_gpipe.runtime.calls import by_every_process
from hf_gpipe.runtime.custom_loss import Loss, RowLoss, check_loss, whole_logits
from hf_gpipe.runtime.device_choice import DeviceChoice, processes_for
from hf_gpipe.runtime.edges import connect
from hf_gpipe.runtime.evaluation import Evaluation
from hf_gpipe.runtime.executor import Executor, StepResult
from hf_gpipe.runtime.generation import Generator
from hf_gpipe.runtime.gradient_norm import (
    LossAndNorm,
    begin_loss_and_norm,
    begin_losses_and_norms,
    sums_of_squares,
)
from hf_gpipe.runtime.job import Job
from hf_gpipe.runtime.loss import TokenLoss
from hf_gpipe.runtime.micro_batch import Batch, LogitsCallback, MicroBatch, StepOptions, make_micro_batches
from hf_gpipe.runtime.packing import as_rows
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.runtime.ties import trained_by_several
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.runtime.topology import Topology
from hf_gpipe.schedule.asynchronous import ASYNCHRONOUS_SCHEDULES
from hf_gpipe.schedule.builders import build
from hf_gpipe.schedule.file import recompute_under
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.stage_parameters import StageParameters

logger = logging.getLogger(__name__)

__all__ = ["Evaluation", "ModelSource", "Pipeline", "Update", "UpdateStage"]

Update = Callable[[torch.Tensor, torch.Tensor], None]
"""(the loss of the mini-batch, the norm of the whole model's gradient) -> None: uses the complete gradients in `.grad`.

Both are float64 scalars on the CPU, the same on every process; in the norm each tied parameter counts once."""

UpdateStage = Callable[[int, int, torch.Tensor], None]
"""(stage, number of the step in the window, norm of the stage's gradient) -> None: uses the stage's complete gradients
in `.grad`, and no others. The norm is a float64 scalar on the stage's device."""


class Pipeline(StageParameters):
    """A model trained by pipeline parallelism, exactly like the plain model (GPipe, arXiv 1811.06965).

    In one process without a launcher all stages live in it. Under torchrun, `accelerate launch` or
    `python -m hf_gpipe.train` every process creates the same Pipeline and holds its own stages.

    Args:
        model: a PreTrainedModel (its weights are taken, and shared where the device is the same), a configuration
            (weights are initialised), or a Hub id or directory (weights are loaded).
        num_stages, num_micro_batches, schedule, recompute, partition: as in `PipelineConfig`, in place of
            `config`. A `schedule` that ends in .txt is the path of a table, which the main process reads: it has this
            many stages, processes and micro-batches (times `accumulation`), and its R say what is recomputed.
        seed: of initial weights and dropout.
        config: how the model is cut and run. The planner decides the values "auto", and a partition by cost, from
            `plan_inputs`.
        plan_inputs: an example of a mini-batch and facts about the optimizer, for the planner.
        dtype: type of the weights, or its name, such as "bfloat16"; None or "auto": the model's own, or float32 for a
            configuration without one.
        attn_implementation: "eager", "sdpa" ...; None: transformers chooses.
        trust_remote_code: whether a Hub model may run Python code of its own.
        config_overrides: values of the model's configuration to change; only with an id or directory.
        label_smoothing: share of the target's probability that is spread over the vocabulary.
        logit_clipping: the loss of training is that of logits.clamp(-c, c), with c this number; evaluation, generation
            and the saved model do not clip. None: no clipping.
        loss: in place of the cross-entropy of the target tokens: a `LogitsLoss` or a `RowLoss`.
        depth_scaled_feed_forward: whether the last projection of each feed-forward block starts 1/L times as large, L
            being the layers of its stack; for a configuration only, whose weights are new.
        device: where this process computes, in place of the config's `device` and `devices`. A list, such as
            ["cuda:0", "cuda:1"], names the devices of this machine. Each of its processes takes an equal part, and
            spreads its stages over it.
        peft_config: a peft.LoraConfig to add adapters; everything else is frozen. A model that has PEFT adapters
            already, or is a PeftModel, is taken as it is.
        quantization_config: a transformers.BitsAndBytesConfig: linear layers are quantised while they are loaded, each
            as soon as it is read, and only adapters can be trained on them. A model or checkpoint that bitsandbytes has
            quantised already is taken as it is. Needs the package bitsandbytes.
        autocast: torch.bfloat16 or torch.float16: every forward computes under torch.autocast, in training, evaluation
            and generation; weights and their gradients keep their own type. None: everything computes in that type.
        length_bucketing: whether training sorts the rows of a mini-batch by length before it is cut, and cuts it so
            that the largest micro-batch has as few tokens, padding included, as possible.
        packing: whether training packs the rows of a mini-batch: each micro-batch is one row, of documents that do not
            see each other, without padding. Loss and gradients stay those of the rows. Decoder-only models alone.
        settings: other fields of `PipelineConfig` (`memory` also as a number of bytes, `torch_compile` also as the name
            of a backend) and of `PlanInputs` (`example`, `optim`, `accumulation`), in place of the two objects.

    Attributes:
        config: the `PipelineConfig` without "auto".
        has_new_adapters: whether the model has PEFT adapters that `peft_config` has added.
        planned: the planner's choice and the reason, in one line; None if it had nothing to decide.
        links: lines about the links between machines, measured and as the planner assumes them; empty on one machine.
        step: optimizer steps begun; dropout depends on it.
        window: the table of the last window that has run under an asynchronous schedule.
        stash_bytes: the most that old versions of weights have held in this process in that window.
        loss_scale: factor of the loss before backward, and so of the gradients, so that small ones are not 0 in float16
            (Micikevicius et al. 2018, section 3.2). Whoever sets it must divide the gradients by it.

    Raises:
        UserError, or a subclass: an argument is not supported.
    """

    def __init__(
        self,
        model: ModelSource,
        num_stages: int | str | None = None,
        num_micro_batches: int | str | None = None,
        schedule: str | None = None,
        recompute: str | Sequence[str | int] | None = None,
        partition: str | Sequence[int] | None = None,
        seed: int = TrainingSection.seed,
        *,
        config: PipelineConfig | None = None,
        plan_inputs: PlanInputs | None = None,
        dtype: torch.dtype | str | None = None,
        attn_implementation: str | None = ModelSection.attn_implementation,
        trust_remote_code: bool = ModelSection.trust_remote_code,
        config_overrides: Mapping[str, Any] | None = None,
        label_smoothing: float = TrainingSection.label_smoothing_factor,
        logit_clipping: float | None = TrainingSection.logit_clipping,
        loss: Loss | None = None,
        depth_scaled_feed_forward: bool = ModelSection.depth_scaled_feed_forward,
        device: DeviceChoice = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        autocast: torch.dtype | None = None,
        length_bucketing: bool = False,
        packing: bool = False,
        **settings: Any,
    ) -> None:
        of_inputs = {one.name: settings.pop(one.name) for one in fields(PlanInputs) if one.name in settings}
        if plan_inputs is not None and of_inputs:
            raise UserError(f"plan_inputs and {', '.join(of_inputs)} are given; put all into plan_inputs")
        given = PipelineConfig.of(
            config,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            recompute=recompute,
            partition=partition,
            **settings,
        )
        self._plan_inputs = plan_inputs or PlanInputs(**of_inputs)
        if packing:
            self._plan_inputs = replace(self._plan_inputs, packing=True)
        self._loss: Loss = TokenLoss(label_smoothing, logit_clipping)
        if loss is not None:
            check_loss(loss, label_smoothing, logit_clipping, packing=packing)
            self._loss = loss
        Job.join()
        processes = processes_for(given, device)
        # Read before any weight is made: a table that cannot be run costs no time.
        accumulation = self._plan_inputs.accumulation
        table = processes.from_reader(lambda: given.table(accumulation, processes.num_processes))
        if table is not None:
            given = replace(given, recompute=recompute_under(table, given.recompute))
            self._plan_inputs = replace(self._plan_inputs, tables={given.schedule: table})
        self._source = Source.open(
            model,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            config_overrides=config_overrides,
            peft_config=peft_config,
            autocast=None if autocast is None else Autocast(autocast, processes.device),
            depth_scaled_feed_forward=depth_scaled_feed_forward,
            quantization_config=quantization_config,
        )
        self.adapter, self.peft = self._source.adapter, self._source.peft
        self.has_new_adapters = self.peft is not None and not self._source.has_peft_layers
        if packing:
            verify_packing(self.adapter)
        self._is_packing_verified = packing
        self._planning = Planning(self._plan_inputs, self.adapter, self.peft, self._loss.planned, processes)
        self.config, self.planned = self._planning.decide(given)
        config = self.config
        config.check_micro_batches(accumulation)
        sent = boundary_dtype(config.boundary_dtype, self.adapter)
        self.num_stages = config.num_stages
        self.num_micro_batches = config.num_micro_batches
        self.schedule_name = config.schedule
        self.recompute = config.recompute
        self.partition = cut(len(self.adapter.layers), config.num_stages, config.partition)
        recomputed = Recompute.parse(config.recompute, config.num_stages)
        placement = config.placed(config.schedule) if table is None else table.placement
        self.topology = Topology.of(processes, placement)
        self.links = compare_with_machines(self._planning, config, self.topology)
        self._table = None if table is None else replace(table, placement=self.topology.placement)
        self._table_recompute = recomputed.of_table
        self.length_bucketing = length_bucketing
        self.packing = packing
        self.step = self.stash_bytes = 0
        self.window: Schedule | None = None
        self.loss_scale = 1.0

        table = self.schedule(self.num_micro_batches * accumulation)
        if table.split and not is_known_exact(self.adapter):
            given_config, model_class = self.adapter.given_config, self.adapter.model_class
            verify(given_config, model_class, trust_remote_code=trust_remote_code, splits_backward=True)
        models = {
            stage: self._source.stage_model(self.partition[stage], where, seed)
            for stage, where in self.topology.stage_devices.items()
        }
        self._source = replace(self._source, model=None)
        for stage, stage_model in models.items():
            if stage in recomputed.block_stages:
                stage_model.checkpoint_blocks()
            if config.torch_compile:
                stage_model.compile_blocks(config.torch_compile_backend)
        super().__init__(models, self.topology, config.zero, seed, self.peft)
        if self.is_asynchronous:
            self._check_no_tie()
        self._trained = Trained.of(self.models, self.adapter, self.topology)
        self.stages = make_stages(self.models, self.adapter, self._trained.layers, self._loss)
        if self.num_stages - 1 in self.models and (reason := whole_logits(self.adapter, self._loss)):
            logger.warning(f"training makes the logits of a micro-batch whole: {reason}")
        self._edges = connect(
            self.topology, lambda stage, name: self.adapter.carry_dtype(self.partition[stage][0], name), sent
        )
        self._executor = Executor(self.stages, self._edges, self.topology.rank, self._replicas)
        self._executor.prepare(table)

    def __repr__(self) -> str:
        return text_of(self.adapter, self.config, self.partition, self.topology, self.models)

    def _repr_html_(self) -> str:
        return html_of(repr(self), self.schedule(self.num_micro_batches))

    # ------------------------------------------------------------------ training and evaluation

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
                where there is no target; or a sequence of such mini-batches, accumulated in one pass.
            times: list to which the times of this process's actions are appended.
            update: the action U of the table, such as to clip and to step an optimizer. It is called in every process
                with the loss and the norm of the gradient, once the gradients are complete; its errors are raised here.
                None: the caller updates.

        Returns:
            The mean loss per target token of the whole mini-batch, a float tensor on every process.
        """
        batches = [batch] if isinstance(batch, Mapping) else batch
        return self.train_on(share(batches, self.topology), times, update)

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
            update: the action U of the table. It is called for each stage of this process and each step.
            times: list to which the times of this process's actions are appended.

        Returns:
            Of each step the loss and the 2-norm of the whole gradient: (steps, 2), float64, the same on every process.

        Raises:
            UserError: the schedule is synchronous.
        """
        if not self.is_asynchronous:
            raise UserError(
                f"train_window: the schedule {self.schedule_name!r} updates all stages together; call train_step, or "
                f"use one of {', '.join(ASYNCHRONOUS_SCHEDULES)}"
            )
        self.zero_grad()
        micro_batches: list[MicroBatch] = []
        sizes: list[int] = []
        for number, batches in enumerate(steps):
            own = self._micro_batches(batches, self.step + number, len(micro_batches))
            sizes.append(len(own))
            micro_batches += own
        squares: list[list[torch.Tensor]] = [[] for _ in sizes]

        def update_stage(stage: int, step: int) -> None:
            parameters = list(self.models[stage].parameters.values())
            square = sum(sums_of_squares(parameters), torch.zeros((), dtype=torch.float64))
            squares[step].append(square)
            update(stage, step, square.sqrt())
            for parameter in parameters:
                parameter.grad = None

        table = self.schedule(sizes)
        with self._keeping_random_state():
            result = self._executor.run(table, micro_batches, update_stage=update_stage, is_measured=times is not None)
        losses: list[list[torch.Tensor]] = [[] for _ in sizes]
        for index, outputs in result.outputs.items():
            losses[table.step_of[index]].append(outputs["loss"])
        numbers = begin_losses_and_norms(losses, squares, self.topology)()
        self.step += len(sizes)
        self.window, self.stash_bytes = table, result.stash_bytes
        if times is not None:
            times.extend(result.times)
        return numbers

    @property
    def is_asynchronous(self) -> bool:
        """Whether each stage updates its weights by itself, so that steps run in windows."""
        return self.schedule_name in ASYNCHRONOUS_SCHEDULES

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
        self.zero_grad()
        return times

    def _train(
        self,
        batches: Sequence[Batch],
        times: list[ActionTime] | None,
        update: Callable[[LossAndNorm], None] | None,
        *,
        waits: bool,
    ) -> LossAndNorm:
        if self.is_asynchronous:
            raise UserError(
                f"the schedule {self.schedule_name!r} updates each stage by itself, after each step of a window: call "
                "train_window, or use a synchronous schedule, such as 1f1b"
            )
        self._replicas.begin()
        micro_batches = self._micro_batches(batches, self.step)
        numbers: list[LossAndNorm] = []

        def reduce(result: StepResult) -> None:
            entered.close()
            self._replicas.finish()
            self.ties.reduce_gradients()
            parameters = () if update is None else self._counted_parameters()
            numbers.append(begin_loss_and_norm(result.loss, parameters, self.topology))
            if waits:
                numbers[0]()
                if times is not None:  # the update after it starts in all processes at the same time
                    self.topology.barrier()

        with ExitStack() as entered:
            entered.enter_context(keeping_weights(self.adapter.autocast))
            entered.enter_context(self._keeping_random_state())
            result = self._executor.run(
                self.schedule(len(micro_batches)),
                micro_batches,
                StepOptions(loss_scale=self.loss_scale),
                reduce=reduce,
                update=None if update is None else lambda: update(*numbers),
                is_measured=times is not None,
            )
        if times is not None:
            times.extend(result.times)
        return numbers[0]

    def _micro_batches(self, batches: Sequence[Batch], step: int, first: int = 0) -> list[MicroBatch]:
        """The micro-batches of a training step, whose indices begin with `first`."""
        self._trained.check(self.models, self.peft)
        self.ties.refresh_copies()
        micro_batches = make_micro_batches(
            self.adapter,
            [self._with_reference(batch) for batch in batches],
            self.num_micro_batches,
            self.seed,
            step,
            first=first,
            length_bucketing=self.length_bucketing,
            packing=self.packing,
            is_compiled=self.config.torch_compile,
            loss=self._loss,
        )
        if not self._is_packing_verified and any(one.is_packed for one in micro_batches):
            verify_packing(self.adapter)
            self._is_packing_verified = True
        return micro_batches

    def _check_no_tie(self) -> None:
        """Raise UserError, on every process, where stages that update by themselves would train one parameter."""
        for name, stages in trained_by_several(self.models, self.topology).items():
            raise UserError(
                f"schedule {self.schedule_name!r}: {name} is tied, stages {stages} train it, and each of them would "
                "update it at another time; use a model whose weights are not tied (tie_word_embeddings: false), a "
                "partition that puts its layers into one stage, or a synchronous schedule, such as 1f1b"
            )

    @contextmanager
    def _keeping_random_state(self) -> Iterator[None]:
        """Context manager after which the devices' generators are as before: dropout seeds them."""
        generators = [default_generator(device) for device in set(self.topology.stage_devices.values())]
        states = [generator.get_state() for generator in generators]
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def eval_step(self, batch: Batch | None) -> Evaluation:
        """Loss of a mini-batch without gradients, row by row. Every process calls it and gets the same result."""
        (rows,) = share(None if batch is None else [batch], self.topology)
        return self.eval_on(rows)

    def eval_on(self, rows: Batch, on_logits: LogitsCallback | None = None) -> Evaluation:
        """`eval_step` for a mini-batch that every process already has.

        Args:
            rows: the mini-batch; the documents of a flattened one are its rows.
            on_logits: called in the process that has the micro-batch on the last stage, in order, with its logits
                (B, T, V) and its inputs; columns of padding are cut off from both.
        """
        return self._evaluate(self._with_reference(as_rows(rows)), StepOptions(on_logits=on_logits))

    def log_probs(self, rows: Batch, *, with_adapters: bool = True) -> torch.Tensor:
        """The log-probability of each row of a mini-batch that every process already has: the sum over its targets.

        Every process calls it and gets the same result. There is no dropout.

        Args:
            rows: the mini-batch.
            with_adapters: whether the PEFT adapters add to their layers; without them it is the base model's.

        Returns:
            (N,) in float64, on the CPU.
        """
        options = StepOptions(is_likelihood_only=True)
        with ExitStack() as disabled:
            if self.peft is not None and not with_adapters:
                for stage in self.models.values():
                    disabled.enter_context(without_adapters(stage.model))
            return self._evaluate(as_rows(rows), options).row_nll.neg()

    def _with_reference(self, batch: Batch) -> Batch:
        """The mini-batch with the entry "ref_logps", if the loss needs it."""
        if not isinstance(self._loss, RowLoss) or not self._loss.needs_reference or "ref_logps" in batch:
            return batch
        if not self.has_new_adapters:
            raise UserError(
                "the loss needs the log-probabilities of the model before its training, and without new PEFT adapters, "
                "which could be turned off, that model is gone; compute them first, by Pipeline.log_probs, and give "
                "them as the entry 'ref_logps' of each mini-batch"
            )
        return {**batch, "ref_logps": self.log_probs(batch, with_adapters=False)}

    def _evaluate(self, rows: Batch, options: StepOptions) -> Evaluation:
        self.ties.refresh_copies()
        micro_batches = make_micro_batches(
            self.adapter, [rows], self.num_micro_batches, self.seed, self.step, loss=self._loss
        )
        with self._in_evaluation():
            table = self.schedule(len(micro_batches), "forward_only")
            outputs = self._executor.run(table, micro_batches, options).outputs
        return Evaluation.gathered(outputs, [one.num_rows for one in micro_batches], self.topology)

    @by_every_process
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
        self.ties.refresh_copies()
        with self._in_evaluation():
            return self._generator.generate(inputs)

    @cached_property
    def _generator(self) -> Generator:
        return Generator(self.adapter, self.partition, self.models, self._edges, self.topology)

    def schedule(self, num_micro_batches: int | Sequence[int], name: str | None = None) -> Schedule:
        """The table for this many micro-batches; by default that of training.

        Args:
            num_micro_batches: of an asynchronous schedule it may be a list, with the number of each step of a window.
            name: of another schedule.

        Raises:
            ScheduleError: the table was read from a file and has fewer.
        """
        steps = None if isinstance(num_micro_batches, int) else num_micro_batches
        total = num_micro_batches if isinstance(num_micro_batches, int) else sum(num_micro_batches)
        if self._table is not None and name is None:
            return self._table.of_first(total)
        return build(
            name or self.schedule_name,
            self.num_stages,
            total,
            self.topology.placement,
            self._table_recompute,
            steps=steps,
        )

    def plan(self, batch: Batch | None = None) -> Plan:
        """Return the planner's prediction of a step of this pipeline, on the device of this process.

        Args:
            batch: the step's only mini-batch, as `train_step` takes it; None: the constructor's `example`, accumulated.

        Raises:
            UserError: there is neither, or the size of the optimizer's state is not known.
        """
        config, inputs = self.config, self._plan_inputs
        if batch is not None:
            inputs = replace(inputs, example=batch, accumulation=1)
            if self._table is not None:
                # With fewer micro-batches the table recomputes less.
                table = self._table.of_first(self.num_micro_batches)
                if config.recompute != "block":
                    config = replace(config, recompute=recompute_under(table, "stage"))
                inputs = replace(inputs, tables={config.schedule: table})
        return replace(self._planning, inputs=inputs).planner(config).plan(config)

    # ------------------------------------------------------------------ the whole model

    @property
    def model(self) -> PreTrainedModel:
        """The whole Hugging Face model, with the tensors that are trained.

        It has the library's class, names, configuration and generation configuration. The parameters of this process's
        stages are the trained ones themselves, the others are on the meta device. `save_pretrained` and `generate` are
        the pipeline's, so every process must call them. Its forward works only if one process has all stages on one
        device. Training runs the modules of the stages: hooks and the mode of these modules have no effect on it.

        Raises:
            UserError: one of its parameters was replaced or added, and would not be trained.
        """
        refresh(self._whole)
        return self._whole

    @cached_property
    def _whole(self) -> PreTrainedModel:
        return whole_model(self, self._trained.parameters)

    @property
    def loss(self) -> Loss:
        """The loss of training."""
        return self._loss

    @property
    def is_in_one_place(self) -> bool:
        """Whether this process has all stages, on one device."""
        return self.topology.num_processes == 1 and len(set(self.topology.stage_devices.values())) == 1

    # ------------------------------------------------------------------ between steps

    def advising_on_memory(self) -> AbstractContextManager[None]:
        """Context manager that adds the planner's advice to an out-of-memory error.

        Raises:
            StageError: in place of that error, with its message and the advice.
        """
        return advising(self.plan, self.topology.rank)

    def holding_weights(self) -> AbstractContextManager[None]:
        """Context manager in which no weight changes, as in an evaluation: copies of tied parameters are sent once."""
        return self.ties.holding_values()

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
