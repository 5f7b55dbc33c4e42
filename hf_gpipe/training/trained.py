"""A trainer, as the loop of its training sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerControl, TrainerState

from hf_gpipe.checkpoint.copies import Unwritten
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.world import World
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loss_scaling import LossScaler


class TrainerOfLoop(Protocol):
    """The parts of a trainer that the loop uses; scripts and callbacks may set or override most of this."""

    args: PipelineTrainingArguments
    pipe: Pipeline
    uploads: HubUploads
    state: TrainerState
    control: TrainerControl
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    scaler: LossScaler | None
    num_trained_tokens: int

    def fire(self, event: str, **kwargs: Any) -> None: ...
    def new_state(self) -> TrainerState: ...
    def log(self, logs: dict[str, Any]) -> None: ...
    def evaluate(self, *, ignore_keys: list[str] | None = ...) -> dict[str, float]: ...
    def model_to_save(self, directory: Path, world: World) -> Unwritten | None: ...
