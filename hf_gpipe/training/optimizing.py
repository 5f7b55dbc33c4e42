"""The trainer's optimizer and scheduler: made by methods that a subclass may override, then checked."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from hf_gpipe.errors import UserError
from hf_gpipe.training.optim import check_optimizer, make_optimizer, make_scheduler
from hf_gpipe.training.saving import SavingTrainer


class OptimizingTrainer(SavingTrainer):
    """A trainer that makes its optimizer and scheduler, by the names of transformers' Trainer."""

    def _make_optimizer_and_scheduler(self, num_steps: int) -> None:
        """Make what is not there yet, and check it. Raises UserError where it does not fit the model."""
        if self._makes_scheduler:
            self.lr_scheduler = None
        self.create_optimizer_and_scheduler(num_steps)
        if self.optimizer is None or self.lr_scheduler is None:
            missing = "optimizer" if self.optimizer is None else "lr_scheduler"
            raise UserError(f"there is no {missing}: create_{missing.removeprefix('lr_')} has to set trainer.{missing}")
        for group in self.optimizer.param_groups:
            # Those of other processes, where it was made of all parameters of the whole model.
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
        check_optimizer(self.optimizer, self._updated_parameters().values())

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make the optimizer and its scheduler, unless they are there."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps, self.optimizer)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make `self.optimizer`, unless it is there, for the parameters of this process's stages.

        Args:
            model: refused; the pipeline's stages are trained.
        """
        if model is not None and model is not self.model:
            raise UserError("create_optimizer: model is not supported; the optimizer is for the pipeline's stages")
        if self.optimizer is None:
            self.optimizer = make_optimizer(
                self.pipe,
                self.args,
                self.optimizer_cls_and_kwargs,
                self.master_weights,
                self.get_optimizer_cls_and_kwargs,
                self.get_decay_parameter_names,
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Make `self.lr_scheduler`, unless it is there, over so many updates."""
        if self.lr_scheduler is None:
            optimizer = self._made_optimizer() if optimizer is None else optimizer
            self.lr_scheduler = make_scheduler(self.args, optimizer, num_training_steps)
        return self.lr_scheduler

    #: Of the arguments and a model: the class of optimizer that they ask for, and its arguments.
    get_optimizer_cls_and_kwargs = staticmethod(Trainer.get_optimizer_cls_and_kwargs)

    def get_decay_parameter_names(self, model: PreTrainedModel) -> list[str]:
        """The parameters of a stage's model, or of the whole one, that weight decay is for."""
        names: list[str] = Trainer.get_decay_parameter_names(None, model)
        return names
