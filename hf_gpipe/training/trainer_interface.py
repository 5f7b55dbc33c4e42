"""Attributes and methods of a trainer beside its training and evaluation, for scripts, callbacks and its own parts."""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState

from hf_gpipe.checkpoint.save import make_directory
from hf_gpipe.checkpoint.state import TRAINER_STATE_FILE
from hf_gpipe.checkpoint.writer import CheckpointWriter
from hf_gpipe.errors import UserError
from hf_gpipe.job.calls import by_every_process
from hf_gpipe.job.job import Job
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers_trainer import (
    CallbackHandler,
    ExportableState,
    metrics_format,
    save_metrics,
    save_state,
    speed_metrics,
)
from hf_gpipe.losses.loss import Reads
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training import progress
from hf_gpipe.training.accelerator_view import AcceleratorView
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.base import name_of_callback
from hf_gpipe.training.disk_state import DiskState
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.loss_scaling import LossScaler
from hf_gpipe.training.master_weights import MasterWeights
from hf_gpipe.training.model_card import add_card, write_card
from hf_gpipe.training.predicting import Preprocess
from hf_gpipe.training.surface import Surface


def in_lists(metrics: Any) -> Any:
    """Put lists and numbers in place of arrays and tensors, since logs and checkpoints are JSON."""
    if isinstance(metrics, Mapping):
        return {name: in_lists(value) for name, value in metrics.items()}
    return metrics.tolist() if hasattr(metrics, "tolist") else metrics


def may_read_weights(callback: TrainerCallback, event: str) -> bool:
    """Whether a callback does something at an event, and is neither transformers' nor shows progress alone."""
    module = getattr(callback, event).__module__
    return not module.startswith("transformers.") and module != progress.__name__


class TrainerInterface:
    """Attributes of a trainer, most of which a script may set, and methods beside its training and evaluation.

    The parts of a trainer, which are its loop, evaluator, checkpoints and logs, get a trainer by this class.
    """

    args: PipelineTrainingArguments
    pipe: Pipeline
    world: World
    job: Job
    processing_class: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    compute_metrics: Callable[..., dict[str, Any]] | None
    model_init: Callable[..., PreTrainedModel] | None
    preprocess_logits_for_metrics: Preprocess | None
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    scaler: LossScaler | None
    master_weights: MasterWeights | None
    callback_handler: CallbackHandler
    uploads: HubUploads
    control: TrainerControl
    state: TrainerState
    #: The optimizer's state, where it is on a disk.
    disk_state: DiskState | None = None
    #: The number of tokens without padding that this trainer has trained on.
    num_trained_tokens = 0
    #: The number of tokens that earlier trainings had seen.
    num_tokens_before = 0
    #: The attributes of the class that subclasses derive from, by which overrides are checked.
    _surface: ClassVar[Surface]
    _is_in_train = False
    evaluate: Callable[..., dict[str, float]]
    create_optimizer_and_scheduler: Callable[[int], None]

    #: The columns of rows that the collator reads beside the columns that the model reads.
    _collated_columns: tuple[str, ...] = ()

    #: The entries of a mini-batch that the loss is computed against.
    label_names: ClassVar[list[str]] = ["labels"]
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

    def overrides(self, method: str) -> bool:
        """Whether a method is a subclass's."""
        return not self._surface.has(getattr(self, method))

    @property
    def is_in_train(self) -> bool:
        """Whether `train` is under way."""
        return self._is_in_train

    @property
    def model(self) -> Any:
        """The Hugging Face model over the tensors that are trained: `Pipeline.peft_model`."""
        return self.pipe.peft_model

    @property
    def model_wrapped(self) -> Any:
        """The model, since nothing is wrapped around it."""
        return self.model

    @property
    def accelerator(self) -> AcceleratorView:
        """The processes, in the words of accelerate."""
        return AcceleratorView(self.world, self.args)

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
    remove_callback, call_model_init = Trainer.remove_callback, Trainer.call_model_init
    log_metrics, metrics_format = Trainer.log_metrics, staticmethod(metrics_format)

    # ------------------------------------------------------------------ callbacks and logs

    def fire(self, event: str, **kwargs: Any) -> None:
        """Call an event of the callbacks of this process."""
        if any(may_read_weights(callback, event) for callback in self.callback_handler.callbacks):
            self.pipe.weights.late.make()
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
                logs |= speed_metrics("train", start_time, num_tokens=seen - self.num_tokens_before)
        for name, value in logs.items():
            logs[name] = in_lists(value)
            try:
                json.dumps(logs[name])
            except (TypeError, ValueError) as error:
                raise UserError(f"log: the value of {name!r} has no form in JSON: {error}; give a number") from error
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.fire("on_log", logs=logs)

    # ------------------------------------------------------------------ files

    @property
    def _output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @by_every_process
    def save_model(self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False) -> None:
        """Write model and tokenizer in Hub format, by default into `args.output_dir`. Every process calls it.

        With `push_to_hub` the model is then uploaded, as transformers' Trainer does. A directory without a README.md
        gets a model card, which names the base model of PEFT adapters as peft does.

        Args:
            output_dir: the directory to write to; None: `args.output_dir`.
            _internal_call: whether the trainer calls it for a checkpoint or an upload; then nothing is uploaded here,
                and there is no card.
        """
        directory = Path(output_dir) if output_dir is not None else self._output_dir
        self._check_surface()
        self.pipe.weights.save(directory, self._write_beside_model)
        if _internal_call:
            return
        self.world.from_main(lambda: add_card(self, directory))
        if self.world.is_main:
            print(f"the model is saved in {directory}", file=sys.stderr, flush=True)
        if self.args.push_to_hub:
            self._push(directory, "Model save", {})

    def begin_to_save(self, writer: CheckpointWriter, directory: Path) -> None:
        """Give a writer the model of a checkpoint. An overridden `save_model` writes the model at once instead."""
        if saves := self._saves_model_itself:
            self._check_surface()
        else:
            self.save_model(str(directory), _internal_call=True)
        writer.begin(directory, self._write_beside_model, has_model=saves)

    def try_to_save(self, writer: CheckpointWriter, directory: Path) -> None:
        """Write what a checkpoint has beside tensors into a directory. Every process calls it.

        Raises UserError where something has no form in a file, such as the state of a callback.
        """
        state = copy.deepcopy(self.state)
        state.stateful_callbacks = self.new_state().stateful_callbacks

        def write(folder: Path) -> None:
            self._write_beside_model(folder)
            state.save_to_json(folder / TRAINER_STATE_FILE)

        writer.prepare(directory, write, has_model=self._saves_model_itself)

    @property
    def _saves_model_itself(self) -> bool:
        """Whether `save_model` is not overridden."""
        return getattr(self.save_model, "__func__", None) is TrainerInterface.save_model

    def _write_beside_model(self, folder: Path) -> None:
        """Write the small files of the main process that belong to the model."""
        if (tokenizer := self.processing_class or getattr(self.data_collator, "tokenizer", None)) is not None:
            tokenizer.save_pretrained(folder)

    def create_model_card(self, *entries: Any, **named_entries: Any) -> None:
        """Draft the model card, README.md in `args.output_dir`. Only the main process writes.

        The arguments, such as `language`, `tags` and `dataset`, are those of transformers' `Trainer.create_model_card`.
        The tags of an existing card are kept.

        Raises UserError where the directory cannot be made.
        """
        given = inspect.signature(Trainer.create_model_card).bind(self, *entries, **named_entries).arguments
        if not self.is_world_process_zero():
            return
        make_directory(self._output_dir)
        write_card(self, self._output_dir, {name: value for name, value in given.items() if name != "self"})

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics into `{split}_results.json` of `args.output_dir`. Only the main process writes.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: the metrics that `train`, `evaluate` or `predict` returned.
            combined: whether the metrics are also added to all_results.json.

        Raises:
            UserError: the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write the state of the training, with its log, into `args.output_dir`. Only the main process writes.

        Raises UserError where the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        save_state(self)

    # ------------------------------------------------------------------ the Hub

    @property
    def hub_model_id(self) -> str | None:
        """The repository on the Hub; None before it is made."""
        return self.uploads.repo_id

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository on the Hub, unless it exists. Every process calls it.

        Raises UserError, in every process, if the Hub does not accept it.
        """
        self.uploads.create(token, private)

    @by_every_process
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **card: Any,
    ) -> Any:
        """Save the model into `args.output_dir` and upload it to `args.hub_model_id`. Every process calls it.

        Args:
            commit_message: the message of the commit.
            blocking: whether to wait until all is uploaded.
            token: the token of the Hub, in place of `hub_token`.
            revision: the branch, in place of `hub_revision`.
            private: whether a new repository is private, in place of `hub_private_repo`.
            card: the arguments of `create_model_card`.

        Returns:
            The result of `huggingface_hub.HfApi.upload_folder` in the main process: the commit, or its future.

        Raises:
            UserError: in every process, where the Hub does not accept the model.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        options = {"blocking": blocking, "token": token, "revision": revision}
        return self._push(self._output_dir, commit_message or "End of training", card, **options)

    def _push(self, directory: Path, message: str, card: dict[str, Any], **options: Any) -> Any:
        """Upload a saved model; `options` as for `HubUploads.push`."""
        self.fire("on_push_begin")
        if directory == self._output_dir:
            name = (self.args.hub_model_id or directory.absolute().name).rpartition("/")[2]
            self.world.from_main(lambda: self.create_model_card(**{"model_name": name, **card}))
        return self.uploads.push(directory, message, **options)

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
