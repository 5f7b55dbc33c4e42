"""The costs of each layer of a model: parameters, arithmetic, memory and, once measured, time.

`LayerTracer` (layers.py) computes the costs of a model without weights; `profile_layers` (measure.py) adds measured
seconds. Every number is of ONE micro-batch (workload.py) and of one layer; `LayerSums` (prefix_sums.py) adds
them up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from hf_gpipe.adapters.layers import LayerKind, StackName
from hf_gpipe.job.wire import sendable
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.workload import Workload

InnerRecompute = Literal["none", "block"]
"""The tensors that a stored graph keeps: all, or only the inputs of blocks. ("stage" says when a graph is alive.)"""


@sendable
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

    def divided(self, number: int) -> Parameters:
        """One of so many equal parts, rounded up."""
        return Parameters(*(-(-value // number) for value in vars(self).values()))

    def __sub__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.count - other.count,
            self.num_bytes - other.num_bytes,
            self.trainable_count - other.trainable_count,
            self.trainable_bytes - other.trainable_bytes,
        )


@sendable
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


@sendable
@dataclass(frozen=True)
class GraphCost:
    """The bytes that a layer adds to the autograd graph of its stage, and the working memory of its backward.

    Attributes:
        saved_bytes: what the layer's graph keeps until its backward, without its input.
        saved_input_bytes: the part of its input that the graph keeps. On a stage's first layer it is the boundary's.
        stage_saved_bytes: what the graph keeps that is made outside of the layers, such as masks and rotary tables:
            once for all layers of a stack on a stage.
        backward_working_bytes: the peak of the backward above what the graph keeps, the gradient that comes in
            included, where the weights have their gradients already. Of a recomputed block its inside is in it.
    """

    saved_bytes: int
    saved_input_bytes: int
    stage_saved_bytes: int
    backward_working_bytes: int


@sendable
@dataclass(frozen=True)
class Seconds:
    """Measured time of one micro-batch: a forward without a graph, a forward with one, and a backward."""

    forward_only: float
    forward: float
    backward: float

    def less(self, other: Seconds) -> Seconds:
        """The difference, at least 0: of two measurements it may be noise."""
        return Seconds(
            max(self.forward_only - other.forward_only, 0.0),
            max(self.forward - other.forward, 0.0),
            max(self.backward - other.backward, 0.0),
        )

    def first_forward(self, recomputed: float = 0.0) -> float:
        """The forward F of one micro-batch, where a share of the micro-batches is recomputed."""
        return recomputed * self.forward_only + (1 - recomputed) * self.forward

    def of_micro_batch(self, recomputed: float = 0.0) -> float:
        """F, the recomputation R of this share of the micro-batches, and B."""
        return self.first_forward(recomputed) + recomputed * self.forward + self.backward

    def divided(self, number: float) -> Seconds:
        return Seconds(self.forward_only / number, self.forward / number, self.backward / number)

    @classmethod
    def combined(cls, measured: Collection[Seconds], combine: Callable[[Iterable[float]], float]) -> Seconds:
        """The mean or median of several measurements, whichever `combine` computes."""
        return cls(
            combine(seconds.forward_only for seconds in measured),
            combine(seconds.forward for seconds in measured),
            combine(seconds.backward for seconds in measured),
        )


@sendable
class SumsOverRanks(NamedTuple):
    """The sums of tensors over the ranks of a worker: how many, the bytes of all, and the number of the ranks.

    They go in rings (Patarasuk and Yuan 2009), where each rank waits for the one before it.
    """

    number: int = 0
    num_bytes: int = 0
    size: int = 1

    def and_one(self, num_bytes: int) -> SumsOverRanks:
        """These and one more."""
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


@sendable
class SumBeside(NamedTuple):
    """A sum over the ranks that runs beside matrix products, and the products' operations."""

    sum: SumsOverRanks
    flops: int


@sendable
class Operations(NamedTuple):
    """The operations of a pass of one micro-batch through a layer.

    Attributes:
        flops: multiplications and additions of the matrix products (2 for each pair).
        moved: bytes that operations without a product read and write.
        calls: number of operations, views apart. Each takes time however small it is.
        sums: over the ranks of a worker, where layers are divided.
    """

    flops: int = 0
    moved: int = 0
    calls: int = 0
    sums: SumsOverRanks = NO_SUMS


NO_OPERATIONS = Operations()


@sendable
@dataclass(frozen=True)
class LayerCost:
    """One layer's costs for one micro-batch.

    Attributes:
        name, kind, stack: of the layer (adapters/layers.py).
        parameters: those that no other layer uses.
        shared: those that other layers use too.
        buffer_bytes: tensors that are no parameters, such as position tables.
        converted_bytes: what autocast makes of the weights, once for all micro-batches of a step.
        forward: its operations, head's loss included.
        backward: those for inputs and weights, without any recomputation.
        outside: those of a stage before its layers, for masks and positions.
        weight_flops: of the backward's the part that W can leave for later: of linear layers' weights, the head's
            apart.
        input_bytes: what crosses the boundary before this layer; 0 for the first one.
        gradient_input_bytes: what comes back across it.
        forward_working_bytes: the peak of the forward above what was there before it, with a graph.
        forward_only_working_bytes: the same without a graph, as in the first forward of a recomputed stage; the layer's
            input included, which no graph keeps.
        plain: its graph where nothing is recomputed inside of the stage.
        block: its graph where each block is recomputed.
        seconds: measured; None where nothing was.
        deferred_bytes: what I keeps for W where the backward is split.
        row_bytes: of a chunk the keys and values of its whole rows, and as many bytes again for their gradients.
        sums_beside: of the backward's sums those that run beside products of weights, unless W computes these later.
    """

    name: str
    kind: LayerKind
    stack: StackName
    parameters: Parameters
    shared: tuple[SharedParameter, ...]
    buffer_bytes: int
    forward: Operations
    backward: Operations
    input_bytes: int
    gradient_input_bytes: int
    forward_working_bytes: int
    forward_only_working_bytes: int
    plain: GraphCost
    block: GraphCost
    outside: Operations = NO_OPERATIONS
    weight_flops: int = 0
    seconds: Seconds | None = None
    deferred_bytes: int = 0
    row_bytes: int = 0
    converted_bytes: int = 0
    sums_beside: tuple[SumBeside, ...] = ()

    def graph(self, inner: InnerRecompute) -> GraphCost:
        """The layer's part of a stored graph."""
        return self.plain if inner == "none" else self.block


@dataclass(frozen=True)
class HeadPart:
    """The part of a head that each stage has, where it is divided over them; for one micro-batch.

    Attributes:
        held: its part of the head's parameters.
        tie: the name of the tied embedding: a stage that uses it has the part already, and its owner the optimizer's
            state; empty: the head is a layer of its own.
        logits_seconds, gradient_seconds: of S and T.
        hidden_bytes: of the hidden states, and as many of their gradient.
        logits_bytes: what is kept from S to T beside them.
        working_bytes: of S or T.
    """

    held: Parameters
    tie: str
    logits_seconds: float
    gradient_seconds: float
    hidden_bytes: int
    logits_bytes: int
    working_bytes: int


@sendable
@dataclass(frozen=True)
class ModelCosts:
    """All layers of a model, in order, for one shape of micro-batch; of divided layers those of one rank.

    Attributes:
        layers: one for each entry of `Adapter.layers`.
        workload: the micro-batch.
        micro_batch_bytes: of its ids, masks and labels, which every stage holds from the step's begin to its end.
        dtype: of the weights, such as "float32".
        compute_dtype: of the matrix products: autocast's, or the weights'.
        whole_logits: why training makes the logits of a micro-batch whole; empty where it makes them in chunks.
        stage_seconds: what a stage spends on a micro-batch beyond its layers; None where nothing was measured.
        update_seconds_per_parameter: measured time of the optimizer, clipping included; None where nothing was.
        can_divide_head: whether a schedule can divide the last layer over the stages.
    """

    layers: tuple[LayerCost, ...]
    workload: Workload
    micro_batch_bytes: int
    dtype: str
    compute_dtype: str
    whole_logits: str = ""
    stage_seconds: Seconds | None = None
    update_seconds_per_parameter: float | None = None
    can_divide_head: bool = False

    @property
    def without_head(self) -> ModelCosts:
        """The same costs with a last layer that holds and costs nothing."""
        nothing = GraphCost(0, 0, 0, 0)
        head = replace(
            self.layers[-1],
            parameters=Parameters(),
            shared=(),
            buffer_bytes=0,
            converted_bytes=0,
            forward=NO_OPERATIONS,
            backward=NO_OPERATIONS,
            forward_working_bytes=0,
            forward_only_working_bytes=0,
            plain=nothing,
            block=nothing,
            seconds=None if self.layers[-1].seconds is None else Seconds(0.0, 0.0, 0.0),
            sums_beside=(),
        )
        return replace(self, layers=(*self.layers[:-1], head))

    @property
    def is_measured(self) -> bool:
        """Whether every layer has its seconds."""
        return all(layer.seconds is not None for layer in self.layers)

    @property
    def total(self) -> Parameters:
        """The whole model's parameters, each tie once."""
        shared = {parameter.name: parameter.size for layer in self.layers for parameter in layer.shared}
        return sum([*(layer.parameters for layer in self.layers), *shared.values()], start=Parameters())


def times(costs: ModelCosts, factor: float) -> ModelCosts:
    """The same costs with so many times the seconds that were measured."""

    def scaled(seconds: Seconds | None) -> Seconds | None:
        return None if seconds is None else seconds.divided(1 / factor)

    update = costs.update_seconds_per_parameter
    return replace(
        costs,
        layers=tuple(replace(layer, seconds=scaled(layer.seconds)) for layer in costs.layers),
        stage_seconds=scaled(costs.stage_seconds),
        update_seconds_per_parameter=None if update is None else factor * update,
    )


def mean_costs(measured: Sequence[ModelCosts]) -> ModelCosts:
    """The same costs with the mean of the seconds that several processes have measured; None where none was."""
    layers = tuple(
        replace(same[0], seconds=mean_seconds(layer.seconds for layer in same))
        for same in zip(*(costs.layers for costs in measured), strict=True)
    )
    updates = [costs.update_seconds_per_parameter for costs in measured]
    known = [seconds for seconds in updates if seconds is not None]
    return replace(
        measured[0],
        layers=layers,
        stage_seconds=mean_seconds(costs.stage_seconds for costs in measured),
        update_seconds_per_parameter=fmean(known) if known else None,
    )


def mean_seconds(measured: Iterable[Seconds | None]) -> Seconds | None:
    """The mean of those that were measured; None where none was."""
    known = [seconds for seconds in measured if seconds is not None]
    return Seconds.combined(known, fmean) if known else None
