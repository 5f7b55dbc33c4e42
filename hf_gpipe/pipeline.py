"""`Pipeline`: a Hugging Face model, its partition over stages, and the executor that runs it (pipeline_steps.py)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters import is_known_exact
from hf_gpipe.adapters.autocast import Autocast
from hf_gpipe.adapters.chain import is_chain
from hf_gpipe.adapters.text import check_reads_text
from hf_gpipe.adapters.whole import refresh, whole_model
from hf_gpipe.checkpoint.peft import as_config, base_of, has_adapters
from hf_gpipe.errors import UserError
from hf_gpipe.look import html_of, text_of
from hf_gpipe.model.building import ModelSource, Source, Trained, boundary_dtype, compared_source, make_stages
from hf_gpipe.model.exactness import verify, verify_packing
from hf_gpipe.partition import partition as cut
from hf_gpipe.pipeline_steps import Evaluation, PipelineSteps, Update, UpdateStage
from hf_gpipe.planner.advice import advising
from hf_gpipe.planner.decide import Planning, settled
from hf_gpipe.planner.links import Machines
from hf_gpipe.planner.plan import Plan
from hf_gpipe.planner.preflight import compare_with_machines
from hf_gpipe.planner.workload import OF_THE_READER, PlanInputs
from hf_gpipe.recipe import ModelSection, PipelineConfig, TrainingSection
from hf_gpipe.recipe.pipeline import OF_EACH_PROCESS
from hf_gpipe.runtime.agreement import compare
from hf_gpipe.runtime.custom_loss import asked_loss, loss_of
from hf_gpipe.runtime.device_choice import DeviceChoice, world_for
from hf_gpipe.runtime.edges import connect
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.joining import join_job
from hf_gpipe.runtime.loss import Loss, whole_logits
from hf_gpipe.runtime.micro_batch import Batch
from hf_gpipe.runtime.recompute import Recompute
from hf_gpipe.runtime.ties import trained_by_several
from hf_gpipe.schedule.file import TABLE_SUFFIX, is_table_file, recompute_under
from hf_gpipe.schedule.table import Schedule

logger = logging.getLogger(__name__)

__all__ = ["Evaluation", "ModelSource", "Pipeline", "Update", "UpdateStage"]


class Pipeline(PipelineSteps):
    """A model trained by pipeline parallelism, exactly like the plain model (GPipe, arXiv 1811.06965).

    In one process without a launcher all stages live in it. Under torchrun, `accelerate launch` or
    `python -m hf_gpipe.train` every process creates the same Pipeline and holds its own stages.

    Args:
        model: a PreTrainedModel (its weights are taken, and shared where the device is the same), a configuration
            (weights are initialised), or a Hub id or directory (weights are loaded). The directory may have saved PEFT
            adapters alone, which are trained on; their adapter_config.json names the model. An nn.Sequential, or
            another torch module whose layers are found by `example`, is taken like a PreTrainedModel.
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
        if has_adapters(model):
            model, peft_config = base_of(model, peft_config), model
        adapters = peft_config if isinstance(peft_config, str | os.PathLike) else None
        peft_config = as_config(peft_config)
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
        example = self._plan_inputs.example
        if is_chain(model):  # which the planner does not know
            self._plan_inputs = replace(self._plan_inputs, example=None)
        loss = asked_loss(loss, label_smoothing, logit_clipping, packing=packing)
        join_job()
        asked, base = given, model

        def given_here() -> dict[str, Any]:
            same = {name: value for name, value in vars(asked).items() if name not in OF_EACH_PROCESS}
            same |= {name: value for name, value in vars(self._plan_inputs).items() if name not in OF_THE_READER}
            same |= {"dtype": dtype, "attn_implementation": attn_implementation, "seed": seed, "loss": loss}
            same |= {"trust_remote_code": trust_remote_code, "config_overrides": config_overrides}
            same |= {"label_smoothing": label_smoothing, "logit_clipping": logit_clipping, "autocast": autocast}
            same |= {"depth_scaled_feed_forward": depth_scaled_feed_forward, "peft_config": peft_config}
            same |= {"quantization_config": quantization_config, "length_bucketing": length_bucketing}
            if is_table_file(asked.schedule):
                same["schedule"] = TABLE_SUFFIX  # the main process reads it, and the others may know another path
            if adapters is not None:
                same |= {f"{name}, with adapters": value for name, value in compared_source(adapters).items()}
            return {**same, **compared_source(base)}

        compare(given_here, "arguments of the Pipeline")
        world = world_for(given, device)
        given = settled(given, self._plan_inputs, world)
        if is_chain(model) and not given.is_decided:
            raise UserError(
                f"the planner knows Hugging Face models alone, and the model is a {type(model).__name__}; give numbers "
                "in place of 'auto', and a partition by count or by numbers of layers"
            )
        # Read before any weight is made: a table that cannot be run costs no time.
        accumulation = self._plan_inputs.accumulation
        table = world.from_reader(lambda: given.table(accumulation, world.num_processes))
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
            autocast=None if autocast is None else Autocast(autocast, world.device),
            depth_scaled_feed_forward=depth_scaled_feed_forward,
            quantization_config=quantization_config,
            example=example,
        )
        self.adapter, self.peft = self._source.adapter, self._source.peft
        if isinstance(model, str) and not os.path.isdir(model):
            # Each machine has the Hub's model in a cache of its own.
            commit = getattr(self.adapter.given_config, "_commit_hash", None)
            compare(lambda: {"the model's commit": commit}, model)
        self.loss = loss_of(self.adapter, loss)
        self.has_new_adapters = self.peft is not None and not self._source.has_peft_layers
        if packing:
            verify_packing(self.adapter)
        self._is_packing_verified = packing
        self._planning = Planning(
            self._plan_inputs, self.adapter, self.peft, self.loss.planned, world, Machines.of(world)
        )
        self.given = given
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
        self.world = world.placed(placement)
        self.links = compare_with_machines(self._planning, config, self.world)
        self._table = None if table is None else replace(table, placement=self.world.placement)
        self._table_recompute = recomputed.of_table
        self.length_bucketing = length_bucketing
        self.packing = packing
        self.step = self.stash_bytes = 0
        self._may_lack_overlap = world.is_reporter and self.num_stages > 1 and given.num_micro_batches == 1
        self.window: Schedule | None = None
        self.loss_scale = 1.0

        self.has_given_seed = seed is not None
        seed = TrainingSection.seed if seed is None else seed
        self.weights_seed = seed if self._source.has_new_weights else None

        table = self.schedule(self.num_micro_batches * accumulation)
        if table.split and not is_known_exact(self.adapter):
            given_config, compared = self.adapter.given_config, self.adapter.compared_class
            verify(given_config, compared, trust_remote_code=trust_remote_code, splits_backward=True)
        models = {
            stage: self._source.stage_model(self.partition[stage], where, seed)
            for stage, where in self.world.stage_devices.items()
        }
        self._source = replace(self._source, model=None)
        for stage, stage_model in models.items():
            if stage in recomputed.block_stages:
                stage_model.checkpoint_blocks()
            if config.torch_compile:
                stage_model.compile_blocks(config.torch_compile_backend)
        super().__init__(models, self.world, config.zero, seed, self.peft)
        if self.is_asynchronous:
            self._check_no_tie()
        self._trained = Trained.of(self.models, self.adapter, self.world)
        self.stages = make_stages(self.models, self.adapter, self._trained.layers, self.loss)
        if self.num_stages - 1 in self.models and (reason := whole_logits(self.adapter, self.loss)):
            logger.warning(f"training makes the logits of a micro-batch whole: {reason}")
        self._edges = connect(
            self.world, lambda stage, name: self.adapter.carry_dtype(self.partition[stage][0], name), sent
        )
        self._executor = Executor(self.stages, self._edges, self.world.worker, self._replicas)
        self._executor.prepare(table)
        if adapters is not None:
            self.load_pretrained(adapters)
            self.has_new_adapters, self.weights_seed = False, None

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
        check_reads_text(self.adapter, "plan")
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
    def is_in_one_place(self) -> bool:
        """Whether this process has all stages, on one device."""
        return self.world.num_processes == 1 and len(set(self.world.stage_devices.values())) == 1

    def advising_on_memory(self) -> AbstractContextManager[None]:
        """Context manager that adds the planner's advice to an out-of-memory error.

        Raises:
            StageError: in place of that error, with its message and the advice.
        """
        return advising(self.plan, self.world.rank)

    def _check_no_tie(self) -> None:
        """Raise UserError, on every process, where stages that update by themselves would train one parameter."""
        for name, stages in trained_by_several(self.models, self.world).items():
            raise UserError(
                f"schedule {self.schedule_name!r}: {name} is tied, stages {stages} train it, and each of them would "
                "update it at another time; use a model whose weights are not tied (tie_word_embeddings: false), a "
                "partition that puts its layers into one stage, or a synchronous schedule, such as 1f1b"
            )
