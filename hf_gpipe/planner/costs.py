"""What each layer of a model costs: parameters, arithmetic, memory and, once measured, time.

`model_costs(config, workload, dtype, ...)` of measure.py computes them without weights, with the arguments of
`adapter_for`; `costs_of(adapter, workload)` there does so for a model that has its adapter; `profile_layers(adapter,
workload, device)` of measure_seconds.py adds the seconds.

Every number is of ONE micro-batch (see workload.py) and of a layer, so that a stage's is their sum:

    parameters in memory          `ModelCosts.held(start, stop)`
    kept by a micro-batch's graph `ModelCosts.saved_bytes(start, stop, recompute)`, without the stage's input
    peak of a forward             max over layers l of (kept by the layers before l) + forward_working_bytes of l
    peak of a backward            max over layers l of (kept by the layers up to l) + backward_working_bytes of l
    seconds                       sum of the layers', and `stage_*_seconds` once
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import fmean
from typing import Any, Literal, TypeVar

from hf_gpipe.adapters.layers import LayerKind, StackName
from hf_gpipe.planner.workload import Workload

Part = TypeVar("Part", "LayerCost", "ModelCosts")

InnerRecompute = Literal["none", "block"]
"""What a graph that is alive keeps: everything, or only the inputs of blocks. ("stage" says when a graph is alive.)"""


@dataclass(frozen=True)
class Parameters:
    """Weights of some layers. `num_bytes` are of the weights themselves; gradients are as large where trainable."""

    count: int = 0
    num_bytes: int = 0
    trainable_count: int = 0
    trainable_bytes: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.count + other.count,
            self.num_bytes + other.num_bytes,
            self.trainable_count + other.trainable_count,
            self.trainable_bytes + other.trainable_bytes,
        )

    def __sub__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.count - other.count,
            self.num_bytes - other.num_bytes,
            self.trainable_count - other.trainable_count,
            self.trainable_bytes - other.trainable_bytes,
        )


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several layers use: a tied embedding, or a position table that all blocks read.

    A process holds it once if any of its layers uses it. The stage of the first layer that uses it owns it: there
    alone it has optimizer state; the others hold a copy and its gradient.

    Attributes:
        name: its Hugging Face name, of a tie its source's.
        size: what it adds to a process that holds it.
        first_layer: number of the first layer that uses it.
    """

    name: str
    size: Parameters
    first_layer: int


@dataclass(frozen=True)
class LayerCost:
    """One layer's costs for one micro-batch.

    Attributes:
        name, kind, stack: of the layer (adapters/layers.py).
        parameters: those that no other layer uses.
        shared: those that other layers use too.
        buffer_bytes: tensors that are no parameters, such as position tables.
        forward_flops: multiplications and additions of the forward's matrix products (2 for each pair), head's loss
            included.
        backward_flops: the same of the backward, for inputs and weights, without any recomputation.
        input_bytes: what crosses the boundary before this layer; 0 for the first one.
        gradient_input_bytes: what comes back across it.
        saved_bytes: what the layer's graph keeps until its backward, without its input.
        saved_input_bytes: the part of its input that the graph keeps. On a stage's first layer it is the boundary's.
        stage_saved_bytes: what the graph keeps that is made outside of the layers, such as masks and rotary tables:
            once for all layers of a stack on a stage.
        block_saved_bytes, block_saved_input_bytes, block_stage_saved_bytes: the same when each block is recomputed.
        forward_working_bytes: the peak of the forward above what was there before it, with a graph.
        forward_only_working_bytes: the same without a graph, as in the first forward of a recomputed stage; the layer's
            input included, which no graph keeps.
        backward_working_bytes: the peak of the backward above what the graph keeps, the gradient that comes in
            included, where the weights have their gradients already.
        block_backward_working_bytes: the same when each block is recomputed: its inside is alive once.
        forward_seconds, backward_seconds: measured; None where nothing was.
        forward_only_seconds: of a forward without a graph.
    """

    name: str
    kind: LayerKind
    stack: StackName
    parameters: Parameters
    shared: tuple[SharedParameter, ...]
    buffer_bytes: int
    forward_flops: int
    backward_flops: int
    input_bytes: int
    gradient_input_bytes: int
    saved_bytes: int
    saved_input_bytes: int
    stage_saved_bytes: int
    block_saved_bytes: int
    block_saved_input_bytes: int
    block_stage_saved_bytes: int
    forward_working_bytes: int
    forward_only_working_bytes: int
    backward_working_bytes: int
    block_backward_working_bytes: int
    forward_seconds: float | None = None
    forward_only_seconds: float | None = None
    backward_seconds: float | None = None

    def kept(self, recompute: InnerRecompute = "none") -> int:
        """`saved_bytes` of a graph that is alive."""
        return self.saved_bytes if recompute == "none" else self.block_saved_bytes

    def kept_input(self, recompute: InnerRecompute = "none") -> int:
        """`saved_input_bytes` of a graph that is alive."""
        return self.saved_input_bytes if recompute == "none" else self.block_saved_input_bytes

    def kept_for_stage(self, recompute: InnerRecompute = "none") -> int:
        """`stage_saved_bytes` of a graph that is alive."""
        return self.stage_saved_bytes if recompute == "none" else self.block_stage_saved_bytes


@dataclass(frozen=True)
class ModelCosts:
    """All layers of a model, in order, for one shape of micro-batch.

    Attributes:
        layers: one for each entry of `Adapter.layers`.
        workload: the micro-batch.
        micro_batch_bytes: of its ids, masks and labels, which every stage holds from the step's begin to its end.
        dtype: of the weights, such as "float32".
        compute_dtype: of the matrix products: autocast's, or the weights'.
        stage_forward_seconds, stage_backward_seconds: what a stage spends on a micro-batch beyond its layers; None
            where nothing was measured.
        update_seconds_per_parameter: measured time of the optimizer, clipping included; None where nothing was.
    """

    layers: tuple[LayerCost, ...]
    workload: Workload
    micro_batch_bytes: int
    dtype: str
    compute_dtype: str
    stage_forward_seconds: float | None = None
    stage_backward_seconds: float | None = None
    update_seconds_per_parameter: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether every layer has its seconds."""
        return all(layer.forward_seconds is not None for layer in self.layers)

    @cached_property
    def total(self) -> Parameters:
        """The whole model's parameters, each tie once."""
        return self.held(0, len(self.layers))

    @cached_property
    def shared(self) -> tuple[tuple[SharedParameter, tuple[int, ...]], ...]:
        """Each shared parameter with the numbers of the layers that use it, in order."""
        users: dict[str, list[int]] = {}
        by_name: dict[str, SharedParameter] = {}
        for index, layer in enumerate(self.layers):
            for parameter in layer.shared:
                by_name[parameter.name] = parameter
                users.setdefault(parameter.name, []).append(index)
        return tuple((by_name[name], tuple(indices)) for name, indices in users.items())

    def held(self, start: int, stop: int) -> Parameters:
        """What the stage of layers `start` to `stop` (exclusive) has in memory."""
        own = self._sums[stop] - self._sums[start]
        return sum((p.size for p, users in self.shared if _any_within(users, start, stop)), start=own)

    def held_by(self, stages: Iterable[tuple[int, int]]) -> Parameters:
        """What a process with these stages, (start, stop) each, has in memory on one device: ties between them once."""
        stages = tuple(stages)
        own = sum((self._sums[stop] - self._sums[start] for start, stop in stages), start=Parameters())
        held = (p.size for p, users in self.shared if any(_any_within(users, *stage) for stage in stages))
        return sum(held, start=own)

    def owned(self, start: int, stop: int) -> Parameters:
        """What of `held` the stage owns, so that the optimizer's state of it lies here."""
        own = self._sums[stop] - self._sums[start]
        return sum((p.size for p, _ in self.shared if start <= p.first_layer < stop), start=own)

    def saved_bytes(self, start: int, stop: int, recompute: InnerRecompute = "none") -> int:
        """What one micro-batch's graph keeps on the stage of layers `start` to `stop`, its received input apart."""
        layers = self.layers[start:stop]
        by_stack: dict[str, int] = {}
        for layer in layers:
            by_stack[layer.stack] = max(by_stack.get(layer.stack, 0), layer.kept_for_stage(recompute))
        return (
            sum(layer.kept(recompute) for layer in layers)
            + sum(layer.kept_input(recompute) for layer in layers[1:])
            + sum(by_stack.values())
        )

    @cached_property
    def _sums(self) -> tuple[Parameters, ...]:
        """Unshared parameters of the layers before each layer."""
        return tuple(accumulate((layer.parameters for layer in self.layers), initial=Parameters()))


def mean_costs(measured: Sequence[ModelCosts]) -> ModelCosts:
    """The same costs with the mean of the seconds that several processes have measured; None where none was."""
    layer_names = ("forward_seconds", "forward_only_seconds", "backward_seconds")
    layers = tuple(_with_means(parts, layer_names) for parts in zip(*(costs.layers for costs in measured), strict=True))
    names = ("stage_forward_seconds", "stage_backward_seconds", "update_seconds_per_parameter")
    return replace(_with_means(measured, names), layers=layers)


def _with_means(parts: Sequence[Part], names: Sequence[str]) -> Part:
    """The first of `parts` with these fields replaced by their means."""
    means: dict[str, Any] = {}
    for name in names:
        seconds = [value for part in parts if (value := getattr(part, name)) is not None]
        means[name] = fmean(seconds) if seconds else None
    return replace(parts[0], **means)


def _any_within(users: tuple[int, ...], start: int, stop: int) -> bool:
    """Whether any of these layers, in order, is one of `start` to `stop` (exclusive)."""
    return any(start <= user < stop for user in users)
