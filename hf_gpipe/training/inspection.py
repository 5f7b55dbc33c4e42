"""The part of the trainer that holds no state: attributes, loaders, reports and uploads, named as in transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, trainer_pt_utils
from transformers.trainer_callback import CallbackHandler

from hf_gpipe.checkpoint.save import make_directory
from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.calls import by_every_process
from hf_gpipe.runtime.loss import Reads
from hf_gpipe.runtime.world import World
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loader import MiniBatches
from hf_gpipe.training.model_card import write_model_card
from hf_gpipe.training.steps import data_seed
from hf_gpipe.training.surface import check_assignment, missing


class InspectedTrainer:
    """The attributes and methods that hold no state of their own: all that they need is declared here.

    What Trainer has and this has not says what to use instead.
    """

    args: PipelineTrainingArguments
    pipe: Pipeline
    world: World
    uploads: HubUploads
    optimizer: torch.optim.Optimizer | None
    callback_handler: CallbackHandler
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    fire: Callable[..., None]
    save_model: Callable[..., None]

    #: Columns of rows that the collator reads beside those of the model.
    _collated_columns: tuple[str, ...] = ()

    #: No other engine is used, which scripts ask for.
    deepspeed = None
    is_deepspeed_enabled = is_fsdp_enabled = False
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False

    if not TYPE_CHECKING:  # a type checker goes on finding what is misspelt

        def __getattr__(self, name: str) -> Any:
            raise missing(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        check_assignment(self, name)
        super().__setattr__(name, value)

    # ------------------------------------------------------------------ the model

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model over the tensors that are trained: `Pipeline.model`."""
        return self.pipe.model

    @property
    def model_wrapped(self) -> PreTrainedModel:
        """The same model: nothing is wrapped around it."""
        return self.pipe.model

    def get_num_trainable_parameters(self) -> int:
        """Trainable parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    # ------------------------------------------------------------------ the training

    @property
    def _output_dir(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def label_names(self) -> list[str]:
        """The entries of a mini-batch that the loss is computed against."""
        return ["labels"]

    @property
    def compute_loss_func(self) -> Callable[..., Any] | None:
        """The function of logits that is the loss; None: the loss reads something else."""
        return getattr(self.pipe.loss, "function", None) if Reads.LOGITS in self.pipe.loss.reads else None

    @property
    def hub_model_id(self) -> str | None:
        """The repository on the Hub; None before it is made."""
        return self.uploads.repo_id

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process."""
        return self.world.is_reporter

    def get_total_train_batch_size(self, args: PipelineTrainingArguments) -> int:
        """Rows of one update. Raises UserError with `batch_tokens`, where it varies."""
        if args.batch_tokens is not None:
            raise UserError("get_total_train_batch_size: with batch_tokens the rows of an update vary")
        return args.per_device_train_batch_size * args.gradient_accumulation_steps

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each group of parameters. Raises UserError before there is an optimizer."""
        return [group["lr"] for group in self._made_optimizer().param_groups]

    def get_optimizer_group(self, param: torch.nn.Parameter | None = None) -> Any:
        """The optimizer's group that holds a parameter; without one, the parameters of each group."""
        groups = self._made_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        for group in groups:
            if any(one is param for one in group["params"]):
                return group
        raise UserError("get_optimizer_group: no group of this process's optimizer holds this parameter")

    def _made_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise UserError("there is no optimizer yet: train makes it, or create_optimizer")
        return self.optimizer

    #: Of the arguments and a model: the class of optimizer that they ask for, and its arguments.
    get_optimizer_cls_and_kwargs = staticmethod(Trainer.get_optimizer_cls_and_kwargs)

    def get_decay_parameter_names(self, model: PreTrainedModel) -> list[str]:
        """The parameters of a stage's model, or of the whole one, that weight decay is for."""
        names: list[str] = Trainer.get_decay_parameter_names(None, model)
        return names

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, an instance or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        """Remove the first callback that is, or is of, `callback`, and return it."""
        popped: TrainerCallback | None = self.callback_handler.pop_callback(callback)
        return popped

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove the first callback that is, or is of, `callback`."""
        self.callback_handler.remove_callback(callback)

    # ------------------------------------------------------------------ the data

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a loader's dataset; where it has no length, about as many as the mini-batches have."""
        dataset: Any = getattr(dataloader, "dataset", None)
        if hasattr(dataset, "__len__"):
            return len(dataset)
        return len(dataloader) * self.args.per_device_train_batch_size

    def get_train_dataloader(self) -> MiniBatches:
        """The mini-batches of the training; iterated over, those of the first epoch.

        Raises UserError in a process that has no training dataset.
        """
        return self._train_batches(_given(self.train_dataset, "training requires a train_dataset"))

    def get_eval_dataloader(self, eval_dataset: Any = None) -> MiniBatches:
        """The mini-batches of an evaluation; `eval_dataset` may be a name of the trainer's dict of datasets.

        Raises UserError in a process that has no such dataset.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        return self._eval_batches(_given(dataset, "evaluation requires an eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> MiniBatches:
        """The mini-batches of a prediction."""
        return self._eval_batches(_given(test_dataset, "prediction requires a test_dataset"))

    def _train_batches(self, dataset: Any) -> MiniBatches:
        args = self.args
        return replace(
            self._batches(dataset, args.per_device_train_batch_size, args.train_sampling_strategy),
            drop_last=args.dataloader_drop_last,
            batch_tokens=args.batch_tokens,
            temperature=args.sampling_temperature,
        )

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        return self._batches(dataset, self.args.per_device_eval_batch_size)

    def _batches(self, dataset: Any, batch_size: int, order: str = "sequential") -> MiniBatches:
        columns = None
        if self.args.remove_unused_columns:
            columns = {
                *inspect.signature(self.pipe.adapter.reference.forward).parameters,
                "label",
                "label_ids",
                "labels",
                *self._collated_columns,
            }
            if getattr(self.data_collator, "padding_free", False):
                # TRL's collator reads the lengths of packed documents from it.
                columns.add("seq_lengths")
        names = ("num_workers", "prefetch_factor", "multiprocessing_context", "in_order")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        return MiniBatches(
            dataset,
            self.data_collator,
            batch_size,
            order,
            seed=data_seed(self.args),
            columns=columns,
            length_column=self.args.length_column_name,
            workers=options if options["num_workers"] else None,
        )

    # ------------------------------------------------------------------ files about the training

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Draft the model card, README.md in `args.output_dir`, as transformers' Trainer does; the main process does.

        Args:
            language: of the model.
            license: of the model.
            tags: of the model.
            model_name: the card's title; None: the output directory's name.
            finetuned_from: the model that was trained further; None: what its configuration says.
            tasks: of the model; None: what its class is for.
            dataset_tags: names of the datasets on the Hub.
            dataset: names of the datasets for people.
            dataset_args: their configurations.

        Raises:
            UserError: the directory cannot be made.
        """
        if not self.is_world_process_zero():
            return
        make_directory(self._output_dir)
        write_model_card(
            self,
            self._output_dir / "README.md",
            language=language,
            license=license,
            tags=tags,
            model_name=model_name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )

    #: Makes the values of metrics readable, for `log_metrics`.
    metrics_format = staticmethod(trainer_pt_utils.metrics_format)

    def log_metrics(self, split: str, metrics: dict[str, Any]) -> None:
        """Print metrics as a table, as transformers' Trainer does; the main process does."""
        trainer_pt_utils.log_metrics(self, split, metrics)

    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        """Write metrics into `{split}_results.json` of `args.output_dir`; the main process does.

        Args:
            split: "train", "eval", "test" or "all".
            metrics: what `train`, `evaluate` or `predict` gave.
            combined: whether they are also added to all_results.json.

        Raises:
            UserError: the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        trainer_pt_utils.save_metrics(self, split, metrics, combined)

    def save_state(self) -> None:
        """Write the state of the training, with its log, into `args.output_dir`; the main process does.

        Raises UserError where the directory cannot be made.
        """
        if self.is_world_process_zero():
            make_directory(self._output_dir)
        trainer_pt_utils.save_state(self)

    # ------------------------------------------------------------------ the Hub

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
            commit_message: of the commit.
            blocking: whether to wait until all is uploaded.
            token: in place of `hub_token`.
            revision: branch, in place of `hub_revision`.
            private: whether a new repository is private, in place of `hub_private_repo`.
            card: arguments of `create_model_card`.

        Returns:
            In the main process what `huggingface_hub.HfApi.upload_folder` returns: the commit, or its future.

        Raises:
            UserError: in every process, where the Hub does not accept the model.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self.save_model(_internal_call=True)
        options = {"blocking": blocking, "token": token, "revision": revision}
        return self._push(self._output_dir, commit_message or "End of training", card, **options)

    def _push(self, directory: Path, message: str, card: dict[str, Any], **options: Any) -> Any:
        """Upload a saved model; `options` are those of `HubUploads.push`."""
        self.fire("on_push_begin")
        if directory == self._output_dir:
            name = (self.args.hub_model_id or directory.absolute().name).rpartition("/")[2]
            self.world.from_writer(lambda: self.create_model_card(**{"model_name": name, **card}))
        return self.uploads.push(directory, message, **options)


def _given(dataset: Any, required: str) -> Any:
    if dataset is None:
        raise UserError(required)
    return dataset
