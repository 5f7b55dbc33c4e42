"""The attributes and methods that scripts, callbacks and the loop of a training ask of a trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel, Trainer, TrainerControl, TrainerState

from hf_gpipe.errors import UserError
from hf_gpipe.job.job import Job
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers_trainer import CallbackHandler, ExportableState, metrics_format, speed_metrics
from hf_gpipe.losses.loss import Reads
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.base import name_of_callback
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.loss_scaling import LossScaler
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.predicting import Preprocess
from hf_gpipe.training.surface import Surface


def in_lists(metrics: Any) -> Any:
    """Put lists and numbers in place of arrays and tensors, since logs and checkpoints are JSON."""
    if isinstance(metrics, Mapping):
        return {name: in_lists(value) for name, value in metrics.items()}
    return metrics.tolist() if hasattr(metrics, "tolist") else metrics


class TrainerInterface:
    """Attributes of a trainer, most of which a script may set, and methods beside its training."""

    args: PipelineTrainingArguments
    pipe: Pipeline
    world: World
    job: Job
    processing_class: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    compute_metrics: Callable[..., dict[str, Any]] | None
    preprocess_logits_for_metrics: Preprocess | None
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    scaler: LossScaler | None
    master_weights: MasterWeights | None
    callback_handler: CallbackHandler
    control: TrainerControl
    state: TrainerState
    #: The number of tokens without padding that this trainer has trained on.
    num_trained_tokens = 0
    #: The number of tokens that earlier trainings had seen.
    _first_num_tokens = 0
    #: The attributes of the class that subclasses derive from, by which overrides are checked.
    _surface: ClassVar[Surface]

    #: None: no other engine is used. Scripts read this attribute.
    deepspeed = None
    is_deepspeed_enabled = is_fsdp_enabled = False
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False

    if not TYPE_CHECKING:  # a type checker goes on finding what is misspelt

        def __getattr__(self, name: str) -> Any:
            raise self._surface.missing(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._surface.check_assignment(self, name)
        super().__setattr__(name, value)

    def _check_surface(self) -> None:
        """Raise UserError for an override, or a parameter of `model`, that was added since and would not be used."""
        self._surface.check_class(type(self))
        self.pipe.model  # noqa: B018  # the property checks

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model over the tensors that are trained: `Pipeline.model`."""
        return self.pipe.model

    @property
    def model_wrapped(self) -> PreTrainedModel:
        """The model, since nothing is wrapped around it."""
        return self.pipe.model

    @property
    def label_names(self) -> list[str]:
        """The entries of a mini-batch that the loss is computed against."""
        return ["labels"]

    @property
    def compute_loss_func(self) -> Callable[..., Any] | None:
        """The function of logits that is the loss; None: the loss reads something else."""
        return getattr(self.pipe.loss, "function", None) if Reads.LOGITS in self.pipe.loss.reads else None

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process."""
        return self.world.is_main

    def get_total_train_batch_size(self, args: PipelineTrainingArguments) -> int:
        """The number of rows of an update. Raises UserError where it varies."""
        if (rows := args.size.rows_of_step) is None:
            raise UserError(f"get_total_train_batch_size: a mini-batch has {args.size}, so the rows of an update vary")
        return rows

    def num_examples(self, dataloader: Any) -> int:
        """The number of rows of a loader's dataset; about that of the mini-batches' rows, where it has no length."""
        dataset: Any = getattr(dataloader, "dataset", None)
        if hasattr(dataset, "__len__"):
            return len(dataset)
        return len(dataloader) * self.args.per_device_train_batch_size

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters. Raises UserError before there is an optimizer."""
        return [group["lr"] for group in self.made_optimizer().param_groups]

    def get_optimizer_group(self, param: torch.nn.Parameter | None = None) -> Any:
        """The optimizer's group that holds a parameter; the parameters of each group, where none is given."""
        groups = self.made_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        for group in groups:
            if any(parameter is param for parameter in group["params"]):
                return group
        raise UserError("get_optimizer_group: no group of this process's optimizer holds this parameter")

    def made_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Raises UserError before it exists."""
        if self.optimizer is None:
            raise UserError("there is no optimizer yet: train makes it, or create_optimizer")
        return self.optimizer

    # These are Trainer's own functions, which read nothing that this trainer lacks.
    get_optimizer_cls_and_kwargs = staticmethod(Trainer.get_optimizer_cls_and_kwargs)
    get_decay_parameter_names = Trainer.get_decay_parameter_names
    get_num_trainable_parameters = Trainer.get_num_trainable_parameters
    is_local_process_zero = Trainer.is_local_process_zero
    add_callback, pop_callback = Trainer.add_callback, Trainer.pop_callback
    remove_callback = Trainer.remove_callback
    log_metrics, metrics_format = Trainer.log_metrics, staticmethod(metrics_format)

    # ------------------------------------------------------------------ callbacks and logs

    def fire(self, event: str, **kwargs: Any) -> None:
        """Call an event of the callbacks of this process."""
        try:
            self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **kwargs)
        except Exception as error:
            self.job.note(f"{self.job.work}, in {name_of_callback(error)}.{event}".removeprefix(", "))
            raise

    def new_state(self) -> TrainerState:
        """The state before a training, with the present state of callbacks that keep a state."""
        callbacks = [*self.callback_handler.callbacks, self.control]
        return TrainerState(
            is_local_process_zero=self.args.local_process_index == 0,
            is_world_process_zero=self.world.is_main,
            stateful_callbacks=[callback for callback in callbacks if isinstance(callback, ExportableState)],
            train_batch_size=self.args.per_device_train_batch_size,
        )

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add metrics to the state's history and give them to the callbacks of this process.

        Args:
            logs: the metrics.
            start_time: the start of the training; with `include_num_input_tokens_seen` it gives the tokens per second.
        """
        if "loss" in logs:
            logs.update(self.metrics_of_loss(is_training=True))
        logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            seen = logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                logs |= speed_metrics("train", start_time, num_tokens=seen - self._first_num_tokens)
        for name, value in logs.items():
            logs[name] = in_lists(value)
            try:
                json.dumps(logs[name])
            except (TypeError, ValueError) as error:
                raise UserError(f"log: the value of {name!r} has no form in JSON: {error}; give a number") from error
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    # ------------------------------------------------------------------ for subclasses

    def metrics_of_loss(self, *, is_training: bool) -> dict[str, float]:
        """Metrics that the loss has noted since the last call, empty here. Every process calls it and gets the same."""
        return {}

    @property
    def updates_per_step(self) -> int:
        """The number of updates from the mini-batches of a step."""
        return 1

    def prepared(self, group: Sequence[Batch], *, is_training: bool = True) -> Sequence[Batch]:
        """Turn the loader's mini-batches of a step, or of an evaluation, into those that the model reads.

        Every process calls it.
        """
        return group
