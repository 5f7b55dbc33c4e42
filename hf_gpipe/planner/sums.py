"""Sums over runs of layers in constant time, for a partitioner that asks for thousands of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hf_gpipe.planner.costs import InnerRecompute, ModelCosts


class RangeMax:
    """The largest of consecutive values, after a table of their maxima over runs of 1, 2, 4 ... has been made."""

    def __init__(self, values: Sequence[float]) -> None:
        self._rows = [list(values)]
        width = 1
        while 2 * width <= len(values):
            row = self._rows[-1]
            self._rows.append([max(row[i], row[i + width]) for i in range(len(row) - width)])
            width *= 2

    def __call__(self, start: int, stop: int) -> float:
        """The maximum of the values `start` to `stop` (exclusive), at least one."""
        level = (stop - start).bit_length() - 1
        row = self._rows[level]
        return max(row[start], row[stop - (1 << level)])


class MemorySums:
    """The memory of any run of layers: what its weights take, what a graph keeps, and the peaks of its actions.

    What `ModelCosts.saved_bytes` counts once a stack, this counts as the most that any layer of the stack has.
    """

    def __init__(self, costs: ModelCosts, state_share: float) -> None:
        self._costs = costs
        layers = costs.layers
        held = [layer.parameters.num_bytes + layer.buffer_bytes for layer in layers]
        trained = [layer.parameters.trainable_bytes for layer in layers]
        self._static = [
            0,
            *accumulate(size + (1 + state_share) * one for size, one in zip(held, trained, strict=True)),
        ]
        self._weights = [0, *accumulate(layer.parameters.num_bytes for layer in layers)]
        self._share = state_share
        self._inner: dict[InnerRecompute, _Inner] = {mode: _Inner(costs, mode) for mode in ("none", "block")}
        self._alone = RangeMax([layer.forward_only_working_bytes for layer in layers])

    def static_bytes(self, start: int, stop: int) -> float:
        """Weights, their gradients, the optimizer's state, and buffers of a stage that is alone in its process."""
        size = self._static[stop] - self._static[start]
        for parameter, users in self._costs.shared:
            if any(start <= user < stop for user in users):
                is_owner = start <= parameter.first_layer < stop
                size += parameter.size.num_bytes
                size += parameter.size.trainable_bytes * (1 + self._share * is_owner)
        return size

    def parameter_bytes(self, start: int, stop: int) -> int:
        """Weights alone."""
        shared = [p for p, users in self._costs.shared if any(start <= user < stop for user in users)]
        return self._weights[stop] - self._weights[start] + sum(p.size.num_bytes for p in shared)

    def graph_bytes(self, start: int, stop: int, inner: InnerRecompute) -> int:
        """What one micro-batch's graph keeps, its stage's input apart."""
        return self._inner[inner].graph_bytes(start, stop)

    def working_bytes(self, start: int, stop: int, inner: InnerRecompute) -> float:
        """The most that an action needs beside the graphs that are kept, and beside its own graph."""
        sums = self._inner[inner]
        return max(sums.peak_bytes(start, stop) - sums.graph_bytes(start, stop), self._alone(start, stop), 0)


class _Inner:
    """Sums of what a graph keeps, under one kind of recomputation inside of it."""

    def __init__(self, costs: ModelCosts, inner: InnerRecompute) -> None:
        layers = costs.layers
        self._input = [layer.kept_input(inner) for layer in layers]
        kept = [layer.kept(inner) + one for layer, one in zip(layers, self._input, strict=True)]
        self._kept = [0, *accumulate(kept)]
        self._stacks = []
        for stack in dict.fromkeys(layer.stack for layer in layers):
            own = [index for index, layer in enumerate(layers) if layer.stack == stack]
            self._stacks.append((own[0], own[-1] + 1, max(layers[index].kept_for_stage(inner) for index in own)))
        forward = [layer.forward_working_bytes for layer in layers]
        backward = [
            layer.backward_working_bytes if inner == "none" else layer.block_backward_working_bytes for layer in layers
        ]
        self._peaks = RangeMax(
            [
                max(self._kept[index] + forward[index], self._kept[index + 1] + backward[index])
                for index in range(len(layers))
            ]
        )

    def graph_bytes(self, start: int, stop: int) -> int:
        return self._kept[stop] - self._kept[start] - self._input[start] + self._for_stacks(start, stop)

    def peak_bytes(self, start: int, stop: int) -> float:
        """The peak of building a graph and taking its gradient, above the stage's input."""
        peak = self._peaks(start, stop) - self._kept[start] - self._input[start]
        return peak + self._for_stacks(start, stop)

    def _for_stacks(self, start: int, stop: int) -> int:
        return sum(size for first, end, size in self._stacks if start < end and first < stop)
