"""Attributes and small methods of transformers' Trainer that need to know nothing of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, trainer_pt_utils

from hf_gpipe.checkpoint.save import make_directory
from hf_gpipe.errors import UserError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.loss import Reads
from hf_gpipe.runtime.world import World
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.model_card import write_model_card


class TrainerInterface:
    """Attributes and methods that a script asks a trainer for, beside its training."""

    args: PipelineTrainingArguments
    pipe: Pipeline
    world: World
    uploads: HubUploads
    optimizer: torch.optim.Optimizer | None

    #: No other engine is used, which scripts ask for.
    deepspeed = None
    is_deepspeed_enabled = is_fsdp_enabled = False
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False

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
            if any(parameter is param for parameter in group["params"]):
                return group
        raise UserError("get_optimizer_group: no group of this process's optimizer holds this parameter")

    def _made_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise UserError("there is no optimizer yet: train makes it, or create_optimizer")
        return self.optimizer

    # Trainer's own, which read nothing of a trainer that is not here.
    get_optimizer_cls_and_kwargs = staticmethod(Trainer.get_optimizer_cls_and_kwargs)
    get_decay_parameter_names = Trainer.get_decay_parameter_names
    get_num_trainable_parameters = Trainer.get_num_trainable_parameters
    is_local_process_zero = Trainer.is_local_process_zero
    add_callback, pop_callback = Trainer.add_callback, Trainer.pop_callback
    remove_callback = Trainer.remove_callback
    log_metrics, metrics_format = Trainer.log_metrics, staticmethod(trainer_pt_utils.metrics_format)

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a loader's dataset; where it has no length, about as many as the mini-batches have."""
        dataset: Any = getattr(dataloader, "dataset", None)
        if hasattr(dataset, "__len__"):
            return len(dataset)
        return len(dataloader) * self.args.per_device_train_batch_size

    def create_model_card(self, *entries: Any, **named_entries: Any) -> None:
        """Draft the model card, README.md in `args.output_dir`; the main process does.

        The arguments, such as `language`, `tags` and `dataset`, are those of transformers' `Trainer.create_model_card`.

        Raises UserError where the directory cannot be made.
        """
        card = inspect.signature(Trainer.create_model_card).bind(self, *entries, **named_entries).arguments
        if self.is_world_process_zero():
            make_directory(self._output_dir)
            write_model_card(self, self._output_dir / "README.md", **{k: v for k, v in card.items() if k != "self"})

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
