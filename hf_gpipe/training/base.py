"""Parts of the trainer that its constructor makes: the pipeline, callbacks, collator and loss scaler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DataCollatorWithPadding,
    DefaultFlowCallback,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    default_data_collator,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import ExportableState

from hf_gpipe.checkpoint.directory import checkpoints
from hf_gpipe.checkpoint.state import read_state
from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import ModelSource, Pipeline
from hf_gpipe.planner.workload import OPTIMIZER_SLOTS, PlanInputs, Workload
from hf_gpipe.recipe import AUTO, PipelineConfig
from hf_gpipe.recipe.pipeline import SYNCHRONOUS_SCHEDULES
from hf_gpipe.runtime.custom_loss import Loss
from hf_gpipe.runtime.loss import PLAIN, TokenLoss
from hf_gpipe.runtime.processes import Processes
from hf_gpipe.training.arguments import PLANNED, PipelineTrainingArguments
from hf_gpipe.training.generating import generation_config_of
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.longest import longest_mini_batch
from hf_gpipe.training.loss_scaling import LossScaler
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.optim import check_optimizer
from hf_gpipe.training.progress import MetricsFile, ProgressBar

logger = transformers.logging.get_logger(__name__)


def pipeline_of(
    model: Pipeline | ModelSource | None,
    args: PipelineTrainingArguments,
    example: Callable[[], Workload | None],
    loss: Loss | None = None,
    **options: Any,
) -> Pipeline:
    """The pipeline to train.

    Args:
        model: the model, or the pipeline itself.
        args: the trainer's arguments.
        example: the shape of the longest mini-batch to come, for the planner.
        loss: in place of the cross-entropy.
        options: others of `Pipeline`; a value None is not given.

    Raises:
        UserError: the arguments ask for something else than a given pipeline is.
    """
    pipe = _pipeline(model, args, example, {"loss": loss, **options})
    if args.neftune_noise_alpha is not None and pipe.adapter.config.is_encoder_decoder:
        raise UserError(
            f"neftune_noise_alpha={args.neftune_noise_alpha!r}: {pipe.adapter.config.model_type} has an encoder, and "
            "the noise is supported for decoder-only models; leave it out"
        )
    for stage in pipe.models.values():
        stage.add_noise(args.neftune_noise_alpha)
    if args.generation_config is not None:
        pipe.adapter.reference.generation_config = generation_config_of(args.generation_config)
    return pipe


def check_optimizers(
    optimizer: torch.optim.Optimizer | None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
    args: PipelineTrainingArguments,
    pipe: Pipeline,
) -> None:
    """Raise UserError where the given optimizer and scheduler cannot be used."""
    if optimizer is not None:
        check_optimizer(optimizer, pipe.parameters())
        for name in ("fp32_master_weights", "offload_optimizer"):
            if getattr(args, name):
                raise UserError(f"optimizers: {name} needs an optimizer that the trainer makes; leave one out")
    elif scheduler is not None:
        raise UserError("optimizers: a scheduler needs its optimizer; give both or leave both out")


def master_weights_of(pipe: Pipeline, args: PipelineTrainingArguments) -> MasterWeights | None:
    """The copies of the weights that the arguments ask for. Raises UserError where there can be none."""
    if not (args.fp32_master_weights or args.offload_optimizer):
        return None
    parameters = dict(pipe.named_parameters())
    return MasterWeights(parameters, in_float32=args.fp32_master_weights, on_host=args.offload_optimizer)


def callbacks_of(
    args: PipelineTrainingArguments, given: Sequence[TrainerCallback | type[TrainerCallback]]
) -> list[TrainerCallback | type[TrainerCallback]]:
    """All callbacks of a trainer, in the order in which they are called."""
    show = PrinterCallback if args.disable_tqdm else ProgressBar
    try:
        reporting = [callback() for callback in get_reporting_integration_callbacks(args.report_to)]
    except (RuntimeError, ValueError, ImportError) as error:  # an unknown name, or its package is not installed
        raise UserError(f"report_to: {error}") from error
    return [DefaultFlowCallback, MetricsFile, *reporting, *given, show]


def restore_callbacks(callbacks: list[TrainerCallback], saved: Mapping[str, Any]) -> None:
    """Give each callback that keeps a state the one saved under its class's name, in order."""
    states_of = {name: list(s) if isinstance(s, list) else [s] for name, s in saved.items()}
    for index, callback in enumerate(callbacks):
        states = states_of.get(type(callback).__name__)
        if states and isinstance(callback, ExportableState):
            callbacks[index] = type(callback).from_state(states.pop(0))


def _pipeline(
    model: Pipeline | ModelSource | None,
    args: PipelineTrainingArguments,
    example: Callable[[], Workload | None],
    options: dict[str, Any],
) -> Pipeline:
    """The pipeline that the arguments ask for, or the one given, if it is not another one."""
    if isinstance(model, Pipeline):
        if given := [name for name, value in options.items() if value is not None]:
            raise UserError(
                f"{given[0]} is given, and the model is a Pipeline, which has its own; set it when the Pipeline is "
                "made (a compute_loss_func as loss=LogitsLoss(compute_loss_func))"
            )
        _check_given(model, args)
        return model
    assert model is not None
    optim = str(getattr(args.optim, "value", args.optim))
    can_plan = optim in OPTIMIZER_SLOTS
    if not can_plan and (left := _not_given(args)) and Processes.of_job().is_reporter:
        defaults = ", ".join(f"{name} is {getattr(PipelineConfig, name)}" for name in left)
        logger.warning(f"the planner does not know the memory of optim={optim}, so {defaults}; give what you want")
    config, shape = _opened(args, example, can_plan=can_plan)
    return Pipeline(
        model,
        config=config,
        plan_inputs=PlanInputs(
            shape,
            optim,
            args.fp32_master_weights,
            args.offload_optimizer,
            args.gradient_accumulation_steps,
            saves_in_background=args.save_in_background != "never",
            keeps_in_memory=args.memory_save_steps is not None,
        ),
        seed=args.seed,
        label_smoothing=args.label_smoothing_factor,
        logit_clipping=args.logit_clipping,
        autocast=args.autocast,
        length_bucketing=args.train_sampling_strategy == "group_by_length",
        packing=args.packs_rows,
        **options,
    )


def _not_given(args: PipelineTrainingArguments) -> list[str]:
    """The arguments that the planner chooses, because they are not given."""
    return [name for name in PLANNED if getattr(args, name) is None]


def _opened(
    args: PipelineTrainingArguments, example: Callable[[], Workload | None], *, can_plan: bool
) -> tuple[PipelineConfig, Workload | None]:
    """The configuration, in which "auto" stands for what was not given, and the shape of a mini-batch. Collective.

    Without a shape, or where it cannot be planned for, the configuration's own defaults stay.
    """
    config, processes = args.config, Processes.of_job()
    names = _not_given(args)
    if not can_plan or config.schedule not in (*SYNCHRONOUS_SCHEDULES, AUTO):
        names = []
    if config.is_decided and not names:
        return config, None
    shape = processes.from_reader(example, takes_long=True)
    if shape is not None:
        left_open: dict[str, Any] = dict.fromkeys(names, AUTO)
        config = replace(config, **left_open)
    if config.num_micro_batches == AUTO:
        # Dropout depends on the micro-batch: what was chosen once stays, however fast this machine is today.
        before = processes.from_writer(lambda: _num_micro_batches_before(Path(str(args.output_dir))))
        config = config if before is None else replace(config, num_micro_batches=before)
    return config, shape


def _num_micro_batches_before(output_dir: Path) -> int | None:
    """The number of micro-batches of the newest checkpoint that says it."""
    for checkpoint in reversed(checkpoints(output_dir)):
        with suppress(UserError, OSError):  # it is reported where it is needed
            return read_state(checkpoint).run.num_micro_batches
    return None


def example_of(dataset: Any, args: PipelineTrainingArguments) -> Workload | None:
    """The shape of the longest mini-batch to come, for the planner."""
    by_length = args.train_sampling_strategy == "group_by_length"
    return longest_mini_batch(
        dataset, args.per_device_train_batch_size, args.batch_tokens, by_length=by_length, packing=args.packs_rows
    )


def _check_given(pipe: Pipeline, args: PipelineTrainingArguments) -> None:
    """Raise UserError where the arguments ask for something else than the given pipeline is."""
    own = None if pipe.adapter.autocast is None else pipe.adapter.autocast.dtype
    if args.autocast not in (None, own):
        raise UserError(
            f"bf16={args.bf16}, fp16={args.fp16}, but the given Pipeline has autocast={own}; set it when the Pipeline "
            "is made"
        )
    if args.packs_rows and not pipe.packing:
        name = "packing" if args.packing else "padding_free"
        raise UserError(f"{name}=True, but the given Pipeline does not pack; make it with packing=True")
    config, loss = args.config, pipe.loss
    tokens = loss if isinstance(loss, TokenLoss) else PLAIN
    # What has its default is not asked for; the device is a guess.
    compared = {one.name: (getattr(pipe.config, one.name), one.default) for one in fields(config)}
    del compared["device"]
    if vars(args)["num_stages"] is None:
        del compared["num_stages"]
    asked = {name: getattr(config, name) for name in compared}
    for name, found in (("label_smoothing_factor", tokens.label_smoothing), ("logit_clipping", tokens.logit_clipping)):
        asked[name], compared[name] = getattr(args, name), (found, args.__dataclass_fields__[name].default)
    for name, known in compared.items():
        if asked[name] not in known:
            raise UserError(
                f"{name}={asked[name]!r}, but the given Pipeline has {known[0]!r}; set it when the Pipeline is made"
            )


def loss_scaler(pipe: Pipeline) -> LossScaler | None:
    """float16 needs one, for its smallest number is 6e-8. Raises UserError where the weights are not in float32."""
    if pipe.adapter.autocast is None or pipe.adapter.autocast.dtype != torch.float16:
        return None
    if pipe.adapter.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"fp16: the weights are {pipe.adapter.dtype}, and a scaled loss needs float32 weights and gradients; load "
            "the model in float32, or use bf16"
        )
    return LossScaler()


def default_collator(processing_class: Any) -> Callable[[list[Any]], Batch]:
    """Trainer's default collator: pad with the tokenizer, if there is one."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        collator: Callable[[list[Any]], Batch] = DataCollatorWithPadding(processing_class)
        return collator
    return default_data_collator
