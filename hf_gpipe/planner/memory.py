"""The estimate of what a process holds at the peak of a step, item by item, and a quick bound on it.

Weights, optimizer state, buffers and the mini-batch's ids are there all the time. Everything else comes and goes, and
is read off the simulated table: the boundary tensors, graphs and gradients that are alive, and the working memory of
the running action. The estimate is for the moment at which the sum is largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from operator import mul
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hf_gpipe.planner.costs.prefix_sums import LayerSums
from hf_gpipe.planner.layout import Layout, StageLayers
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.registry import parts_of_modes
from hf_gpipe.schedule import Timeline, num_stashes
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import Amounts, most_of_equal_stages, occupancy
from hf_gpipe.schedule.visits import most_loaded


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
    sums, stages, visitors = layout.sums, layout.stages, layout.settings.visits.offload_weights
    ranges = [stages[stage].run for stage in own]
    held = sums.held_by(ranges)
    is_dealt = timeline.schedule.placement.is_dealt
    hosted = [sums.hosted(*layers, visitors, is_dealt=is_dealt) for layers in ranges]
    # Nothing of dealt stages stays on the device, not even tied weights.
    trained_bytes = 0 if is_dealt else held.trainable_bytes - sum(visiting.trainable_bytes for visiting in hosted)
    # Where weights change between micro-batches, each graph keeps its own conversion of them.
    is_asynchronous = timeline.schedule.is_asynchronous
    amounts = {
        stage: stage_amounts(
            sums, stages[stage], trained_bytes / len(own), visiting.trainable_bytes, converts_once=not is_asynchronous
        )
        for stage, visiting in zip(own, hosted, strict=True)
    }
    converted = [0.0 if is_asynchronous else _converted_bytes(sums, stages[stage]) for stage in own]
    weights = held.num_bytes + sum(converted)
    if visitors is not None:  # each stage that is there has a buffer
        num_buffers = min(most_loaded(timeline.schedule)[process], len(own))
        weights = trained_bytes + num_buffers * max(
            visiting.num_bytes + conversion for visiting, conversion in zip(hosted, converted, strict=True)
        )
    levels = (level for _, level in occupancy(timeline, amounts, process))
    # Some replicas have nothing to do where there are more replicas than micro-batches.
    fullest = max(levels, key=lambda level: sum(level.values()), default={})
    ids = timeline.schedule.num_micro_batches * sums.costs.micro_batch_bytes
    items = {name: round(size) for name, size in fullest.items()}
    return MemoryEstimate(
        **items | {"boundaries": items.get("boundaries", 0) + ids},
        parameters=round(weights)
        + sum(int(sums.buffer_bytes(*layers)) for layers in ranges)
        + sum(round(stages[stage].beside.held_bytes) for stage in own),
        optimizer=0
        if is_dealt
        else round(
            sum(
                layout.state_bytes(stage, sums.owned(*layers) - visiting)
                for stage, layers, visiting in zip(own, ranges, hosted, strict=True)
            )
        ),
        stashes=round(
            sum(
                num_stashes(timeline.schedule, stage, process) * sums.held(*layers).trainable_bytes
                for stage, layers in zip(own, ranges, strict=True)
            )
        ),
        reserve=round(sum(_reserved_share(sums.device, item) * size for item, size in fullest.items())),
        libraries=layout.library_bytes[process],
    )


def _reserved_share(device: Device, item: str) -> float:
    """The share of an item that the allocator holds beside it."""
    return device.reserved_working_share if item in ("gradients", "working") else device.reserved_share


def hosted_bytes(layout: Layout, timeline: Timeline) -> list[int]:
    """The most bytes of weights that visit and of graphs that wait in the memory of each worker's host.

    Trained weights have their gradients and the optimizer's state there. A weight of dealt stages is there once, and
    counts for the worker that updates it. A CPU is its own host, and its graphs wait nowhere else.

    Args:
        layout: the configuration.
        timeline: the simulated table of the configuration.
    """
    sums, visitors, placement = layout.sums, layout.settings.visits.offload_weights, layout.table.placement
    state = partial(layout.inputs.state_bytes, dtype=sums.costs.dtype)
    sizes = [0] * placement.num_processes
    for stage, workers in zip(layout.stages, placement.workers, strict=True) if visitors is not None else ():
        hosted = sums.owned(*stage.run) if placement.is_dealt else sums.hosted(*stage.run, visitors)
        for worker in workers:
            sizes[worker] += round(hosted.num_bytes + hosted.trainable_bytes + state(hosted))
    for worker in range(placement.num_processes) if sums.device.is_asynchronous else ():
        own = placement.stages_run_by(worker)
        amounts = {stage: _host_amounts(sums, layout.stages[stage]) for stage in own}
        levels = occupancy(timeline, amounts, worker)
        sizes[worker] += round(max((level.get("away", 0.0) for _, level in levels), default=0.0))
    return sizes


def _converted_bytes(sums: LayerSums, stage: StageLayers) -> float:
    """The bytes of a stage's weights as autocast converts them, once for a step."""
    return sums.graphs[stage.inner].converted_bytes(*stage.run)


def graph_bytes(sums: LayerSums, stage: StageLayers) -> float:
    """The bytes that a graph of a stage keeps, all of which travel where it waits on the host."""
    return sums.graphs[stage.inner].kept_bytes(*stage.run)


def stage_amounts(
    sums: LayerSums,
    stage: StageLayers,
    gradient_bytes: float,
    visiting_bytes: int,
    *,
    converts_once: bool = True,
) -> Amounts:
    """The bytes that each thing held by a stage adds to the items of the estimate."""
    layers, run, beside = sums.costs.layers, stage.run, stage.beside
    graphs = sums.graphs[stage.inner]
    graph, backward = graphs.kept_bytes(*run), graphs.backward_peak_bytes(*run)
    head = layers[stage.stop - 1]
    logits = head.graph(stage.inner).saved_bytes if head.kind == "head" else 0
    converted = 0.0 if converts_once else graphs.converted_bytes(*run)
    of_graph = {"activations": graph - logits + converted, "logits": logits}
    return {
        Held.INPUT: {"boundaries": _received_bytes(sums, stage) + beside.kept_bytes},
        Held.GRAPH: of_graph,
        # A gradient is working memory of its backward from the start of that backward on.
        Held.GRADIENT: {"early_gradients": _gradient_bytes(sums, stage)},
        Held.DEFERRED: {"activations": sums.deferred_bytes(*run)},
        Held.FORWARD_ONLY: {"working": beside.forward_peak(sums.forward_only_peak_bytes(*run))},
        Held.FORWARD: {"working": beside.forward_peak(graphs.forward_peak_bytes(*run))},
        Held.BACKWARD: {"working": max(backward - graph, 0)},
        Held.WEIGHT: {},
        Held.FIRST_BACKWARD: {"gradients": graphs.first_backward_peak_bytes(*run) - backward},
        Held.WEIGHT_GRADIENTS: {"gradients": gradient_bytes},
        Held.VISITING_GRADIENTS: {"gradients": visiting_bytes},
        Held.ROW: {"activations": sums.row_bytes(*run)},
        Held.ROW_GRADIENTS: {"activations": sums.row_bytes(*run)},
        **_head_amounts(sums, stage),
        **_amounts_of_modes(sums, stage, of_graph),
    }


def _amounts_of_modes(sums: LayerSums, stage: StageLayers, of_graph: Mapping[str, float]) -> Amounts:
    """The bytes that each thing held by modes adds to the items of the estimate."""
    every = (cost.amounts(sums, stage, of_graph) for cost in parts_of_modes("cost").values())
    return {held: items for of_mode in every for held, items in of_mode.items()}


def _host_amounts(sums: LayerSums, stage: StageLayers) -> dict[str, dict[str, float]]:
    """The bytes in CPU memory of each thing that a stage holds there, as one item."""
    every = (cost.host_amounts(sums, stage) for cost in parts_of_modes("cost").values())
    return {held: {"away": size} for of_mode in every for held, size in of_mode.items()}


def _head_amounts(sums: LayerSums, stage: StageLayers) -> Amounts:
    """The bytes that each thing held of a divided head adds to the items of the estimate."""
    if (part := sums.part) is None:
        return {}
    is_last = stage.stop == len(sums.costs.layers)
    return {
        # The last stage has the hidden states from its own F.
        Held.HEAD_INPUT: {"boundaries": 0 if is_last else part.hidden_bytes},
        Held.LOGITS: {"logits": part.logits_bytes + part.hidden_bytes},
        Held.HEAD: {"working": part.working_bytes},
    }


def _received_bytes(sums: LayerSums, stage: StageLayers) -> int:
    """The bytes that cross the boundary before a stage."""
    return sums.costs.layers[stage.start].input_bytes if stage.start else 0


def _gradient_bytes(sums: LayerSums, stage: StageLayers) -> int:
    """The bytes that come back across the boundary after a stage."""
    layers = sums.costs.layers
    if sums.part is not None and stage.stop == len(layers):
        return layers[-1].gradient_input_bytes
    return layers[stage.stop].gradient_input_bytes if stage.stop < len(layers) else 0


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
        table, sums = layout.table, layout.sums
        self.most = most_of_equal_stages(table)
        self._sums, self._known = sums, _known.setdefault(sums, {})
        self._inner = [stage.inner for stage in layout.stages]
        self._state_bytes = layout.state_bytes
        first = [workers[0] for workers in table.placement.workers]
        # The stages of a process share the libraries' memory.
        self._libraries = [layout.library_bytes[worker] / len(table.placement.stages_of(worker)) for worker in first]
        self._ids = table.num_micro_batches * sums.costs.micro_batch_bytes
        self._stashes = [num_stashes(table, stage) for stage in range(table.num_stages)]
        self._is_asynchronous = table.is_asynchronous
        self._counts = [[most[held] for held in _KEPT] for most in self.most]

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
        for number, (most, inner) in enumerate(zip(self.most, self._inner, strict=True)):
            dip = kept * sum(most[held] * size for held, size in spread.items())
            if number < len(self.most) - 1:
                graphs = self._sums.graphs[inner]
                dip += max(working - kept * most[Held.GRAPH] * (not graphs.converts_again), 0) * graphs.most_working
            dips.append(dip)
        return max(dips)

    def parts(self, number: int, stage: StageLayers, live_graphs: int) -> tuple[float, float]:
        """The most bytes that stage `number` keeps with `live_graphs` stored graphs, and its other working memory."""
        key = stage, not self._is_asynchronous
        own = self._known.get(key) or self._known.setdefault(key, _bytes_of(self._sums, *key))
        device = self._sums.device
        always = own.always + self._ids + self._libraries[number] + self._stashes[number] * own.trained
        always += (1 + device.reserved_working_share) * own.trained + self._state_bytes(number, own.owned)
        coming = live_graphs * own.graph + sum(map(mul, self._counts[number], own.kept))
        return always + (1 + device.reserved_share) * coming, (1 + device.reserved_working_share) * own.working


#: The things that wait between actions, beside graphs.
_KEPT = (
    *(Held.INPUT, Held.GRADIENT, Held.DEFERRED, Held.ROW, Held.ROW_GRADIENTS),
    *(Held.HEAD_INPUT, Held.LOGITS),
)


class _StageBytes(NamedTuple):
    """The bytes that a stage has, keeps and needs, whatever the table.

    Attributes:
        always: the bytes of weights, of their conversions by autocast for a step, and of buffers.
        trained: the bytes of its trained weights.
        owned: the weights that it owns.
        graph: the bytes of a stored graph.
        kept: the bytes of each of `_KEPT`.
        working: the most bytes of working memory beside a graph.
    """

    always: float
    trained: int
    owned: Parameters
    graph: float
    kept: tuple[float, ...]
    working: float


#: The bytes of stages, by the layers that are still planned: each table of a search asks for the same stages.
_known: WeakKeyDictionary[LayerSums, dict[tuple[StageLayers, bool], _StageBytes]] = WeakKeyDictionary()


def _bytes_of(sums: LayerSums, stage: StageLayers, converts_once: bool) -> _StageBytes:
    run = stage.run
    amounts = stage_amounts(sums, stage, 0, 0, converts_once=converts_once)
    sizes = {held: sum(of_held.values()) for held, of_held in amounts.items()}
    if sums.part is not None:  # of the last stage too, which S of other stages sends to
        sizes[Held.HEAD_INPUT] = sums.part.hidden_bytes
    held = sums.held(*run)
    converted = _converted_bytes(sums, stage) if converts_once else 0
    forward = sizes[Held.FORWARD] - graph_bytes(sums, stage)
    return _StageBytes(
        held.num_bytes + sums.buffer_bytes(*run) + stage.beside.held_bytes + converted,
        held.trainable_bytes,
        sums.owned(*run),
        sizes[Held.GRAPH],
        tuple(sizes.get(kept, 0) for kept in _KEPT),
        max(sizes.get(Held.HEAD, 0), forward, sizes[Held.BACKWARD], sizes[Held.FORWARD_ONLY]),
    )
