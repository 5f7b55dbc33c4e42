"""`Pipeline`: a Hugging Face model in stages, and the calls that train, evaluate, save and show it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters.whole import refresh, whole_model
from hf_gpipe.errors import UserError
from hf_gpipe.model.spec import ModelSource, ModelSpec
from hf_gpipe.pipeline.building import build
from hf_gpipe.pipeline.decision import Decision
from hf_gpipe.pipeline.look import html_of, text_of
from hf_gpipe.pipeline.request import PipelineRequest
from hf_gpipe.pipeline.steps import Update, UpdateStage
from hf_gpipe.planner.advice import advising
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.recipe import ModelSection, PipelineConfig, TrainingSection
from hf_gpipe.runtime.batches import share
from hf_gpipe.runtime.calls import by_every_process
from hf_gpipe.runtime.custom_loss import asked_loss
from hf_gpipe.runtime.device_choice import DeviceChoice
from hf_gpipe.runtime.evaluation import Evaluation
from hf_gpipe.runtime.joining import join_job
from hf_gpipe.runtime.loss import Loss
from hf_gpipe.runtime.micro_batch import Batch
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule.table import Schedule


class _OfSteps:
    """An attribute of a `Pipeline` that is its steps'."""

    def __set_name__(self, owner: type[Pipeline], name: str) -> None:
        self._name = name

    def __get__(self, pipe: Pipeline | None, owner: type[Pipeline]) -> Any:
        return self if pipe is None else getattr(pipe.steps, self._name)

    def __set__(self, pipe: Pipeline, value: Any) -> None:
        setattr(pipe.steps, self._name, value)


def _of_steps() -> Any:
    return _OfSteps()


class Pipeline:
    """A model trained by pipeline parallelism, exactly like the plain model (GPipe, arXiv 1811.06965).

    In one process without a launcher all stages live in it. Under torchrun, `accelerate launch` or
    `python -m hf_gpipe.train` every process creates the same Pipeline and holds its own stages.

    Args:
        model: a PreTrainedModel (its weights are taken, and shared where the device is the same), a configuration
            (weights are initialised), or a Hub id or directory (weights are loaded). The directory may have saved PEFT
            adapters alone, which are trained on; their adapter_config.json names the model.
        num_stages, num_micro_batches, schedule, recompute, partition: as in `PipelineConfig`, in place of
            `config`. A `schedule` that ends in .txt is the path of a table, which the main process reads: it has this
            many stages, processes and micro-batches (times `accumulation`), and its R say what is recomputed.
        seed: of initial weights and dropout. None: the default of recipes; a trainer's `args.seed` then counts for
            dropout.
        config: how the model is cut and run. The planner decides the values "auto", and a partition by cost, from
            `plan_inputs`. With them it also decides micro-batches, schedule, recomputation and partition where they are
            not given. Without them there is then one micro-batch, the schedule is gpipe, stages are recomputed, and
            each has the same number of layers.
        plan_inputs: an example of a mini-batch and facts about the optimizer, for the planner.
        dtype: type of the weights, or its name, such as "bfloat16"; None or "auto": the model's own, or float32 for a
            configuration without one.
        attn_implementation: "eager", "sdpa" ...; None: transformers chooses.
        trust_remote_code: whether a Hub model may run Python code of its own.
        config_overrides: values of the model's configuration to change; only with an id or directory.
        label_smoothing: share of the target's probability that is spread over the vocabulary.
        logit_clipping: the loss of training is that of logits.clamp(-c, c), with c this number; evaluation, generation
            and the saved model do not clip. None: no clipping.
        loss: in place of the cross-entropy of the target tokens: a `LogitsLoss`, a `RowLoss`, or another `Loss`.
        depth_scaled_feed_forward: whether the last projection of each feed-forward block starts 1/L times as large, L
            being the layers of its stack; for a configuration only, whose weights are new.
        device: where this process computes, in place of the config's `device` and `devices`. A list, such as
            ["cuda:0", "cuda:1"], names the devices of this machine. Each of its processes takes an equal part, and
            spreads its stages over it.
        peft_config: a peft.LoraConfig to add adapters, or a directory of saved adapters; everything else is frozen. A
            model that has PEFT adapters already, or is a PeftModel, is taken as it is.
        quantization_config: a transformers.BitsAndBytesConfig: linear layers are quantised while they are loaded, each
            as soon as it is read, and only adapters can be trained on them. A model or checkpoint that bitsandbytes has
            quantised already is taken as it is. Needs the package bitsandbytes.
        autocast: torch.bfloat16 or torch.float16: every forward computes under torch.autocast, in training, evaluation
            and generation; weights and their gradients keep their own type. None: everything computes in that type.
        length_bucketing: whether training sorts the rows of a mini-batch by length before it is cut, and cuts it so
            that the largest micro-batch has as few tokens, padding included, as possible.
        packing: whether training packs the rows of a mini-batch: each micro-batch is one row, of documents that do not
            see each other, without padding. Loss and gradients stay those of the rows.
        settings: other fields of `PipelineConfig` (`memory` also as a number of bytes, `torch_compile` also as the name
            of a backend) and of `PlanInputs` (`example`, `optim`, `accumulation`), in place of the two objects.

    Attributes:
        config: the `PipelineConfig` without "auto".
        steps: what runs its tables.
        weights: the parameters of this process's stages.
        loss: of training.
        has_new_adapters: whether the model has PEFT adapters that `peft_config` has added.
        given: the `PipelineConfig` that was asked for; "auto" where the planner decides what was not given.
        planned: the planner's choice and the reason, in one line; None if it had nothing to decide.
        has_given_seed: whether the constructor was given a seed.
        weights_seed: the seed of the weights that were initialised here; None: all weights were there.
        links: lines about the links between machines, measured and as the planner assumes them; empty on one machine.
        step: optimizer steps begun; dropout depends on it.
        window: the table of the last window that has run under an asynchronous schedule.
        stash_bytes: the most that old versions of weights have held in this process in that window.
        loss_scale: factor of the loss before backward, and so of the gradients, so that small ones are not 0 in float16
            (Micikevicius et al. 2018, section 3.2). Whoever sets it must divide the gradients by it.

    Raises:
        UserError, or a subclass: an argument is not supported.
    """

    step: int = _of_steps()
    window: Schedule | None = _of_steps()
    stash_bytes: int = _of_steps()
    loss_scale: float = _of_steps()
    seed: int = _of_steps()
    num_micro_batches: int = _of_steps()
    length_bucketing: bool = _of_steps()
    packing: bool = _of_steps()
    has_new_adapters: bool = _of_steps()

    def __init__(
        self,
        model: ModelSource,
        num_stages: int | str | None = None,
        num_micro_batches: int | str | None = None,
        schedule: str | None = None,
        recompute: str | Sequence[str | int] | None = None,
        partition: str | Sequence[int] | None = None,
        seed: int | None = None,
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
        spec = ModelSpec.of(
            model,
            peft_config=peft_config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            config_overrides=config_overrides,
            depth_scaled_feed_forward=depth_scaled_feed_forward,
            autocast=autocast,
            quantization_config=quantization_config,
        )
        inputs = _plan_inputs(plan_inputs, settings, packing=packing)
        asked = PipelineConfig.of(
            config,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            recompute=recompute,
            partition=partition,
            **settings,
        )
        loss = asked_loss(loss, label_smoothing, logit_clipping, packing=inputs.packing)
        self._make(PipelineRequest(spec, asked, inputs, seed, loss, length_bucketing), device)

    @classmethod
    def of(cls, request: PipelineRequest) -> Pipeline:
        """The pipeline of a request, which a recipe or a trainer's arguments make. Raises as the constructor does."""
        pipe = cls.__new__(cls)
        pipe._make(request)
        return pipe

    def _make(self, request: PipelineRequest, device: DeviceChoice = None) -> None:
        # What is asked is the same in all processes.
        join_job()
        request.compare()

        # What is decided: nothing of this takes memory.
        decision = self._decision = Decision.of(request, device)
        self.given, self.config, self.planned = decision.given, decision.config, decision.planned
        self.adapter, self.loss = decision.adapter, decision.loss
        self.world, self.links = decision.world, decision.links
        self.partition, self.num_stages = decision.partition, self.config.num_stages
        self.schedule_name, self.recompute = self.config.schedule, self.config.recompute

        # What is built: the stages of this process, with their weights.
        self.steps = build(request, decision)
        self.weights, self.stages = self.steps.parameters, self.steps.stages
        self.models, self.ties = self.weights.models, self.weights.ties
        self.has_given_seed = request.seed is not None
        makes_head = self.adapter.may_lack_head and request.model.saved_adapters is None
        self.weights_seed = self.seed if makes_head or request.model.has_new_weights else None

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
                where there is no target; or a sequence of such mini-batches, accumulated in one pass.
            times: list to which the times of this process's actions are appended.
            update: the action U of the table, such as to clip and to step an optimizer. It is called in every process
                with the loss and the norm of the gradient, once the gradients are complete; its errors are raised here.
                None: the caller updates.

        Returns:
            The mean loss per target token of the whole mini-batch, a float tensor on every process.
        """
        batches = [batch] if isinstance(batch, Mapping) else batch
        return self.steps.train_on(share(batches, self.world), times, update)

    def train_window(
        self, steps: Sequence[Sequence[Batch]], update: UpdateStage, times: list[ActionTime] | None = None
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
        return self.steps.train_window(steps, update, times)

    @property
    def is_asynchronous(self) -> bool:
        """Whether each stage updates its weights by itself, so that steps run in windows."""
        return self._decision.tables.is_asynchronous

    def schedule(self, num_micro_batches: int | Sequence[int], name: str | None = None) -> Schedule:
        """The table for this many micro-batches; by default that of training.

        Args:
            num_micro_batches: of an asynchronous schedule it may be a list, with the number of each step of a window.
            name: of another schedule.

        Raises:
            ScheduleError: the table was read from a file and has fewer.
        """
        return self._decision.tables.of(num_micro_batches, name)

    # ------------------------------------------------------------------ evaluation and generation

    def eval_step(self, batch: Batch | None) -> Evaluation:
        """Loss of a mini-batch without gradients, row by row. Every process calls it and gets the same result."""
        (rows,) = share(None if batch is None else [batch], self.world)
        return self.steps.eval_on(rows)

    def log_probs(self, rows: Batch, *, with_adapters: bool = True) -> torch.Tensor:
        """The log-probability of each row of a mini-batch that every process already has: the sum over its targets.

        Every process calls it and gets the same result. There is no dropout.

        Args:
            rows: the mini-batch.
            with_adapters: whether the PEFT adapters add to their layers; without them it is the base model's.

        Returns:
            (N,) in float64, on the CPU.
        """
        return self.steps.log_probs(rows, with_adapters=with_adapters)

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
        return self.steps.generate(inputs)

    def holding_weights(self) -> AbstractContextManager[None]:
        """Context manager in which no weight changes, as in an evaluation: copies of tied parameters are sent once."""
        return self.ties.holding_values()

    # ------------------------------------------------------------------ the parameters of this process's stages

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This process's parameters under their Hugging Face names; a tied one once, in the process that owns it."""
        return self.weights.named_parameters()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return self.weights.parameters()

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the replicas of a stage share the steps of an optimizer, and its state: ZeRO-1, for `zero` 1.

        Each replica then updates a shard of every parameter in `optimizer.step()`, which all replicas must call, and
        has the other replicas' new values after it. Everything else is as before. `PipelineTrainer` does this itself.

            pipe = Pipeline(model, 2, 8, replicas=2, zero=1)
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
            pipe.shard_optimizer(optimizer)

        Args:
            optimizer: of `parameters()`, or of some of them; of a class whose update of a parameter is known not to
                depend on other parameters.

        Raises:
            UserError: its class is another one, or `zero` is 0.
        """
        self.weights.shard_optimizer(optimizer)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self.weights.zero_grad()

    def clip_grad_norm_(self, max_norm: float, norm: torch.Tensor | float | None = None) -> torch.Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`.

        Args:
            max_norm: the largest norm that stays as it is.
            norm: of the gradients, where it is known, as `update` gets it; None: every process computes it.

        Returns:
            The norm before, a float64 tensor, the same on every process; each tied parameter counts once.
        """
        return self.weights.clip_grad_norm_(max_norm, norm)

    def clip_stage_grad_norm_(self, stage: int, max_norm: float, norm: torch.Tensor) -> None:
        """Scale the gradients of one stage of this process so that their norm is at most `max_norm`.

        Args:
            stage: its number.
            max_norm: the largest norm that stays as it is.
            norm: of the stage's gradient, a scalar on its device; it is not read on the host.
        """
        self.weights.clip_stage_grad_norm_(stage, max_norm, norm)

    def grad_norm(self) -> torch.Tensor:
        """The 2-norm of the gradient of the whole model, a float64 tensor, the same on every process."""
        return self.weights.grad_norm()

    def load_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Replace the weights by those of a Hub id or directory, in place, so that optimizers keep their parameters.

        Every process must call it, and reads its own stages' tensors; with PEFT adapters only those, in PEFT's format.
        Raises CheckpointError if the files are missing or do not fit the model.
        """
        self.weights.load_pretrained(directory, self.seed)

    @by_every_process
    def save_pretrained(self, directory: str | os.PathLike[str]) -> None:
        """Write the model in Hub format; `from_pretrained` of plain transformers loads it.

        Every process must call it and writes its own stages, one shard per stage. An interrupted save leaves the old
        checkpoint or none, never a part. With PEFT adapters only those are written, in PEFT's format.
        """
        self.weights.unwritten(Path(directory), self.world).write()

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
        return whole_model(self, self.weights.trainable.parameters)

    @property
    def is_in_one_place(self) -> bool:
        """Whether this process has all stages, on one device."""
        return self.world.num_processes == 1 and len(set(self.world.stage_devices.values())) == 1

    def advising_on_memory(self) -> AbstractContextManager[None]:
        """Context manager that adds the planner's advice to an out-of-memory error.

        Raises:
            StageError: in place of that error, with its message and the advice.
        """
        return advising(self.plan, self.world.rank)

    # ------------------------------------------------------------------ what it shows

    def __repr__(self) -> str:
        return text_of(self.adapter, self.config, self.partition, self.world, self.models)

    def _repr_html_(self) -> str:
        return html_of(repr(self), self.schedule(self.num_micro_batches))

    def plan(self, batch: Batch | None = None) -> Plan:
        """Return the planner's prediction of a step of this pipeline, on the device of this process.

        Args:
            batch: the step's only mini-batch, as `train_step` takes it; None: the constructor's `example`, accumulated.

        Raises:
            UserError: there is neither, or the size of the optimizer's state is not known.
        """
        return self._decision.plan(batch)


def _plan_inputs(given: PlanInputs | None, settings: dict[str, Any], *, packing: bool) -> PlanInputs:
    """The planner's inputs that were given whole, or among other settings, of which they are taken out."""
    values = {one.name: settings.pop(one.name) for one in fields(PlanInputs) if one.name in settings}
    if given is not None and values:
        raise UserError(f"plan_inputs and {', '.join(values)} are given; put all into plan_inputs")
    inputs = given or PlanInputs(**values)
    return replace(inputs, packing=True) if packing else inputs
