"""The estimate of what a process holds at the peak of a step, item by item, and a quick bound on it.

Weights, optimizer state, buffers and the mini-batch's ids are there all the time. Everything else comes and goes, and
is read off the simulated table: the boundary tensors, graphs and gradients that are alive, and the working memory of
the running action. The estimate is for the moment at which the sum is largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from hf_gpipe.planner.costs.stage_costs import StageLayers
from hf_gpipe.planner.layout import Layout
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule import Timeline
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import Amounts, most_of_equal_stages, occupancy


def _item(words: str, colour: str) -> Any:
    """Make an item of an estimate: its words in reports, and a colour that colour-blind readers can tell apart."""
    return field(default=0, metadata={"words": words, "colour": colour})


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of a step."""

    parameters: int = _item("weights", "#4c78a8")
    """Weights, where a tied weight counts once per process, their conversions by autocast for a step, and buffers."""
    gradients: int = _item("weights' gradients", "#72b7b2")
    """Gradients of the weights."""
    optimizer: int = _item("optimizer state", "#9ecae9")
    """The optimizer's state of the weights that the process owns."""
    stashes: int = _item("old versions of weights", "#2f4b7c")
    """Old versions of the weights, where they change between forward and backward."""
    boundaries: int = _item("boundary tensors and ids", "#f58518")
    """Received boundary tensors, and the micro-batches' ids, masks and labels."""
    activations: int = _item("stored activations", "#ffbf79")
    """Tensors that the stored graphs keep, without the tensors of the head."""
    logits: int = _item("logits", "#b0413e")
    """Tensors that the stored graphs keep of the head and the loss."""
    early_gradients: int = _item("gradients that wait", "#8e5ea2")
    """Gradients that have come before their backward could begin."""
    working: int = _item("what the running action works with", "#9d755d")
    """Working memory of the action that runs at that moment."""
    reserve: int = _item("what the allocator holds besides", "#d8b5a5")
    """Memory that the allocator holds beyond the items above."""
    libraries: int = _item("what cuBLAS and NCCL hold", "#54a24b")
    """Memory of a GPU that cuBLAS and NCCL hold, and the allocator in segments that are not full."""

    @property
    def total(self) -> int:
        """The bytes of all items."""
        return sum(getattr(self, item.name) for item in fields(self))

    @property
    def of_tensors(self) -> int:
        """The bytes of all items, without those that the allocator and libraries hold beside tensors."""
        return self.total - self.reserve - self.libraries


class Resident(NamedTuple):
    """Bytes that a process holds during the whole step. A mode that keeps weights elsewhere replaces them."""

    weights: float
    trained: float
    """The part of the weights that has gradients in its memory."""
    state: float
    amounts: Mapping[int, Amounts] = MappingProxyType({})
    """The bytes that each stage adds for a while beside `StageCosts.amounts`."""


def estimate_memory(layout: Layout, timeline: Timeline, process: int, own: Sequence[int]) -> MemoryEstimate:
    """Estimate the memory of a process at the peak of a step, for its own stages. With one stage of several, the
    estimate is what that stage alone needs."""
    sums, stages, converts = layout.sums, layout.stages, layout.converts_once
    known = {number: sums.bytes_of(stages[number], converts_once=converts) for number in own}
    held = sums.held_by(stages[number].run for number in own)
    resident = Resident(
        held.num_bytes + sum(of_stage.converted for of_stage in known.values()),
        held.trainable_bytes,
        sum(layout.state_bytes(number, of_stage.owned) for number, of_stage in known.items()),
    )
    for of_mode in functions_of_modes("cost", "resident"):
        resident = of_mode(layout, process, own, resident)
    gradients: Amounts = {Held.WEIGHT_GRADIENTS: {"gradients": resident.trained / len(own)}}
    amounts = {
        number: {
            **sums.amounts(stages[number], converts_once=converts),
            **gradients,
            **resident.amounts.get(number, {}),
        }
        for number in own
    }
    levels = (level for _, level in occupancy(timeline, amounts, process))
    # Some replicas have nothing to do where there are more replicas than micro-batches.
    fullest = max(levels, key=lambda level: sum(level.values()), default={})
    items = {name: round(size) for name, size in fullest.items()}
    reserved = dict.fromkeys(("gradients", "working"), sums.device.reserved_working_share)
    return MemoryEstimate(
        **items | {"boundaries": items.get("boundaries", 0) + layout.ids_bytes},
        parameters=round(resident.weights) + sum(round(of_stage.fixed) for of_stage in known.values()),
        optimizer=round(resident.state),
        stashes=sum(layout.old_versions(number, process) * size.held.trainable_bytes for number, size in known.items()),
        reserve=round(sum(reserved.get(item, sums.device.reserved_share) * size for item, size in fullest.items())),
        libraries=layout.library_bytes[process],
    )


@dataclass(frozen=True)
class HostMemory:
    """Bytes in the CPU memory of a process's machine."""

    copies: int
    """The copies that checkpoints are written from in the background. The leader of a stage has the stage's weights, or
    its adapters alone, and the optimizer's state of whole parameters with float32 master weights, if there are any."""
    offloaded: int
    """The float32 copies, their gradients and the optimizer's state, where these are offloaded."""
    on_disk: int
    """The optimizer's state and master weights on a disk, which take no CPU memory."""
    of_modes: Mapping[str, int]
    """The most of what modes have there, such as graphs that wait, by words for it."""

    @property
    def hosted(self) -> int:
        """The bytes of what modes have there."""
        return sum(self.of_modes.values())


def host_memory(layout: Layout, timeline: Timeline) -> list[HostMemory]:
    """The CPU memory that each process needs. A CPU is its own host, and its graphs wait nowhere else."""
    sums, inputs, placement = layout.sums, layout.inputs, layout.table.placement
    copies, offloaded, on_disk = every = [[0] * placement.num_processes for _ in range(3)]
    for number, (stage, workers) in enumerate(zip(layout.stages, placement.workers, strict=True)):
        owned = sums.owned(*stage.run)
        if inputs.saves_in_background:
            weights = owned.trainable_bytes if inputs.saved == "adapters" else owned.num_bytes
            # The leader has gathered the parts that all ranks have of divided layers.
            own = round(weights + inputs.saved_bytes(owned, sums.costs.dtype))
            copies[workers[0]] += layout.processes.division.num_ranks * own
        shares = layout.settings.shared_updates.among(len(workers))
        for worker in workers:
            offloaded[worker] += round(inputs.hosted_bytes(owned, sums.costs.dtype) / shares)
            on_disk[worker] += round(layout.disk_bytes(number) / shares)
    hosted: dict[str, Sequence[int]] = {}
    for of_mode in functions_of_modes("cost", "on_host"):
        hosted |= of_mode(layout, timeline)
    of_modes = ({words: sizes[worker] for words, sizes in hosted.items()} for worker in range(len(copies)))
    return [HostMemory(*own) for own in zip(*every, of_modes, strict=True)]


class MemoryBound:
    """A bound on what stages need under a table, quick enough to ask for every stage that a split could have.

    It counts the most graphs, boundaries and waiting gradients that the table ever has alive with equally fast stages,
    as if all were alive at one moment. `estimate_memory` says what a chosen plan really needs.

    Args:
        layout: the configuration, whose partition is not read.

    Attributes:
        most: the most micro-batches for which a stage holds each thing at once, for each stage.
    """

    def __init__(self, layout: Layout) -> None:
        table = layout.table
        self.most = most_of_equal_stages(table)
        self._layout, self._sums = layout, layout.sums
        first = [workers[0] for workers in table.placement.workers]
        # The stages of a process share the libraries' memory.
        self._libraries = [layout.library_bytes[worker] / len(table.placement.stages_of(worker)) for worker in first]
        self._stashes = [*map(layout.old_versions, range(table.num_stages))]

    def stage_bytes(self, number: int, stage: StageLayers) -> float:
        """The most bytes that stage `number` needs as the only stage of its process."""
        return sum(self.parts(number, stage, self.most[number][Held.GRAPH]))

    def dip_bytes(self) -> float:
        """The most by which any stage, the last with its end, may need less than a part of it.

        The boundaries at its ends may be smaller. And what its graph keeps is no working memory, beside which the
        allocator holds more, nor are the weights that autocast converts again for the blocks after a layer.
        """
        layers, device = self._sums.costs.layers[1:], self._sums.device
        sizes = {
            Held.INPUT: [layer.input_bytes for layer in layers],
            Held.GRADIENT: [layer.gradient_input_bytes for layer in layers],
        }
        spread = {held: max(own, default=0) - min(own, default=0) for held, own in sizes.items()}
        working, kept = 1 + device.reserved_working_share, 1 + device.reserved_share
        dips = [0.0]
        for number, (most, stage) in enumerate(zip(self.most, self._layout.stages, strict=True)):
            dip = kept * sum(most[held] * size for held, size in spread.items())
            if number < len(self.most) - 1:
                graphs = self._sums.graphs[stage.inner]
                dip += max(working - kept * most[Held.GRAPH] * (not graphs.converts_again), 0) * graphs.most_working
            dips.append(dip)
        return max(dips)

    def parts(self, number: int, stage: StageLayers, live_graphs: int) -> tuple[float, float]:
        """The most bytes that stage `number` keeps with `live_graphs` stored graphs, and its other working memory."""
        own = self._sums.bytes_of(stage, converts_once=self._layout.converts_once)
        trained, device, most = own.held.trainable_bytes, self._sums.device, self.most[number]
        always = own.held.num_bytes + own.fixed + own.converted
        always += self._layout.ids_bytes + self._libraries[number] + self._stashes[number] * trained
        always += (1 + device.reserved_working_share) * trained + self._layout.state_bytes(number, own.owned)
        coming = sum((live_graphs if held == Held.GRAPH else most[held]) * size for held, size in own.sizes.items())
        return always + (1 + device.reserved_share) * coming, (1 + device.reserved_working_share) * own.working
