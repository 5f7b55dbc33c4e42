"""`Pipeline`: a Hugging Face model in stages, and the calls that train, evaluate, save and show it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import StageModel
from hf_gpipe.errors import UserError
from hf_gpipe.job.calls import by_every_process
from hf_gpipe.job.joining import join_job
from hf_gpipe.job.world import World
from hf_gpipe.losses.custom import asked_loss
from hf_gpipe.losses.loss import Loss, TokenLoss
from hf_gpipe.model.companion import Companion
from hf_gpipe.model.spec import ModelSource, ModelSpec
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.building import build
from hf_gpipe.pipeline.decision import Decision, PipelineRequest
from hf_gpipe.pipeline.forwards import Forwards
from hf_gpipe.pipeline.look import html_of, text_of
from hf_gpipe.pipeline.peft_model import model_of_peft
from hf_gpipe.pipeline.probe import PROBE
from hf_gpipe.pipeline.steps import Steps
from hf_gpipe.pipeline.whole import refresh, whole_model
from hf_gpipe.planner.workload import PlanInputs
from hf_gpipe.runtime.device_choice import DeviceChoice, world_for
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.settings.pipeline import PipelineConfig

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


Method = Callable[Concatenate[Any, Arguments], Result]


def _of(part: str, method: Method[Arguments, Result], *, reads_weights: bool = False) -> Method[Arguments, Result]:
    """A method of `Pipeline` that one of its parts has; before one that reads weights, late updates are made."""

    @functools.wraps(method)
    def delegated(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if reads_weights:
            self.weights.late.make()
        return method(getattr(self, part), *args, **kwargs)

    return delegated


def _attribute(part: str, name: str) -> Any:
    """An attribute of `Pipeline` that one of its parts has."""
    return property(
        operator.attrgetter(f"{part}.{name}"), lambda pipe, value: setattr(getattr(pipe, part), name, value)
    )


class Pipeline:
    """A Hugging Face model in stages, with the loss and the gradients of the plain model (GPipe, arXiv 1811.06965).

    `pipe = Pipeline("path/or/hub-id", num_stages=4, num_micro_batches=16)` makes it, and `pipe.train_step(batch)` runs
    forward and backward of a mini-batch, after which the gradients are in `.grad` of `pipe.parameters()`.

    Without a launcher one process has all stages. Under torchrun, `accelerate launch` or `hf-gpipe train`
    every process creates the same Pipeline and has its own stages.

    Args:
        model: one of these. A Hub id or directory: its weights are loaded. The directory may have only saved PEFT
            adapters, which are trained further; their adapter_config.json names the model. A configuration: weights are
            initialised. A PreTrainedModel: its weights are used, and shared where the device is the same. An
            nn.Sequential, or another torch module whose layers are found by `example`: like a PreTrainedModel.
        num_stages, num_micro_batches, schedule, recompute, partition: as in `PipelineConfig`, in place of `config`. If
            they are left out, the planner chooses all but the first from `plan_inputs`; without these there is one
            micro-batch, the schedule is gpipe, stages are recomputed, and each has the same number of layers.
            A `schedule` that ends in .txt is the path of a table, which the main process reads. The table must have
            this many stages, processes and micro-batches (times `accumulation`), and its R say what is recomputed.
        seed: of initial weights and dropout. None: the default of recipes; a trainer's `args.seed` then counts for
            dropout.
        config: how the model is cut and run. The planner decides its values "auto", and a partition by cost, from
            `plan_inputs`.
        plan_inputs: an example of a mini-batch and facts about the optimizer, for the planner.
        dtype: type of the weights, or its name, such as "bfloat16"; None or "auto": that of the model's configuration,
            or else of its weights, or float32.
        attn_implementation: "eager", "sdpa" ...; None: transformers chooses.
        trust_remote_code: whether a Hub model may run Python code of its own.
        config_overrides: values of the model's configuration to change; only with an id or directory.
        label_smoothing: share of the target's probability that is spread over the vocabulary.
        logit_clipping: in training the loss reads logits.clamp(-c, c), with c this number; evaluation, generation and
            the saved model do not clip. None: no clipping.
        loss: a `LogitsLoss`, a `RowLoss`, or another `Loss`. None: the cross-entropy of the target tokens.
        teacher: a decoder-only model with the same vocabulary, whose probabilities a `DistillationLoss` compares with
            the model's. It is given as `model` is, or with other options as a `ModelSpec` of hf_gpipe.model.spec. It is
            cut into as many stages, runs only forwards, and is neither trained nor saved.
        depth_scaled_feed_forward: whether the last projection of each feed-forward block starts 1/L times as large,
            where L is the number of layers of its stack; only for a configuration, whose weights are new.
        device: where this process computes, in place of the config's `device` and `devices`. A list, such as
            ["cuda:0", "cuda:1"], names the devices of this machine. Each process of the machine takes an equal part of
            the list, and spreads its stages over that part.
        peft_config: a peft.LoraConfig to add adapters, or a directory of saved adapters; everything else is frozen. A
            model that already has PEFT adapters, or is a PeftModel, needs no `peft_config`.
        quantization_config: a transformers.BitsAndBytesConfig. Each linear layer is quantised as soon as it is read,
            and only adapters can be trained on it. A model or checkpoint that bitsandbytes has already quantised needs
            no `quantization_config`. Needs the package bitsandbytes.
        autocast: torch.bfloat16 or torch.float16: every forward computes under torch.autocast, in training, evaluation
            and generation; weights and their gradients keep their own type. None: computation is in the weights' type.
        length_bucketing: whether training sorts the rows of a mini-batch by length before it is cut, and cuts it so
            that the largest micro-batch has as few tokens, padding included, as possible.
        packing: whether training packs the rows of a mini-batch: each micro-batch is one row, of documents that do not
            see each other, without padding. Loss and gradients stay those of the rows.
        settings: other fields of `PipelineConfig` (`memory` also as a number of bytes, `torch_compile` also as the name
            of a backend) and of `PlanInputs` (`example`, `optim`, `accumulation`), in place of the two objects.

    Attributes:
        config: the `PipelineConfig` with everything decided; it has no "auto".
        given: the `PipelineConfig` that was asked for; "auto" where the planner decides what was not given.
        planned: the planner's choice and the reason, in one line; None if it had nothing to decide.
        decision: the facts that are the same in all processes, such as the schedule's tables.
        models: the Hugging Face model of each stage of this process, by the stage's number.
        steps: the part that trains.
        forwards: the part that evaluates and generates.
        cutting: how mini-batches are cut into micro-batches.
        weights: the parameters of this process's stages.
        loss: the loss of training.
        has_new_adapters: whether the model has PEFT adapters that `peft_config` has added.
        has_given_seed: whether the constructor was given a seed.
        weights_seed: the seed of the weights that were initialised here; None: all weights were there.
        links: lines about the links between machines, measured and as the planner assumes them; empty on one machine.
        step: optimizer steps begun; dropout depends on it.
        window: the table of the last window that has run.
        stash_bytes: the most that old versions of weights have held in this process in that window.
        loss_scale: factor of the loss before backward, and so of the gradients, so that small gradients are not 0 in
            float16 (Micikevicius et al. 2018, section 3.2). If you set it, divide the gradients by it.

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
        seed: int | None = None,
        *,
        config: PipelineConfig | None = None,
        plan_inputs: PlanInputs | None = None,
        dtype: torch.dtype | str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        config_overrides: Mapping[str, Any] | None = None,
        label_smoothing: float = TokenLoss.label_smoothing,
        logit_clipping: float | None = TokenLoss.logit_clipping,
        loss: Loss | None = None,
        teacher: ModelSource | ModelSpec | None = None,
        depth_scaled_feed_forward: bool = False,
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
        loss = asked_loss(loss, TokenLoss(label_smoothing, logit_clipping))
        options: dict[str, Any] = {"attn_implementation": attn_implementation, "autocast": autocast}
        options["trust_remote_code"] = trust_remote_code
        of_teacher = teacher if teacher is None or isinstance(teacher, ModelSpec) else ModelSpec.of(teacher, **options)
        companion = None if of_teacher is None else Companion("teacher", of_teacher)
        request = PipelineRequest(spec, asked, inputs, seed, loss, length_bucketing, companion)
        join_job(asked.timeout_seconds)
        request.compare()
        self._make(request, world_for(asked, device))

    @classmethod
    def of(cls, request: PipelineRequest, world: World) -> Pipeline:
        """The pipeline that a recipe or a trainer asks for, on chosen devices. Raises as the constructor does."""
        request.compare()
        pipe = cls.__new__(cls)
        pipe._make(request, world)
        return pipe

    def _make(self, request: PipelineRequest, world: World) -> None:
        # What is decided: nothing of this takes memory.
        decision = self.decision = Decision.of(request, world, PROBE)
        self.given, self.config, self.planned = decision.given, decision.config, decision.planned
        self.adapter, self.loss = decision.adapter, decision.loss
        self.world, self.links = decision.world, decision.links
        self.partition, self.num_stages = decision.partition, self.config.num_stages
        self.schedule_name, self.recompute = self.config.schedule, self.config.recompute

        # What is built: the stages of this process, with their weights.
        self.steps = build(request, decision)
        self.forwards, self.cutting = self.steps.forwards, self.steps.cutting
        self.weights, self.stages = self.forwards.parameters, self.forwards.stages
        self.ties = self.weights.ties
        self.has_given_seed = request.seed is not None
        self.weights_seed = self.seed if request.model.makes_weights(self.adapter) else None

    # What its parts have; their docstrings say what it means.

    step: int = _attribute("steps", "step")
    window: Schedule | None = _attribute("steps", "window")
    stash_bytes: int = _attribute("steps", "stash_bytes")
    loss_scale: float = _attribute("steps", "loss_scale")
    num_micro_batches: int = _attribute("cutting", "num_micro_batches")
    length_bucketing: bool = _attribute("cutting", "by_length")
    packing: bool = _attribute("cutting", "packing")
    has_new_adapters: bool = _attribute("forwards", "has_new_adapters")
    seed: int = _attribute("weights", "seed")

    train_step = _of("steps", Steps.train_step)
    train_on = _of("steps", Steps.train_on)
    train_ahead = _of("steps", Steps.train_ahead)
    train_window = _of("steps", Steps.train_window)
    eval_step = _of("forwards", Forwards.eval_step)
    eval_on = _of("forwards", Forwards.eval_on)
    log_probs = _of("forwards", Forwards.log_probs)
    token_log_probs = _of("forwards", Forwards.token_log_probs)
    embed = _of("forwards", Forwards.embed)
    generate = by_every_process(_of("forwards", Forwards.generate))

    named_parameters = _of("weights", StageParameters.named_parameters, reads_weights=True)
    parameters = _of("weights", StageParameters.parameters, reads_weights=True)
    shard_optimizer = _of("weights", StageParameters.shard_optimizer)
    zero_grad = _of("weights", StageParameters.zero_grad)
    clip_grad_norm_ = _of("weights", StageParameters.clip_grad_norm_)
    clip_stage_grad_norm_ = _of("weights", StageParameters.clip_stage_grad_norm_)
    grad_norm = _of("weights", StageParameters.grad_norm)
    load_pretrained = _of("weights", StageParameters.load_pretrained)
    save_pretrained = by_every_process(_of("weights", StageParameters.save_pretrained))

    schedule = _of("decision", Decision.schedule)
    plan = _of("decision", Decision.plan)

    @property
    def runs_windows(self) -> bool:
        """Whether steps run in windows (`train_window`), in which each stage updates its weights by itself."""
        return self.decision.runs_windows

    @property
    def models(self) -> Mapping[int, StageModel]:
        self.weights.late.make()
        return self.weights.models

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
        self.weights.late.make()
        refresh(self._whole)
        return self._whole

    @property
    def peft_model(self) -> Any:
        """The model as a `peft.PeftModel` around `model`, with peft's names; without adapters, `model` itself."""
        model = self.model
        return model if self.adapter.peft is None else self._peft_model

    @cached_property
    def _peft_model(self) -> Any:
        assert self.adapter.peft is not None
        return model_of_peft(self._whole, self.adapter.peft)

    @cached_property
    def _whole(self) -> PreTrainedModel:
        return whole_model(self.weights, generate=self.generate, save_pretrained=self.save_pretrained)

    # ------------------------------------------------------------------ what it shows

    def __repr__(self) -> str:
        return text_of(self.decision, self.models)

    def _repr_html_(self) -> str:
        return html_of(repr(self), self.schedule(self.num_micro_batches))


def _plan_inputs(given: PlanInputs | None, settings: dict[str, Any], *, packing: bool) -> PlanInputs:
    """The planner's inputs that were given whole, or among other settings, of which they are taken out."""
    values = {field.name: settings.pop(field.name) for field in fields(PlanInputs) if field.name in settings}
    if given is not None and values:
        raise UserError(f"plan_inputs and {', '.join(values)} are given; put all into plan_inputs")
    inputs = given or PlanInputs(**values)
    return replace(inputs, packing=True) if packing else inputs
