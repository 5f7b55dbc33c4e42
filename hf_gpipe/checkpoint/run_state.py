"""How far a training has come, as its checkpoints store it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired

from pydantic import FiniteFloat
from typing_extensions import TypedDict

from hf_gpipe.strict_json import Number


@dataclass(frozen=True)
class DataPosition:
    """A place in the data: so many mini-batches of this epoch have been trained on.

    `place` is where an iterable dataset stands there (`MiniBatches.place`), in the main process; None: not known.
    """

    epoch: int = 0
    mini_batches: int = 0
    place: Mapping[str, Any] | None = None


class _Position(TypedDict):
    epoch: Number
    mini_batches: Number
    place: NotRequired[dict[str, Any] | None]


class Progress(TypedDict):
    """The shape of what a checkpoint stores of a `RunState`; older ones have less."""

    position: _Position
    pipeline_step: Number
    data: dict[str, Any]
    evaluation_is_due: NotRequired[bool]
    num_micro_batches: NotRequired[Number | None]
    loss_scale: NotRequired[dict[str, FiniteFloat] | None]
    has_digests: NotRequired[bool]


@dataclass
class RunState:
    """Everything of a run's progress that a resumed run needs, besides weights, optimizer and transformers' state.

    A checkpoint stores it as `progress` in state.json.

    Attributes:
        position: where in the data the training stands.
        pipeline_step: `Pipeline.step`, which dropout depends on.
        data: the settings that decide which rows a position stands for.
        evaluation_is_due: whether the training was stopped before the evaluation of its last step.
        num_micro_batches: of the pipeline; None: the checkpoint is too old to say.
        loss_scale: the state of the `LossScaler`; None without one.
    """

    position: DataPosition
    pipeline_step: int
    data: Mapping[str, Any]
    evaluation_is_due: bool = False
    num_micro_batches: int | None = None
    loss_scale: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, progress: Progress) -> RunState:
        """Read what a checkpoint stores."""
        position = progress["position"]
        return cls(
            DataPosition(position["epoch"], position["mini_batches"], position.get("place")),
            progress["pipeline_step"],
            progress["data"],
            progress.get("evaluation_is_due", False),
            progress.get("num_micro_batches"),
            progress.get("loss_scale"),
        )
