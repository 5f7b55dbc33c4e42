"""The parts of a trainer that the loop of a training uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from hf_gpipe.checkpoint.copies import PendingWrite
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.world import World
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.hub import HubUploads
from hf_gpipe.training.loader import Batch
from hf_gpipe.training.loss_scaling import LossScaler
from hf_gpipe.training.master_weights import MasterWeights


class TrainerOfLoop(Protocol):
    """Scripts and callbacks may set or override most of this."""

    args: PipelineTrainingArguments
    pipe: Pipeline
    uploads: HubUploads
    state: TrainerState
    control: TrainerControl
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    scaler: LossScaler | None
    master_weights: MasterWeights | None
    callback_handler: CallbackHandler
    num_trained_tokens: int

    def fire(self, event: str, **kwargs: Any) -> None: ...
    def new_state(self) -> TrainerState: ...
    def log(self, logs: dict[str, Any]) -> None: ...
    def evaluate(self, *, ignore_keys: list[str] | None = ...) -> dict[str, float]: ...
    @property
    def updates_per_step(self) -> int: ...
    def prepared(self, group: Sequence[Batch]) -> Sequence[Batch]: ...
    def model_to_save(self, directory: Path, world: World) -> PendingWrite | None: ...
