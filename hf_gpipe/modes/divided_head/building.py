"""Building stages that have parts of the head beside their layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.division import replace_tensor
from hf_gpipe.adapters.guards import check_hooks
from hf_gpipe.adapters.parts.cuts import Cut
from hf_gpipe.adapters.parts.ranks import ProcessRanks
from hf_gpipe.model.assembly import assemble
from hf_gpipe.modes.divided_head.edges import connect_head
from hf_gpipe.modes.divided_head.head_part import HeadPart
from hf_gpipe.modes.divided_head.requirements import check_divides_head, check_stages
from hf_gpipe.modes.divided_head.rows import HeadDivision, HeadRows
from hf_gpipe.modes.divided_head.runtime import State
from hf_gpipe.modes.divided_head.table import LOGITS
from hf_gpipe.pipeline.mode_builder import Building, ModeBuilder
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.runtime.step import Rows
from hf_gpipe.settings.division import Division


class Builder(ModeBuilder):
    """Leaves the head out of the last stage, and gives each stage its part."""

    def __init__(self, building: Building) -> None:
        super().__init__(building)
        self._is_on = LOGITS in building.decision.full_table.kinds
        self._parts: dict[int, HeadPart] = {}
        if self._is_on:
            decision = building.decision
            check_divides_head(decision.adapter, decision.loss, decision.config)
            check_stages(decision.config.schedule, decision.partition, decision.world.placement)

    def layers(self, layers: range) -> range:
        last = len(self.building.decision.adapter.layers) - 1
        return range(layers.start, min(layers.stop, last)) if self._is_on else layers

    def add(self) -> None:
        if not self._is_on:
            return
        building, decision = self.building, self.building.decision
        adapter, world = decision.adapter, decision.world
        head = range(len(adapter.layers) - 1, len(adapter.layers))
        heads = {
            number: assemble(adapter, head, building.weights, device, building.seed)
            for number, device in world.stage_devices.items()
        }
        for number, rows in divide_head(heads, building.models, world).items():
            self._parts[number] = HeadPart(heads[number], rows, number, decision.config.num_stages, decision.loss)

    def state(self, rows: Rows) -> State | None:
        if not self._is_on:
            return None
        dtype_of = next(iter(self._parts.values())).dtype_of
        return State(rows, self._parts, connect_head(self.building.decision.world, dtype_of))


def head_ranks(world: Mesh) -> tuple[list[tuple[int, ...]], ProcessRanks | None]:
    """The stages of each process of the first replicas; and these processes, unless it is one. Every process must call
    it."""
    placement = world.placement
    leaders = list(dict.fromkeys(workers[0] for workers in placement.workers))
    stages_of = [tuple(placement.stages_of(worker)) for worker in leaders]
    if len(leaders) == 1:
        return stages_of, None
    group = world.new_group([world.peer(worker) for worker in leaders], world.device)
    place = stages_of.index(tuple(world.local_stages))
    return stages_of, ProcessRanks(Division(len(leaders)), place, group, world.device)


def divide_head(heads: Mapping[int, StageModel], models: Mapping[int, StageModel], world: Mesh) -> dict[int, HeadRows]:
    """Give each stage of this process its part of the head; returns its rows. Every process must call it.

    Args:
        heads: for each stage the head alone, whole.
        models: the stages without it.
        world: the processes.
    """
    stages_of, ranks = head_ranks(world)
    num_stages = world.placement.num_stages
    own = tuple(models)
    # Of several, the one that stages on one device will share.
    held = {name: p for number in reversed(own) for name, p in models[number].parameters.items()}
    size = len(heads[own[0]].projection.weight)
    names = heads[own[0]].parameters
    parts = () if ranks is None else tuple(name for name in names if name not in held)
    cut = Cut(
        0, tuple(((size * stages[0] // num_stages, size * (stages[-1] + 1) // num_stages),) for stages in stages_of)
    )
    division = HeadDivision(cut, parts, tuple(heads[own[0]].buffers), ranks)
    for name in names:
        tensor = held.get(name)
        if tensor is None:
            check_hooks(name, names[name], "a part of the divided head")
            tensor = nn.Parameter(division.part(name, names[name].detach()), names[name].requires_grad)
        for head in heads.values():
            head.replace_parameter(name, tensor)
    rows = {}
    for number, head in heads.items():
        rows[number] = HeadRows(own, number, num_stages, size, is_whole=not parts)
        head.projection.out_features = rows[number].rows.stop - rows[number].rows.start
        start = rows[number].first
        for buffer in head.buffers.values():
            replace_tensor(head.model, buffer, buffer[..., start : start + head.projection.out_features])
    for number, stage in models.items():
        stage.adopt(heads[number], division, is_first=number == own[0])
    return rows
