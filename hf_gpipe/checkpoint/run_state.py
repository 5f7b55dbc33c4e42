"""How far a training has come. A checkpoint stores it as `progress` in state.json, in the shape of these classes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat

from hf_gpipe.strict_json import Number


class DataPosition(BaseModel):
    """A place in the data: so many mini-batches of this epoch have been trained on."""

    model_config = ConfigDict(frozen=True)

    epoch: Number
    mini_batches: Number
    place: dict[str, Any] | None = None
    """Where an iterable dataset stands there (`MiniBatches.place`), in the main process; None: not known."""


class RunState(BaseModel):
    """Everything of a run's progress that a resumed run needs, besides weights, optimizer and transformers' state.

    The fields with a default are those that older checkpoints do not have.
    """

    position: DataPosition
    pipeline_step: Number
    """`Pipeline.step`, which dropout depends on."""
    data: dict[str, Any]
    """The settings that decide which rows a position stands for."""
    evaluation_is_due: bool = False
    """Whether the training was stopped before the evaluation of its last step."""
    num_micro_batches: Number | None = None
    loss_scale: dict[str, FiniteFloat] | None = None
    """The state of the `LossScaler`; None without one."""
    has_digests: bool = False
    """Whether a file of digests belongs to the checkpoint."""
