"""The estimate of what a process holds at the peak of a step, item by item, and a quick bound on it.

Weights, optimizer state, buffers and the mini-batch's ids are there all the time. Everything else comes and goes, and
is read off the simulated table: the boundary tensors, graphs and gradients that are alive, and the working memory of
the running action. The estimate is for the moment at which the sum is largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from hf_gpipe.modes.divided_head.table import HEAD_INPUT, HEAD_WORKING, HELD_LOGITS
from hf_gpipe.modes.visits.table import most_loaded
from hf_gpipe.planner.costs.stage_costs import StageLayers
from hf_gpipe.planner.layout import Layout
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule import Timeline, num_stashes
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import most_of_equal_stages, occupancy


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
    """Old versions of the weights, which an asynchronous schedule keeps."""
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


def estimate_memory(layout: Layout, timeline: Timeline, process: int, own: Sequence[int]) -> MemoryEstimate:
    """Estimate the memory of a process at the peak of a step.

    Args:
        layout: the configuration.
        timeline: the simulated table of the configuration.
        process: the process's number.
        own: the process's stages. With one stage of several, the estimate is what that stage alone needs.
    """
    sums, visitors, table = layout.sums, layout.settings.visits.offload_weights, timeline.schedule
    stages = [layout.stages[number] for number in own]
    converts = {"converts_once": not table.is_window}
    known = [sums.bytes_of(stage, **converts) for stage in stages]
    held, is_shared = sums.held_by(stage.run for stage in stages), table.placement.is_shared
    hosted = [sums.hosted(*stage.run, visitors, is_shared=is_shared) for stage in stages]
    # Nothing of dealt stages stays on the device, not even tied weights.
    trained_bytes = 0 if is_shared else held.trainable_bytes - sum(visiting.trainable_bytes for visiting in hosted)
    amounts = {
        number: {
            **sums.amounts(stage, **converts),
            Held.WEIGHT_GRADIENTS: {"gradients": trained_bytes / len(own)},
            Held.LEAVING_GRADIENTS: {"gradients": visiting.trainable_bytes},
        }
        for number, stage, visiting in zip(own, stages, hosted, strict=True)
    }
    weights = held.num_bytes + sum(of_stage.converted for of_stage in known)
    if visitors is not None:  # each stage that is there has a buffer
        num_buffers = min(most_loaded(table)[process], len(own))
        weights = trained_bytes + num_buffers * max(
            visiting.num_bytes + of_stage.converted for visiting, of_stage in zip(hosted, known, strict=True)
        )
    levels = (level for _, level in occupancy(timeline, amounts, process))
    # Some replicas have nothing to do where there are more replicas than micro-batches.
    fullest = max(levels, key=lambda level: sum(level.values()), default={})
    items = {name: round(size) for name, size in fullest.items()}
    ids = table.num_micro_batches * sums.costs.micro_batch_bytes
    state = sum(
        layout.state_bytes(number, of_stage.owned - visiting)
        for number, of_stage, visiting in zip(own, known, hosted, strict=True)
    )
    stashes = sum(
        num_stashes(table, number, process) * of_stage.held.trainable_bytes
        for number, of_stage in zip(own, known, strict=True)
    )
    return MemoryEstimate(
        **items | {"boundaries": items.get("boundaries", 0) + ids},
        parameters=round(weights) + sum(round(of_stage.fixed) for of_stage in known),
        optimizer=0 if is_shared else round(state),
        stashes=round(stashes),
        reserve=round(sum(_reserved_share(sums.device, item) * size for item, size in fullest.items())),
        libraries=layout.library_bytes[process],
    )


def _reserved_share(device: Device, item: str) -> float:
    """The share of an item that the allocator holds beside it."""
    return device.reserved_working_share if item in ("gradients", "working") else device.reserved_share


class HostMemory(NamedTuple):
    """Bytes in the CPU memory of a process's machine."""

    copies: int
    """The copies that checkpoints are written from in the background. The leader of a stage has the stage's weights, or
    its adapters alone, and the optimizer's state of whole parameters with float32 master weights, if there are any."""
    offloaded: int
    """The float32 copies, their gradients and the optimizer's state, where these are offloaded."""
    hosted: int
    """The most of weights that visit and of graphs that wait. Trained weights have their gradients and the optimizer's
    state there. A weight of dealt stages is there once, and counts for the worker that updates it."""


def host_memory(layout: Layout, timeline: Timeline) -> list[HostMemory]:
    """The CPU memory that each process needs. A CPU is its own host, and its graphs wait nowhere else."""
    sums, inputs, placement = layout.sums, layout.inputs, layout.table.placement
    visitors, dtype, is_shared = layout.settings.visits.offload_weights, sums.costs.dtype, placement.is_shared
    copies, offloaded, hosted = ([0] * placement.num_processes for _ in range(3))
    for stage, workers in zip(layout.stages, placement.workers, strict=True):
        owned = sums.owned(*stage.run)
        visiting = owned if is_shared else sums.hosted(*stage.run, visitors)
        if inputs.saves_in_background:
            weights = owned.trainable_bytes if inputs.saved == "adapters" else owned.num_bytes
            # The leader has gathered the parts that all ranks have of divided layers.
            own = round(weights + inputs.saved_bytes(owned, dtype))
            copies[workers[0]] += layout.processes.division.num_ranks * own
        shares = layout.settings.shared_updates.among(len(workers))
        for worker in workers:
            offloaded[worker] += round(inputs.hosted_bytes(owned, dtype) / shares)
            hosted[worker] += round(visiting.num_bytes + visiting.trainable_bytes + inputs.state_bytes(visiting, dtype))
    # Most tables keep nothing there, and need no look at their actions.
    away = {kind.makes for kind in layout.table.kinds} if sums.device.is_asynchronous else set()
    of_modes = functions_of_modes("cost", "host_amounts")
    for worker in range(placement.num_processes) if away else ():
        amounts = {
            number: {
                held: {"away": size}
                for of_mode in of_modes
                for held, size in of_mode(sums, layout.stages[number]).items()
                if held in away
            }
            for number in placement.stages_run_by(worker)
        }
        if any(amounts.values()):
            levels = occupancy(timeline, amounts, worker)
            hosted[worker] += round(max((level.get("away", 0.0) for _, level in levels), default=0.0))
    return [HostMemory(*own) for own in zip(copies, offloaded, hosted, strict=True)]


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
        self._ids = table.num_micro_batches * layout.sums.costs.micro_batch_bytes
        self._stashes = [num_stashes(table, stage) for stage in range(table.num_stages)]

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
        own = self._sums.bytes_of(stage, converts_once=not self._layout.table.is_window)
        sizes, trained, device, most = own.sizes, own.held.trainable_bytes, self._sums.device, self.most[number]
        always = own.held.num_bytes + own.fixed + own.converted
        always += self._ids + self._libraries[number] + self._stashes[number] * trained
        always += (1 + device.reserved_working_share) * trained + self._layout.state_bytes(number, own.owned)
        coming = live_graphs * sizes[Held.GRAPH] + sum(most[held] * sizes.get(held, 0) for held in _KEPT)
        forward = sizes[Held.FORWARD] - self._sums.graph_bytes(stage)
        working = max(sizes.get(HEAD_WORKING, 0), forward, sizes[Held.BACKWARD], sizes[Held.FORWARD_ONLY])
        return always + (1 + device.reserved_share) * coming, (1 + device.reserved_working_share) * working


#: The things that wait between actions, beside graphs.
_KEPT = (
    *(Held.INPUT, Held.GRADIENT, Held.DEFERRED, Held.ROW, Held.ROW_GRADIENTS),
    *(HEAD_INPUT, HELD_LOGITS),
)
