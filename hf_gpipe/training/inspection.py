"""What scripts and callbacks read of a trainer, under the names of transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.topology import Topology
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loader import MiniBatches
from hf_gpipe.training.surface import check_assignment, missing


class InspectedTrainer:
    """The attributes and methods that change nothing. What Trainer has and this has not says what to use instead."""

    args: PipelineTrainingArguments
    pipe: Pipeline
    topology: Topology
    uploads: HubUploads
    optimizer: torch.optim.Optimizer | None
    train_dataset: Any
    eval_dataset: Any
    _is_in_train = False

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
    def is_in_train(self) -> bool:
        """Whether `train` is under way."""
        return self._is_in_train

    @property
    def label_names(self) -> list[str]:
        """The entries of a mini-batch that the loss is computed against."""
        return ["labels"]

    @property
    def hub_model_id(self) -> str | None:
        """The repository on the Hub; None before it is made."""
        return self.uploads.repo_id

    def is_local_process_zero(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.args.local_process_index == 0

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process."""
        return self.topology.is_main

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
        raise NotImplementedError

    def _eval_batches(self, dataset: Any) -> MiniBatches:
        raise NotImplementedError


def _given(dataset: Any, required: str) -> Any:
    if dataset is None:
        raise UserError(required)
    return dataset
