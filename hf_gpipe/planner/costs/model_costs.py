"""The costs of each layer of a model: parameters, arithmetic, memory and, once measured, time.

`LayerTracer` (layers.py) computes the costs of a model without weights; `profile_layers` (measure.py) adds measured
seconds. Every number is for ONE micro-batch (workload.py) and one layer; `LayerSums` (prefix_sums.py) adds
them up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from hf_gpipe.adapters.layers import LayerKind, StackName
from hf_gpipe.partition.cluster import Level
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.workload import Workload

InnerRecompute = Literal["none", "block"]
"""The tensors that a stored graph keeps: all, or only the inputs of blocks. ("stage" says when a graph is alive.)"""


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several layers use: a tied embedding, or a position table that all blocks read.

    A process holds it once if any of its layers uses it. The stage of the first layer that uses it owns it: there
    alone it has optimizer state; the others hold a copy and its gradient.

    Attributes:
        name: its Hugging Face name; a tied parameter has its source's name.
        size: the size that it adds to a process that holds it.
        first_layer: number of the first layer that uses it.
    """

    name: str
    size: Parameters
    first_layer: int


@dataclass(frozen=True)
class GraphCost:
    """The bytes that a layer adds to the autograd graph of its stage, and the working memory of its backward.

    Attributes:
        saved_bytes: the bytes that the layer's graph keeps until its backward, without its input.
        saved_input_bytes: the part of its input that the graph keeps. On a stage's first layer it is the boundary's.
        stage_saved_bytes: the bytes that the graph keeps of what is made outside of the layers, such as masks and
            rotary tables, once for all layers of a stack on a stage.
        backward_working_bytes: the peak of the backward above what the graph keeps, the gradient that comes in
            included, where the weights have their gradients already. It includes the inside of a recomputed block.
    """

    saved_bytes: int
    saved_input_bytes: int
    stage_saved_bytes: int
    backward_working_bytes: int


@dataclass(frozen=True)
class Seconds:
    """Measured time of one micro-batch: a forward without a graph, a forward with one, and a backward."""

    forward_only: float
    forward: float
    backward: float

    def less(self, other: Seconds) -> Seconds:
        """The difference, at least 0, since a difference of two measurements may be noise."""
        return Seconds(
            max(self.forward_only - other.forward_only, 0.0),
            max(self.forward - other.forward, 0.0),
            max(self.backward - other.backward, 0.0),
        )

    def first_forward(self, recomputed: float = 0.0) -> float:
        """The seconds of the forward F of one micro-batch, where a share of the micro-batches is recomputed."""
        return recomputed * self.forward_only + (1 - recomputed) * self.forward

    def of_micro_batch(self, recomputed: float = 0.0) -> float:
        """The seconds of F, of B, and of R for this share of the micro-batches."""
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


@dataclass(frozen=True)
class LayerCost:
    """One layer's costs for one micro-batch.

    Attributes:
        name, kind, stack: the fields of the layer (adapters/layers.py).
        parameters: the size of the parameters that no other layer uses.
        shared: the parameters that other layers use too.
        buffer_bytes: the bytes of tensors that are no parameters, such as position tables.
        converted_bytes: the bytes of the weights that autocast converts, once for all micro-batches of a step.
        forward: the operations of the forward, the head's loss included.
        backward: the operations of the backward for inputs and weights, without any recomputation.
        outside: the operations of a stage before its layers, for masks and positions.
        weight_flops: the part of the backward's operations that W can compute later: for the weights of linear layers,
            except the head's.
        input_bytes: the bytes that cross the boundary before this layer; 0 for the first layer.
        gradient_input_bytes: the bytes that come back across that boundary.
        forward_working_bytes: the peak of a forward with a graph above the memory before it.
        forward_only_working_bytes: the peak of a forward without a graph, as in the first forward of a recomputed
            stage; it includes the layer's input, which no graph keeps.
        plain: the layer's graph where nothing is recomputed inside of the stage.
        block: the layer's graph where each block is recomputed.
        seconds: the measured seconds; None where nothing was measured.
        deferred_bytes: the bytes that I keeps for W where the backward is split.
        row_bytes: the bytes of the keys and values of a chunk's whole rows, and of their gradients.
        sums_beside: the sums of the backward that run beside products of weights, unless W computes these later.
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
        held: the size of a stage's part of the head's parameters.
        tie: the name of the tied embedding: a stage that uses it has the part already, and its owner has the
            optimizer's state; empty: the head is a layer of its own.
        logits_seconds, gradient_seconds: the seconds of S and T.
        hidden_bytes: the bytes of the hidden states, which their gradient has too.
        logits_bytes: the bytes that are kept from S to T beside the hidden states.
        working_bytes: the working memory of S or T.
    """

    held: Parameters
    tie: str
    logits_seconds: float
    gradient_seconds: float
    hidden_bytes: int
    logits_bytes: int
    working_bytes: int


@dataclass(frozen=True)
class ModelCosts:
    """The costs of all layers of a model, in order, for one shape of micro-batch. Divided layers have one rank's costs.

    Attributes:
        layers: the costs of each entry of `Adapter.layers`.
        workload: the micro-batch.
        micro_batch_bytes: the bytes of its ids, masks and labels, which every stage holds during the whole step.
        dtype: the type of the weights, such as "float32".
        compute_dtype: the type of the matrix products: autocast's, or the weights'.
        whole_logits: why training makes the logits of a micro-batch whole; empty where it makes them in chunks.
        stage_seconds: the seconds of a stage for a micro-batch beyond its layers; None: nothing was measured.
        update_seconds_per_parameter: the measured seconds of the optimizer, clipping included; None: not measured.
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
        """Replace the last layer by a layer that holds and costs nothing."""
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
        """The size of the whole model's parameters. A tied parameter counts once."""
        shared = {parameter.name: parameter.size for layer in self.layers for parameter in layer.shared}
        return sum([*(layer.parameters for layer in self.layers), *shared.values()], start=Parameters())


def times(costs: ModelCosts, factor: float) -> ModelCosts:
    """Multiply the measured seconds of some costs by a factor."""

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
    """Merge the costs that several processes have measured: with the mean of their seconds, or None without any."""
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
    """The mean of the measurements that are not None; None where all are."""
    known = [seconds for seconds in measured if seconds is not None]
    return Seconds.combined(known, fmean) if known else None
