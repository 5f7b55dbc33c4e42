"""What a mode does while the stages of a process are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hf_gpipe.adapters import StageModel
from hf_gpipe.model.assembly import Weights
from hf_gpipe.model.stage_parameters import StageParameters
from hf_gpipe.pipeline.decision import Decision
from hf_gpipe.runtime.homes import Homes
from hf_gpipe.runtime.step import ModeState, Rows


@dataclass
class Building:
    """A pipeline that is being built.

    Attributes:
        weights: where they come from.
        seed: of weights that are initialised.
        homes: of dealt stages; None: stages are not dealt.
        run_by: the stages that each worker of this process runs.
        models: the stages that this process owns.
        parameters: of these stages, once they are assembled.
    """

    decision: Decision
    weights: Weights
    seed: int
    homes: Homes | None = None
    run_by: dict[int, dict[int, StageModel]] = field(default_factory=dict)
    models: dict[int, StageModel] = field(default_factory=dict)
    parameters: StageParameters | None = None


class ModeBuilder:
    """A mode's part in building a pipeline (`hf_gpipe.modes`). A mode overrides what it needs.

    Every process calls the methods, in the order in which they stand here.
    """

    def __init__(self, building: Building) -> None:
        self.building = building

    def layers(self, layers: range) -> range:
        """The layers of a stage that are assembled."""
        return layers

    def assembled(self, models: Mapping[int, StageModel]) -> None:
        """Called for each stage, before the next is assembled, with its models by worker."""

    def add(self) -> None:
        """Add to the models of all stages, before it is known what is trained."""

    def state(self, rows: Rows) -> ModeState | None:
        """The mode's state in the executor; None: that of a mode that is not on."""
        return None
