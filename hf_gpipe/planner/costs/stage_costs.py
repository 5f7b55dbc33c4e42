"""Seconds and bytes of one micro-batch on any stage, from sums and maxima over the layers before each one.

One micro-batch on a stage of the layers `start` to `stop` (exclusive) needs, above its received input,

    kept by its graph     the sum of what its layers' graphs keep, and once per stack what is made outside of the layers
    peak of a forward     max over layers l of (kept before l, l's input included) + forward_working_bytes of l
    peak of a backward    max over layers l of (kept up to l) + backward_working_bytes of l + gradients of tied weights
                          that wait for that of another layer
    seconds               the sum of its layers' seconds, and `stage_seconds` once
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.costs.model_costs import (
    NO_SUMS,
    InnerRecompute,
    LayerCost,
    ModelCosts,
    Parameters,
    Part,
    Seconds,
    SharedParameter,
    estimated_seconds,
    estimated_stage_seconds,
    hidden_seconds,
)
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.registry import functions_of_modes
from hf_gpipe.schedule.kinds import KINDS, Held
from hf_gpipe.schedule.occupancy import Amounts


class Share(NamedTuple):
    """The share of a stage in a model beside the trained one, for one micro-batch. That model runs in F alone, and its
    weights are always there."""

    held_bytes: float = 0
    """The bytes of weights and buffers."""
    input_bytes: int = 0
    """The bytes that cross the boundary before the stage."""
    sent_bytes: int = 0
    """The bytes that F gives to the next stage."""
    kept_bytes: int = 0
    """The bytes kept from F to B."""
    forward_bytes: float = 0
    """The peak of its forward, its input included."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    """The seconds that B takes longer."""

    def forward_peak(self, own_bytes: float) -> float:
        """The peak bytes of an F: its forward, then the trained model's forward, which takes `own_bytes`."""
        return max(self.forward_bytes, self.input_bytes + self.sent_bytes + own_bytes)


NOTHING = Share()


class StageLayers(NamedTuple):
    """A stage of a plan: the run of layers `start` to `stop` (exclusive)."""

    start: int
    stop: int
    inner: InnerRecompute
    """The tensors that its stored graphs keep."""
    share: Share = NOTHING
    """The share of a model beside the trained one."""

    @property
    def run(self) -> tuple[int, int]:
        """The number of the first layer, and of the layer after the last."""
        return self.start, self.stop


class StageBytes(NamedTuple):
    """The bytes that a stage has, and that it holds for each micro-batch, whatever the table."""

    held: Parameters
    """The weights that are in its memory."""
    owned: Parameters
    """The weights of which it has the optimizer's state."""
    fixed: float
    """The bytes of its buffers, and of a model beside it."""
    converted: float
    """The bytes of its weights as autocast converts them, once for a step."""
    sizes: Mapping[str, float]
    """The bytes of each thing that it holds between actions, all items together."""
    working: float
    """The most bytes that an action works with, beside the graph that it makes."""


class RangeSum:
    """The sum of consecutive values `start` to `stop` (exclusive)."""

    def __init__(self, values: Iterable[float]) -> None:
        self.before = [0, *accumulate(values)]

    def __call__(self, start: int, stop: int) -> float:
        return self.before[stop] - self.before[start]


def range_max(values: Iterable[float]) -> Callable[[int, int], float]:
    """The largest of consecutive values `start` to `stop` (exclusive), at least one."""
    known = list(values)
    return lambda start, stop: max(known[start:stop])


class StageCosts:
    """Seconds and bytes of one micro-batch on any run of layers, `start` to `stop` (exclusive).

    Args:
        costs: the costs of the model's layers.
        device: the device whose rates give the seconds that were not measured.
        link: the link between the ranks of a worker; None: the device's link.
        num_parts: K, where so many stages share the last layer; 0: it is the last stage's.

    Attributes:
        part: the part of the last layer that each stage has; None: they do not share it.
    """

    def __init__(self, costs: ModelCosts, device: Device, link: Level | None = None, num_parts: int = 0) -> None:
        self.part: Part | None = None
        for divided in functions_of_modes("cost", "divided") if num_parts else ():
            costs, self.part = divided(costs, device, num_parts)
        self.costs, self.device = costs, device
        layers, is_measured, link = costs.layers, costs.is_measured, link or device.link

        def seconds(layer: LayerCost) -> tuple[float, ...]:
            """Of a forward only, a forward, a backward, what hides in it, its products for weights, a block's F."""
            own = layer.seconds or estimated_seconds(layer, costs.compute_dtype, device)
            # Ranks wait for their sums, but for what runs beside products. Measured seconds include both.
            sums = (NO_SUMS, NO_SUMS) if is_measured else (layer.forward.sums, layer.backward.sums)
            forward, backward = (of_pass.seconds(link) for of_pass in sums)
            hidden = hidden_seconds(layer, own, link)
            # W takes its share of the operations, of a measured backward too.
            weights = own.backward * layer.weight_flops / layer.backward.flops if layer.backward.flops else 0.0
            return (
                own.forward_only + forward,
                own.forward + forward,
                own.backward + backward - (0.0 if is_measured else hidden),
                hidden,
                weights,
                own.forward + forward if layer.kind == "block" else 0.0,
            )

        columns = map(RangeSum, zip(*map(seconds, layers), strict=True))
        self._forward_only, self._forward, self._backward, *others = columns
        self.hidden_seconds, self.weight_seconds, self._blocks_again = others
        self._stage_seconds = costs.stage_seconds or estimated_stage_seconds(layers, device)
        self.forward_flops = RangeSum(layer.forward.flops for layer in layers)
        self.backward_flops = RangeSum(layer.backward.flops for layer in layers)
        self.buffer_bytes = RangeSum(layer.buffer_bytes for layer in layers)
        self.deferred_bytes = RangeSum(layer.deferred_bytes for layer in layers)
        self.row_bytes = RangeSum(layer.row_bytes for layer in layers)
        self.forward_only_peak_bytes = range_max(layer.forward_only_working_bytes for layer in layers)
        self._own = list(accumulate((layer.parameters for layer in layers), initial=Parameters()))
        self._experts = list(accumulate((layer.experts for layer in layers), initial=Parameters()))
        users: dict[str, tuple[SharedParameter, list[int]]] = {}
        for index, layer in enumerate(layers):
            for parameter in layer.shared:
                users.setdefault(parameter.name, (parameter, []))[1].append(index)
        #: Each shared parameter with the ascending numbers of the layers that use it.
        self._shared = list(users.values())
        # A head that makes the logits of some positions at a time adds to the gradient at once.
        adds_up = [layer.kind == "head" and not costs.whole_logits for layer in layers]
        tied = [(shared.size.trainable_bytes, [n for n in own if not adds_up[n]]) for shared, own in self._shared]
        self.graphs: dict[InnerRecompute, GraphSums] = {
            mode: GraphSums(layers, mode, tied, has_backward_thread=device.has_host) for mode in ("none", "block")
        }
        #: A search asks for the same stages often.
        self._seconds: dict[tuple[int, int, InnerRecompute], Seconds] = {}
        self._bytes: dict[tuple[StageLayers, bool], StageBytes] = {}

    def held(self, start: int, stop: int) -> Parameters:
        """The parameters that a stage has in memory."""
        return self.held_by([(start, stop)])

    def held_by(self, stages: Iterable[tuple[int, int]]) -> Parameters:
        """The size of the parameters that a process holds for stages (start, stop) on one device. A tie counts once."""
        stages = list(stages)
        held = sum((self._own[stop] - self._own[start] for start, stop in stages), start=Parameters())
        uses_tie = False
        for parameter, users in self._shared:
            if any(bisect_left(users, start) < bisect_left(users, stop) for start, stop in stages):
                held += parameter.size
                uses_tie = uses_tie or (self.part is not None and parameter.name == self.part.tie)
        if self.part is not None and not uses_tie:
            held = sum([self.part.held] * len(stages), start=held)
        return held

    def unshared(self, start: int, stop: int) -> Parameters:
        """The parameters of some layers that no other layer uses."""
        return self._own[stop] - self._own[start]

    def experts(self, start: int, stop: int) -> Parameters:
        """The parameters of experts in some layers."""
        return self._experts[stop] - self._experts[start]

    def copy_seconds(self, num_bytes: float, num_devices: int = 1, ways: int = 1) -> float:
        """The seconds in which `num_bytes` come from a host of `num_devices`. With 2 ways, as many bytes go to the host
        at the same time. A CPU reads and writes them in its memory."""
        device = self.device
        rate = device.host.copy_rate(num_devices, ways) if device.has_host else device.memory_rate / 2
        return num_bytes / rate

    def owned(self, start: int, stop: int) -> Parameters:
        """The part of `held` that the stage owns, and whose optimizer state it has."""
        own = self.unshared(start, stop)
        if self.part is not None and not self.part.tie:
            own += self.part.held
        return sum((p.size for p, _ in self._shared if start <= p.first_layer < stop), start=own)

    def seconds(self, start: int, stop: int, inner: InnerRecompute) -> Seconds:
        """Seconds of a stage's actions; the recomputation of its blocks is part of the backward."""
        run, beyond = (start, stop, inner), self._stage_seconds
        if run not in self._seconds:
            self._seconds[run] = Seconds(
                # A stage makes masks and positions with a graph and without one alike.
                forward_only=self._forward_only(start, stop) + beyond.forward,
                forward=self._forward(start, stop) + beyond.forward,
                backward=self._backward(start, stop) + beyond.backward + self.again(start, stop, inner),
            )
        return self._seconds[run]

    def again(self, start: int, stop: int, inner: InnerRecompute) -> float:
        """The seconds in which a stage's backward recomputes its blocks."""
        return self._blocks_again(start, stop) if inner == "block" else 0.0

    def graph_bytes(self, stage: StageLayers) -> float:
        """The bytes that a graph of a stage keeps, all of which travel where it waits on the host."""
        return self.graphs[stage.inner].kept_bytes(*stage.run)

    def bytes_of(self, stage: StageLayers, *, converts_once: bool = True) -> StageBytes:
        """The bytes of a stage.

        Args:
            stage: the layers.
            converts_once: whether autocast converts weights once for a step. Where weights change between
                micro-batches, each graph keeps its own conversion of them.
        """
        key = stage, converts_once
        if key not in self._bytes:
            graphs, run = self.graphs[stage.inner], stage.run
            converted = graphs.converted_bytes(*run) if converts_once else 0.0
            amounts = self.amounts(stage, converts_once=converts_once)
            fixed = self.buffer_bytes(*run) + stage.share.held_bytes
            sizes = {held: sum(items.values()) for held, items in amounts.items() if held != Held.FIRST_BACKWARD}
            sizes[Held.FORWARD] -= self.graph_bytes(stage)
            working = max(sizes.pop(held, 0) for held in _WORKING)
            self._bytes[key] = StageBytes(self.held(*run), self.owned(*run), fixed, converted, sizes, working)
        return self._bytes[key]

    def amounts(self, stage: StageLayers, *, converts_once: bool = True) -> Amounts:
        """The bytes that each thing held adds to the items of an estimate of memory. The argument is that of
        `bytes_of`."""
        layers, run, share, graphs = self.costs.layers, stage.run, stage.share, self.graphs[stage.inner]
        graph, backward = graphs.kept_bytes(*run), graphs.backward_peak_bytes(*run)
        is_last, head = stage.stop == len(layers), layers[stage.stop - 1]
        logits = head.graph(stage.inner).saved_bytes if head.kind == "head" else 0
        converted = 0.0 if converts_once else graphs.converted_bytes(*run)
        of_graph = {"activations": graph - logits + converted, "logits": logits}
        received = layers[stage.start].input_bytes if stage.start else 0
        after = layers[min(stage.stop, len(layers) - 1)].gradient_input_bytes
        row = {"activations": self.row_bytes(*run)}
        amounts: dict[str, Mapping[str, float]] = {
            Held.INPUT: {"boundaries": received + share.kept_bytes},
            Held.GRAPH: of_graph,
            # A gradient is working memory of its backward from the start of that backward on.
            Held.GRADIENT: {"early_gradients": after if self.part is not None or not is_last else 0},
            Held.DEFERRED: {"activations": self.deferred_bytes(*run)},
            Held.FORWARD_ONLY: {"working": share.forward_peak(self.forward_only_peak_bytes(*run))},
            Held.FORWARD: {"working": share.forward_peak(graphs.forward_peak_bytes(*run))},
            Held.BACKWARD: {"working": max(backward - graph, 0)},
            Held.FIRST_BACKWARD: {"gradients": graphs.first_backward_peak_bytes(*run) - backward},
            Held.ROW: row,
            Held.ROW_GRADIENTS: row,
        }
        for of_mode in functions_of_modes("cost", "amounts"):
            amounts |= of_mode(self, stage, of_graph)
        return amounts


class GraphSums:
    """Bytes of one micro-batch's graph on a stage and the peaks of its actions, above the stage's received input.

    Args:
        layers: the costs of the model's layers.
        inner: the tensors that stored graphs keep.
        tied: (bytes of the gradient, numbers of the layers that use it) of each weight that several layers use.
        has_backward_thread: whether backwards run in a thread of their own, as on GPUs. There autocast frees its
            converted weights whenever a block has been recomputed, and converts those of blocks again.

    Attributes:
        converted_bytes: the bytes of the weights of some layers that autocast converts once for a step.
        most_working: the most bytes of an action of a layer but the last, beside graphs and these conversions, with the
            gradients of tied weights that wait.
    """

    def __init__(
        self,
        layers: Sequence[LayerCost],
        inner: InnerRecompute,
        tied: Sequence[tuple[int, list[int]]],
        *,
        has_backward_thread: bool,
    ) -> None:
        graphs = [layer.graph(inner) for layer in layers]
        self._tied = tied
        self._input = [graph.saved_input_bytes for graph in graphs]
        self._kept = RangeSum(graph.saved_bytes + graph.saved_input_bytes for graph in graphs)
        self._trained = RangeSum(layer.parameters.trainable_bytes for layer in layers)
        self._outside = []
        for stack in dict.fromkeys(layer.stack for layer in layers):
            own = [index for index, layer in enumerate(layers) if layer.stack == stack]
            first, end = own[0], own[-1] + 1
            self._outside.append((first, end, range_max(graph.stage_saved_bytes for graph in graphs[first:end])))
        kept, trained = self._kept.before, self._trained.before
        forward = [kept[i] + self._input[i] + layer.forward_working_bytes for i, layer in enumerate(layers)]
        frees = inner == "block" and has_backward_thread
        again = [layer.converted_bytes if frees and layer.kind == "block" else 0 for layer in layers]
        self._converted_again = RangeSum(again)
        self.converted_bytes = RangeSum(layer.converted_bytes - own for layer, own in zip(layers, again, strict=True))
        backward = [kept[i + 1] + graph.backward_working_bytes + again[i] for i, graph in enumerate(graphs)]
        self._forward, self._backward = range_max(forward), range_max(backward)
        self._first_backward = range_max(peak - trained[i] for i, peak in enumerate(backward))
        self.converts_again = any(again)
        sizes = [max(layer.forward_working_bytes, layer.graph(inner).backward_working_bytes) for layer in layers[:-1]]
        self.most_working = max(sizes, default=0) + sum(size for size, users in tied if len(users) > 1)

    def kept_bytes(self, start: int, stop: int) -> float:
        """The bytes that the graph keeps."""
        return self._kept(start, stop) + self._beyond_layers(start, stop)

    def forward_peak_bytes(self, start: int, stop: int) -> float:
        """The most bytes while a forward makes the graph."""
        most = self._forward(start, stop) + self._converted_again(start, stop)
        return most - self._kept.before[start] + self._beyond_layers(start, stop)

    def backward_peak_bytes(self, start: int, stop: int) -> float:
        """The most bytes while a backward takes the graph down, the graph included."""
        peak = self._with_waiting(self._backward, start, stop)
        return peak - self._kept.before[start] + self._beyond_layers(start, stop)

    def first_backward_peak_bytes(self, start: int, stop: int) -> float:
        """The most bytes of the first backward, which also makes the gradients of the weights."""
        peak = self._with_waiting(self._first_backward, start, stop) + self._trained.before[stop]
        return peak - self._kept.before[start] + self._beyond_layers(start, stop)

    def _with_waiting(self, peaks: Callable[[int, int], float], start: int, stop: int) -> float:
        """The most of some layers' peaks, with the gradients that wait meanwhile: the gradient of a parameter that
        several layers use waits from the backward of the last layer, which runs first, to the backward of the first.
        Weights of blocks that forwards have converted stay until the last block has been recomputed."""
        most = max(peaks(start, stop), peaks(stop - 1, stop) + self._converted_again(start, stop - 1))
        waiting = list[tuple[int, int, int]]()
        for num_bytes, users in self._tied:
            own = users[bisect_left(users, start) : bisect_left(users, stop)]
            if len(own) > 1:
                waiting.append((own[0], own[-1], num_bytes))
        bounds = sorted({bound for first, last, _ in waiting for bound in (first, last)})
        for first, last in pairwise(bounds):
            there = sum(size for since, until, size in waiting if since <= first and last <= until)
            most = max(most, peaks(first, last) + there)
        return most

    def _beyond_layers(self, start: int, stop: int) -> float:
        """The bytes made outside of the layers, once per stack, less the first layer's input, which the stage has."""
        made = sum(
            most(max(start, first) - first, min(stop, end) - first)
            for first, end, most in self._outside
            if start < end and first < stop
        )
        return made - self._input[start]


#: What actions work with, and nothing is held between them.
_WORKING = {held for kind in KINDS.values() for held in (kind.working, kind.working_alone) if held is not None} - {
    kind.makes for kind in KINDS.values()
}
