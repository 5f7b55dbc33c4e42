"""The time bill: seconds of each stage's actions, the step that a table makes of them, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from hf_gpipe.planner.costs import InnerRecompute, ModelCosts
from hf_gpipe.planner.devices import Device
from hf_gpipe.planner.memory import StageLayers
from hf_gpipe.planner.settings import OPTIMIZER_SLOTS
from hf_gpipe.schedule import Costs

#: Share of a device's peak rate that matrix products of a transformer reach, where nothing was measured.
EFFICIENCY = 0.5


class TimeSums:
    """Seconds of one micro-batch on any run of layers, in constant time: measured, or from a device's rates."""

    def __init__(self, costs: ModelCosts, device: Device) -> None:
        self._costs = costs
        self._device = device
        layers = costs.layers
        if costs.is_measured:
            forward = [layer.forward_seconds or 0.0 for layer in layers]
            alone = [
                layer.forward_only_seconds if layer.forward_only_seconds is not None else layer.forward_seconds or 0.0
                for layer in layers
            ]
            backward = [layer.backward_seconds or 0.0 for layer in layers]
        else:
            rate = EFFICIENCY * device.flops_for(costs.compute_dtype)
            # What a layer keeps it has written once, and what it holds it has read once.
            moved = [layer.saved_bytes + layer.parameters.num_bytes for layer in layers]
            forward = [
                max(layer.forward_flops / rate, size / device.bytes_per_second)
                for layer, size in zip(layers, moved, strict=True)
            ]
            alone = forward
            backward = [
                max(layer.backward_flops / rate, 2 * size / device.bytes_per_second)
                for layer, size in zip(layers, moved, strict=True)
            ]
        again = [seconds if layer.kind == "block" else 0.0 for layer, seconds in zip(layers, forward, strict=True)]
        self._forward, self._alone = _prefix(forward), _prefix(alone)
        self._backward, self._block_again = _prefix(backward), _prefix(again)
        self._forward_flops = [0, *accumulate(layer.forward_flops for layer in layers)]
        self._backward_flops = [0, *accumulate(layer.backward_flops for layer in layers)]

    def forward_seconds(self, start: int, stop: int) -> float:
        """Of a forward that keeps its graph."""
        return self._forward[stop] - self._forward[start] + (self._costs.stage_forward_seconds or 0.0)

    def forward_only_seconds(self, start: int, stop: int) -> float:
        """Of a forward without a graph."""
        return self._alone[stop] - self._alone[start] + (self._costs.stage_forward_seconds or 0.0)

    def backward_seconds(self, start: int, stop: int, inner: InnerRecompute) -> float:
        """Of a backward, the recomputation of blocks inside of it included."""
        seconds = self._backward[stop] - self._backward[start] + (self._costs.stage_backward_seconds or 0.0)
        if inner == "block":
            seconds += self._block_again[stop] - self._block_again[start]
        return seconds

    def forward_flops(self, start: int, stop: int) -> int:
        """Operations of a forward."""
        return self._forward_flops[stop] - self._forward_flops[start]

    def flops(self, start: int, stop: int) -> int:
        """Operations of a forward and a backward."""
        return self.forward_flops(start, stop) + self._backward_flops[stop] - self._backward_flops[start]

    def update_seconds(self, start: int, stop: int, optimizer: str) -> float:
        """Of the optimizer's update of a stage."""
        owned = self._costs.owned(start, stop)
        if self._costs.update_seconds_per_parameter is not None:
            return self._costs.update_seconds_per_parameter * owned.trainable_count
        # Gradients are read for their norm and for the update; weights and state are read and written.
        passes = 4 + 2 * OPTIMIZER_SLOTS[optimizer]
        return passes * owned.trainable_bytes / self._device.bytes_per_second

    def transfer_seconds(self, boundary: int, *, is_local: bool) -> float:
        """Of the tensors of one micro-batch across the boundary before layer `boundary`."""
        if is_local:
            return 0.0
        return self._device.link_seconds(self._costs.layers[boundary].input_bytes)

    def table_costs(
        self, stages: Sequence[StageLayers], recompute_shares: Sequence[float], optimizer: str, *, is_local: bool
    ) -> Costs:
        """What the simulation of a table needs.

        Args:
            stages: all stages, in order.
            recompute_shares: of each stage the share of its micro-batches that the table recomputes.
            optimizer: one of `OPTIMIZER_SLOTS`.
            is_local: whether all stages are on one device.
        """
        ranges = [(stage.start, stage.stop) for stage in stages]
        forward = [
            share * self.forward_only_seconds(*layers) + (1 - share) * self.forward_seconds(*layers)
            for layers, share in zip(ranges, recompute_shares, strict=True)
        ]
        return Costs(
            forward_seconds=forward,
            recompute_seconds=[self.forward_seconds(*layers) for layers in ranges],
            backward_seconds=[self.backward_seconds(stage.start, stage.stop, stage.inner) for stage in stages],
            update_seconds=[self.update_seconds(*layers, optimizer) for layers in ranges],
            transfer_seconds=[self.transfer_seconds(start, is_local=is_local) for start, _ in ranges[1:]],
        )


@dataclass(frozen=True)
class TimeBill:
    """Seconds that a process spends in one step, by what it does; together they are the step."""

    forward: float
    recompute: float
    """Of whole stages. That of blocks is part of the backward."""
    backward: float
    update: float
    bubble: float
    """Waiting, for other stages and for messages."""

    @cached_property
    def total(self) -> float:
        """The step."""
        return self.forward + self.recompute + self.backward + self.update + self.bubble


def _prefix(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def seconds_text(seconds: float) -> str:
    """A time for people: "1.23 s", "45.6 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{1000 * seconds:.3g} ms"
