"""The part of a mode in building the stages of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.modules.batch_norm import batch_norms_of
from hf_gpipe.adapters.parts.ranks import ProcessRanks
from hf_gpipe.errors import UserError
from hf_gpipe.model.assembly import Weights
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.decision import Decision
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.step import ModeState, Rows
from hf_gpipe.runtime.ties import SharedParameters


@dataclass
class Building:
    """A pipeline that is being built.

    Attributes:
        weights: where they come from, until all stages are assembled.
        seed: of weights that are initialised.
        ranks: among which layers are divided; None: they are whole.
        shared: the parameters of these stages, where a mode lets processes share their memory.
        run_by: the stages that each worker of this process runs.
        models: the stages that this process owns.
        parameters: of these stages, once they are assembled.
    """

    decision: Decision
    weights: Weights
    seed: int
    ranks: ProcessRanks | None = None
    shared: SharedParameters | None = None
    run_by: dict[int, dict[int, StageModel]] = field(default_factory=dict)
    models: dict[int, StageModel] = field(default_factory=dict)
    parameters: StageParameters = field(init=False)


class ModeBuilder:
    """A mode's part in building a pipeline (`hf_gpipe.modes`). A mode overrides what it needs.

    Every process calls the methods, in the order in which they stand here.

    Attributes:
        maps_files: whether weights that are read are the mapped files on the CPU, which take no memory until they are
            used.
    """

    maps_files = False

    def __init__(self, building: Building) -> None:
        """Raises UserError, on every process, where the decision does not go with the mode."""
        self.building = building

    def layers(self, layers: range) -> range:
        """The layers of a stage that are assembled."""
        return layers

    def assembled(self, number: int, models: Mapping[int, StageModel]) -> None:
        """Called for each stage, before the next is assembled, with its models by worker."""

    def add(self) -> None:
        """Add to the models of all stages, before it is known what is trained."""

    def check(self) -> None:
        """Raise UserError, on every process, where the parameters do not go with the mode."""

    def stage_type(self, number: int) -> Callable[..., Stage] | None:
        """A function with the arguments of `Stage` that makes a stage; None: the mode makes none."""
        return None

    def dtype_of(self, stage: int, name: str) -> torch.dtype | None:
        """The dtype of a tensor of this name that a stage receives; None: it is not the mode's."""
        return None

    def state(self, rows: Rows) -> ModeState | None:
        """The mode's state in the executor; None: that of a mode that is not on."""
        return None


def check_no_batch_norm(decision: Decision) -> None:
    """Raise UserError where moving averages would have to change between the mini-batches of a window."""
    for name, layer in batch_norms_of(decision.adapter.reference).items():
        raise UserError(
            f"schedule {decision.config.schedule!r}: {name!r} is a {type(layer).__name__}, whose moving averages "
            "change once all micro-batches of a mini-batch are there, and mini-batches overlap; use a synchronous "
            "schedule, such as 1f1b, or a GroupNorm"
        )
