"""Parts of the trainer that its constructor makes: the pipeline, callbacks, collator and loss scaler."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import (
    DataCollatorWithPadding,
    DefaultFlowCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProcessorMixin,
    TrainerCallback,
    TrainerControl,
    default_data_collator,
    trainer_utils,
)

from hf_gpipe.adapters.text import check_reads_text
from hf_gpipe.checkpoint.directory import checkpoints
from hf_gpipe.checkpoint.state import TRAINER_STATE_FILE, options_of_groups, read_state
from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.job.agreement import compare
from hf_gpipe.job.job import Job
from hf_gpipe.job.joining import join_job
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers_trainer import (
    CallbackHandler,
    ExportableState,
    get_reporting_integration_callbacks,
)
from hf_gpipe.losses.custom import asked_loss
from hf_gpipe.losses.loss import Loss
from hf_gpipe.model.opening import chain_of
from hf_gpipe.model.spec import ModelSpec
from hf_gpipe.pipeline import Pipeline, PipelineRequest
from hf_gpipe.pipeline.decision import check_draws_alike
from hf_gpipe.planner.costs.measure import rated_machine
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.runtime.generation import check_generates
from hf_gpipe.settings.mode import AUTO
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.generating import generation_config_of
from hf_gpipe.training.loader import Collate
from hf_gpipe.training.longest import longest_mini_batch
from hf_gpipe.training.loss_scaling import LossScaler
from hf_gpipe.training.progress import MetricsFile, ProgressBar

logger = transformers.logging.get_logger(__name__)

#: Arguments that may differ between processes: where each writes and what it shows, and a token that must not travel.
_OF_EACH_PROCESS = (
    *("output_dir", "logging_dir", "run_name", "report_to", "project", "trackio_space_id", "disable_tqdm", "log_level"),
    *("log_level_replica", "log_on_each_node", "local_rank", "hub_token"),
)


def join_with(args: PipelineTrainingArguments, **others: Any) -> Job:
    """Join the job, and compare the arguments of a trainer with those of the other processes.

    Args:
        args: the arguments of the trainer.
        others: what else the trainer was given that must be the same in every process, by name.

    Raises:
        DisagreementError: the arguments differ; raised on every process.
    """
    job = join_job(args.ddp_timeout)
    names = [argument.name for argument in fields(args) if argument.name not in _OF_EACH_PROCESS]
    compared = {name: getattr(args, name) for name in names}
    compare(lambda: {**compared, **others}, f"arguments of the trainer ({type(args).__name__})")
    return job


def options_of(optimizer: torch.optim.Optimizer | None) -> Any:
    """The facts of a given optimizer that are compared: its class, and the options of its groups of parameters."""
    if optimizer is None:
        return None
    return type(optimizer).__name__, options_of_groups(optimizer)


def set_up_model(pipe: Pipeline, args: PipelineTrainingArguments) -> None:
    """Set what the arguments say about a pipeline's model. Raises UserError where the model has no such setting."""
    for name in args.of_text:
        check_reads_text(pipe.adapter, f"{name}={getattr(args, name)!r}")
    if args.predict_with_generate:
        check_generates(pipe.adapter)
    if args.neftune_noise_alpha is not None and pipe.adapter.config.is_encoder_decoder:
        raise UserError(
            f"neftune_noise_alpha={args.neftune_noise_alpha!r}: {pipe.adapter.config.model_type} has an encoder, and "
            "the noise is supported for decoder-only models; leave it out"
        )
    if args.neftune_noise_alpha is not None:
        check_draws_alike(pipe.decision.world, f"neftune_noise_alpha={args.neftune_noise_alpha!r}")
    for stage in pipe.weights.every_model:
        stage.add_noise(args.neftune_noise_alpha)
    if args.generation_config is not None:
        pipe.adapter.reference.generation_config = generation_config_of(args.generation_config)


def align_special_tokens(pipe: Pipeline, processing_class: Any) -> None:
    """Set the ends, starts and padding of a model's configurations to the tokenizer's, as Trainer does. All call it.

    The modules stay as they were made, as a plain model's do: a new padding token gets gradients in the embedding.
    """
    is_known = isinstance(processing_class, PreTrainedTokenizerBase | ProcessorMixin)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    tokens = pipe.world.from_main(lambda: {n: getattr(tokenizer, n) for n in _TOKENS} if is_known else None)
    if tokens is None or not isinstance(reference := pipe.adapter.reference, PreTrainedModel):
        return
    trainer_utils.align_special_tokens(reference, SimpleNamespace(**tokens))
    config = reference.config.get_text_config()
    for stage in pipe.weights.every_model:
        for name in _TOKENS:
            setattr(stage.model.config.get_text_config(), name, getattr(config, name, None))


_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


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


def name_of_callback(error: Exception) -> str:
    """The class of the callback that raised an exception, from its traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        called = frame.f_locals.get("self")
        if isinstance(called, TrainerCallback) and not isinstance(called, CallbackHandler):
            return type(called).__name__
    return "a callback"


def restore_callbacks(callbacks: list[TrainerCallback], saved: Mapping[str, Any], world: World) -> None:
    """Give each callback that keeps a state the state saved under its class's name, in order.

    A saved state without its callback is a warning, as in Trainer.

    Raises CheckpointError where the state is not a state of that class.
    """
    states_of = {name: list(s) if isinstance(s, list) else [s] for name, s in saved.items()}
    for index, callback in enumerate(callbacks):
        states = states_of.get(type(callback).__name__)
        if states and isinstance(callback, ExportableState):
            try:
                callbacks[index] = type(callback).from_state(states.pop(0))
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                name = type(callback).__name__
                raise CheckpointError(
                    f"stateful_callbacks.{name} in {TRAINER_STATE_FILE} does not fit the callback: {error!r}; resume "
                    "from another checkpoint, or with restore_callback_states_from_checkpoint=False"
                ) from error
    missing = [name for name, states in states_of.items() if states and name != TrainerControl.__name__]
    if missing and world.is_main:
        logger.warning(
            f"the checkpoint has the state of {', '.join(missing)}, and this training has no such callback: the state "
            "is ignored; give the callback to go on with it"
        )


def make_pipeline(
    spec: ModelSpec,
    args: PipelineTrainingArguments,
    example: Callable[[], Mapping[str, torch.Tensor] | Workload | None],
    world: World,
    loss: Loss | None,
) -> Pipeline:
    """Make the pipeline that the arguments ask for.

    Args:
        spec: the model.
        args: the trainer's arguments.
        example: the shape of the longest mini-batch to come, for the planner.
        world: the processes of the job, with the chosen devices.
        loss: the loss in place of the cross-entropy.
    """
    config = args.config
    inputs = args.planned(PlanInputs.from_training(args, packing=args.packs_rows))
    # The example is what the layers of a chain are found with.
    if chain_of(spec) is not None or not config.with_defaults(can_plan=True).is_decided:
        examples: list[Any] = []
        world.from_main(lambda: examples.append(example()), takes_long=True)
        inputs = replace(inputs, example=examples[0] if examples else None)
    if config.num_micro_batches in (None, AUTO):
        config = config.resumed(world.from_main(lambda: _num_micro_batches_before(Path(str(args.output_dir)))))
    loss = asked_loss(loss, args.token_loss)
    return Pipeline.of(PipelineRequest(spec, config, inputs, args.seed, loss, args.sorts_rows), world)


def _num_micro_batches_before(output_dir: Path) -> int | None:
    """The number of micro-batches of the newest checkpoint that has it; None: there is none."""
    for checkpoint in reversed(checkpoints(output_dir)):
        with suppress(UserError, OSError):  # it is reported where it is needed
            return read_state(checkpoint).run.num_micro_batches
    return None


def example_of(dataset: Any, args: PipelineTrainingArguments) -> Mapping[str, torch.Tensor] | Workload | None:
    """The longest mini-batch to come, or its shape, for the planner."""
    if (largest := getattr(dataset, "largest", None)) is not None:  # of rows with images
        return largest(args.per_device_train_batch_size)
    return longest_mini_batch(dataset, args.size, by_length=args.sorts_rows, packing=args.packs_rows)


def loss_scaler(pipe: Pipeline, args: PipelineTrainingArguments) -> LossScaler | None:
    """The loss scaler that float16 needs, since its smallest number is 6e-8; None for other types.

    Raises UserError where updated weights would be in half precision, or frozen ones in bfloat16."""
    if pipe.adapter.autocast is None or pipe.adapter.autocast.dtype != torch.float16:
        return None
    exact, has_copies = (torch.float32, torch.float64), args.fp32_master_weights
    trained = {name: p.dtype for name, p in pipe.named_parameters() if p.requires_grad and p.dtype not in exact}
    wrong = [] if has_copies else [f"{name}, which is trained, is {dtype}" for name, dtype in trained.items()]
    if pipe.adapter.dtype not in (*exact, *[torch.float16] * (has_copies or pipe.adapter.peft is not None)):
        wrong = [f"the weights are {pipe.adapter.dtype}"]
    if wrong:
        raise UserError(
            f"fp16: {wrong[0]}, and a scaled loss needs updates in float32; load the model "
            "in float32, or in float16 with fp32_master_weights=True or adapters in float32, or use bf16"
        )
    return LossScaler()


def sum_in_float16(args: PipelineTrainingArguments, device: torch.device) -> None:
    """Let products of float16 sum in float16 in this process, where the arguments ask for it.

    Raises UserError where the products are in another type, or the device gains nothing."""
    args.check_accumulation()
    if args.fp16_accumulation:
        rated_machine(device).summing_in_float16()
        torch.backends.cuda.matmul.allow_fp16_accumulation = True


def default_collator(processing_class: Any) -> Collate:
    """Trainer's default collator: pad with the tokenizer, if there is one."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator
