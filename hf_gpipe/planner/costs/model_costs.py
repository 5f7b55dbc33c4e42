"""The costs of each layer of a model: parameters, arithmetic, memory and, once measured, time.

`LayerTracer` (layers.py) computes the costs of a model without weights; `profile_layers` (measure.py) adds measured
seconds. Every number is for ONE micro-batch (workload.py) and one layer; `StageCosts` (stage_costs.py) adds
them up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from hf_gpipe.adapters.layers import LayerKind, StackName
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.machines.devices import Device
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.workload import Workload

#: The executor's time for an action, in operations: 64 to 81 microseconds on a host that takes 7 for an operation.
_CALLS_OF_ACTION = 10

InnerRecompute = Literal["none", "block"]
"""The tensors that a stored graph keeps: all, or only the inputs of blocks. ("stage" says when a graph is alive.)"""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several layers use: a tied embedding, or a position table that all blocks read.

    A process holds it once if any of its layers uses it. The stage of the first layer that uses it owns it: there
    alone it has optimizer state; the others hold a copy and its gradient.
    """

    name: str
    """Its Hugging Face name; a tied parameter has its source's name."""
    size: Parameters
    first_layer: int


@dataclass(frozen=True)
class GraphCost:
    """The bytes that a layer adds to the autograd graph of its stage, and the working memory of its backward."""

    saved_bytes: int
    """The bytes that the layer's graph keeps until its backward, without its input."""
    saved_input_bytes: int
    """The part of its input that the graph keeps. On a stage's first layer it is the boundary's."""
    stage_saved_bytes: int
    """The bytes that the graph keeps of what is made outside of the layers, such as masks and rotary tables, once for
    all layers of a stack on a stage."""
    backward_working_bytes: int
    """The peak of the backward above what the graph keeps, the gradient that comes in included, where the weights have
    their gradients already. It includes the inside of a recomputed block."""


class Seconds(NamedTuple):
    """The time of one micro-batch: a forward without a graph, a forward with one, and a backward."""

    forward_only: float
    forward: float
    backward: float

    def less(self, other: Seconds) -> Seconds:
        """The difference, at least 0, since a difference of two measurements may be noise."""
        return Seconds(*(max(own - less, 0.0) for own, less in zip(self, other, strict=True)))

    def first_forward(self, recomputed: float = 0.0) -> float:
        """The seconds of the forward F of one micro-batch, where a share of the micro-batches is recomputed."""
        return recomputed * self.forward_only + (1 - recomputed) * self.forward

    def of_micro_batch(self, recomputed: float = 0.0) -> float:
        """The seconds of F, of B, and of R for this share of the micro-batches."""
        return self.first_forward(recomputed) + recomputed * self.forward + self.backward

    def divided(self, number: float) -> Seconds:
        return Seconds(*(own / number for own in self))

    @classmethod
    def combined(cls, measured: Collection[Seconds], combine: Callable[[Iterable[float]], float]) -> Seconds:
        """The mean or median of several measurements, whichever `combine` computes."""
        return cls(*map(combine, zip(*measured, strict=True)))


class SumsOverRanks(NamedTuple):
    """The sums of tensors over the ranks of a worker: their number, their bytes, and the number of ranks.

    They go in rings (Patarasuk and Yuan 2009), where each rank waits for the one before it.
    """

    number: int = 0
    num_bytes: int = 0
    size: int = 1

    def and_one(self, num_bytes: int) -> SumsOverRanks:
        """Add one sum of `num_bytes`."""
        return self._replace(number=self.number + 1, num_bytes=self.num_bytes + num_bytes)

    @property
    def sent_bytes(self) -> int:
        """The bytes that all ranks send."""
        return 2 * (self.size - 1) * self.num_bytes

    def seconds(self, link: Level) -> float:
        """Seconds on this link."""
        rounds = 2 * (self.size - 1)
        return rounds * (self.number * link.latency_seconds + self.num_bytes / self.size / link.bytes_per_second)


NO_SUMS = SumsOverRanks()


class SumBeside(NamedTuple):
    """A sum over the ranks that runs beside matrix products, and the products' operations."""

    sum: SumsOverRanks
    flops: int


class Operations(NamedTuple):
    """The operations of a pass of one micro-batch through a layer.

    Attributes:
        flops: multiplications and additions of the matrix products (2 for each pair).
        moved: the bytes that operations without a product read and write.
        calls: the number of operations except views. Each takes time however small it is.
        sums: the sums over the ranks of a worker, where layers are divided.
    """

    flops: int = 0
    moved: int = 0
    calls: int = 0
    sums: SumsOverRanks = NO_SUMS


NO_OPERATIONS = Operations()
_NO_PARAMETERS = Parameters()


@dataclass(frozen=True)
class LayerCost:
    """One layer's costs for one micro-batch."""

    name: str
    kind: LayerKind
    stack: StackName
    parameters: Parameters
    """The size of the parameters that no other layer uses."""
    shared: tuple[SharedParameter, ...]
    buffer_bytes: int
    """The bytes of tensors that are no parameters, such as position tables."""
    forward: Operations
    """The operations of the forward, the head's loss included."""
    backward: Operations
    """The operations of the backward for inputs and weights, without any recomputation."""
    input_bytes: int
    """The bytes that cross the boundary before this layer; 0 for the first layer."""
    gradient_input_bytes: int
    """The bytes that come back across that boundary."""
    forward_working_bytes: int
    """The peak of a forward with a graph above the memory before it."""
    forward_only_working_bytes: int
    """The peak of a forward without a graph, as in the first forward of a recomputed stage; it includes the layer's
    input, which no graph keeps."""
    plain: GraphCost
    """The layer's graph where nothing is recomputed inside of the stage."""
    block: GraphCost
    """The layer's graph where each block is recomputed."""
    experts: Parameters = _NO_PARAMETERS
    """The part of `parameters` that is of the experts of a mixture."""
    outside: Operations = NO_OPERATIONS
    """The operations of a stage before its layers, for masks and positions."""
    weight_flops: int = 0
    """The part of the backward's operations that W can compute later: for the weights of linear layers, but the
    head's."""
    seconds: Seconds | None = None
    """The measured seconds; None where nothing was measured."""
    deferred_bytes: int = 0
    """The bytes that I keeps for W where the backward is split."""
    row_bytes: int = 0
    """The bytes of the keys and values of the whole rows of a group, and of their gradients."""
    converted_bytes: int = 0
    """The bytes of the weights that autocast converts, once for all micro-batches of a step."""
    sums_beside: tuple[SumBeside, ...] = ()
    """The sums of the backward that run beside products of weights, unless W computes these later."""

    def graph(self, inner: InnerRecompute) -> GraphCost:
        """The layer's part of a stored graph."""
        return self.plain if inner == "none" else self.block


@dataclass(frozen=True)
class Part:
    """The part of the last layer that each stage has, where all share it."""

    held: Parameters
    tie: str
    """The name of the tied embedding: a stage that uses it has the part already, and its owner has the optimizer's
    state; empty: the layer's parameters are its own."""


@dataclass(frozen=True)
class ModelCosts:
    """The costs of all layers of a model, in order, for one shape of micro-batch. Divided layers have one rank's
    costs."""

    layers: tuple[LayerCost, ...]
    workload: Workload
    micro_batch_bytes: int
    """The bytes of its ids, masks and labels, which every stage holds during the whole step."""
    dtype: str
    """The type of the weights, such as "float32"."""
    compute_dtype: str
    """The type of the matrix products: autocast's, or the weights'."""
    whole_logits: str = ""
    """Why training makes the logits of a micro-batch whole; empty where it makes them for some positions at a time."""
    stage_seconds: Seconds | None = None
    """The seconds of a stage for a micro-batch beyond its layers; None: nothing was measured."""
    update_seconds_per_parameter: float | None = None
    """The measured seconds of the optimizer, clipping included; None: not measured."""

    @property
    def is_measured(self) -> bool:
        """Whether every layer has its seconds."""
        return all(layer.seconds is not None for layer in self.layers)

    @property
    def total(self) -> Parameters:
        """The size of the whole model's parameters. A tied parameter counts once."""
        shared = {parameter.name: parameter.size for layer in self.layers for parameter in layer.shared}
        return sum([*(layer.parameters for layer in self.layers), *shared.values()], start=Parameters())


def mean_costs(measured: Sequence[ModelCosts], factors: Sequence[float] | None = None) -> ModelCosts:
    """Merge the costs that several processes have measured: with the mean of their seconds, or None without any.

    The seconds of each process are multiplied by its factor; None: by 1.
    """
    factors = factors or [1.0] * len(measured)

    def mean(seconds: Iterable[Seconds | None]) -> Seconds | None:
        return mean_seconds(own and own.divided(1 / factor) for own, factor in zip(seconds, factors, strict=True))

    layers = [
        replace(same[0], seconds=mean(own.seconds for own in same))
        for same in zip(*(costs.layers for costs in measured), strict=True)
    ]
    updates = [costs.update_seconds_per_parameter for costs in measured]
    known = [factor * seconds for seconds, factor in zip(updates, factors, strict=True) if seconds is not None]
    stage, update = mean(costs.stage_seconds for costs in measured), fmean(known) if known else None
    return replace(measured[0], layers=tuple(layers), stage_seconds=stage, update_seconds_per_parameter=update)


def typical(group: Sequence[ModelCosts]) -> ModelCosts:
    """The costs of a member that stands for all of a group: the bytes of the one that keeps most, and the mean time."""
    # Among equally long members it is the last, which attends to the most tokens.
    most = max(reversed(group), key=lambda member: sum(layer.plain.saved_bytes for layer in member.layers))
    layers = []
    for layer, *same in zip(most.layers, *(member.layers for member in group), strict=True):
        # The calls and sums are those of `most`.
        passes = {
            name: getattr(layer, name)._replace(
                flops=round(fmean(getattr(own, name).flops for own in same)),
                moved=round(fmean(getattr(own, name).moved for own in same)),
            )
            for name in ("forward", "backward")
        }
        layers.append(replace(layer, seconds=mean_seconds(own.seconds for own in same), **passes))
    return replace(most, layers=tuple(layers), stage_seconds=mean_seconds(member.stage_seconds for member in group))


def mean_seconds(measured: Iterable[Seconds | None]) -> Seconds | None:
    """The mean of the measurements that are not None; None where all are."""
    known = [seconds for seconds in measured if seconds is not None]
    return Seconds.combined(known, fmean) if known else None


def estimated_seconds(layer: LayerCost, compute_dtype: str, device: Device) -> Seconds:
    """A layer's seconds by a device's rates: products take their arithmetic, and other operations what they move."""
    rate = device.product_rate(compute_dtype)
    forward, backward = (
        device.seconds(own.flops / rate, own.moved, own.calls) for own in (layer.forward, layer.backward)
    )
    return Seconds(forward, forward, backward)


def estimated_stage_seconds(layers: Sequence[LayerCost], device: Device) -> Seconds:
    """The seconds of a stage beyond its layers: its own operations, and the executor's time for an action."""
    action = device.seconds(0.0, 0, _CALLS_OF_ACTION)
    moved, calls = max(layer.outside.moved for layer in layers), max(layer.outside.calls for layer in layers)
    forward = action + device.seconds(0.0, moved, calls)
    return Seconds(forward, forward, action)


def hidden_seconds(layer: LayerCost, own: Seconds, link: Level) -> float:
    """The seconds of the backward's sums that products hide: a sum is hidden as long as its products run."""
    if not layer.sums_beside:
        return 0.0
    per_operation = own.backward / layer.backward.flops
    return sum(min(beside.sum.seconds(link), beside.flops * per_operation) for beside in layer.sums_beside)


def rated_speeds(costs: ModelCosts, devices: Sequence[Device]) -> tuple[float, ...]:
    """The speed of each device relative to the first one, by their data sheets, for the layers of a model."""
    dtype = costs.compute_dtype
    seconds = [
        sum(estimated_seconds(layer, dtype, device).of_micro_batch() for layer in costs.layers) for device in devices
    ]
    return tuple(float(f"{seconds[0] / total:.3g}") for total in seconds)
