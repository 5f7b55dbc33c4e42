"""Links that take a time of their own, between processes of one machine: what is sent is only when it would arrive.

All processes of a machine have one clock (CLOCK_MONOTONIC). A message holds the time at which it leaves the link, and
its receiver waits until then. A reduction begins when its last replica has asked for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from hf_gpipe.runtime import replicas
from hf_gpipe.runtime.channel import Channel, Key, Shapes, Tensors
from hf_gpipe.runtime.edges import Edge


def wait_until(end: float) -> None:
    """Sleep until this time of `time.perf_counter`."""
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class SlowChannel:
    """A channel whose messages travel so many seconds, one after another. They have one float64, "hidden" (1,)."""

    def __init__(self, channel: Channel, seconds: float) -> None:
        self._channel, self._seconds = channel, seconds
        self._free_at = 0.0

    def send(self, key: Key, tensors: Tensors, shapes: Shapes) -> None:
        self._free_at = max(self._free_at, time.perf_counter()) + self._seconds
        time_of_arrival = torch.tensor([self._free_at], dtype=torch.float64)
        self._channel.send(key, {"hidden": time_of_arrival}, {"hidden": (1,)})

    def receive(self, key: Key) -> dict[str, torch.Tensor]:
        received = self._channel.receive(key)
        wait_until(float(received["hidden"]))
        return received

    def __getattr__(self, name: str) -> Any:
        """All else is that of the channel."""
        return getattr(self._channel, name)


def slow(edge: Edge, seconds: float) -> Edge:
    """An edge whose messages travel so long, in either direction."""
    return Edge(*(cast(Channel, SlowChannel(channel, seconds)) for channel in (edge.down, edge.up)))


class _Reduction:
    """One bucket on its way; has the part of `dist.Work` that replicas use."""

    def __init__(self, group: dist.ProcessGroup, seconds: float, before: _Reduction | None) -> None:
        self._seconds, self._before = seconds, before
        self._asked = torch.tensor([time.perf_counter()], dtype=torch.float64)
        self._work: Any = dist.all_reduce(self._asked, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._end: float | None = None

    def end(self) -> float:
        """When it is done: a process does one after another."""
        if self._end is None:
            self._work.wait()
            free_at = 0.0 if self._before is None else self._before.end()
            self._end, self._before = max(free_at, float(self._asked)) + self._seconds, None
        return self._end

    def wait(self) -> None:
        wait_until(self.end())


class SlowReplicas(replicas.Replicas):
    """Replicas whose reductions take a time for each stage, in equal buckets, each of one parameter.

    Args:
        models, ties, world: as for `Replicas`.
        seconds: of the reduction of each stage.
    """

    def __init__(self, models: Mapping[int, Any], ties: Any, world: Any, seconds: Mapping[int, float]) -> None:
        self._seconds, self._stage = seconds, 0
        self._last: _Reduction | None = None
        replicas.BUCKET_BYTES = 1
        super().__init__(models, ties, world)

    def begin(self) -> None:
        # Of this step alone: a process emulates several settings in turn.
        replicas.dist = SimpleNamespace(all_reduce=self._all_reduce, ReduceOp=dist.ReduceOp)  # type: ignore[assignment]
        super().begin()

    @contextmanager
    def in_last_backward(self, stage: int) -> Iterator[None]:
        self._stage = stage
        with super().in_last_backward(stage):
            yield

    def before_last_weights(self, stage: int, incomplete: Collection[Any]) -> Callable[[Any], None] | None:
        self._stage = stage
        return super().before_last_weights(stage, incomplete)

    def start(self, stage: int) -> None:
        self._stage = stage
        super().start(stage)

    def _all_reduce(self, tensor: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool, op: Any = None) -> Any:
        if op is not None:  # flags that say which parameters have gradients
            return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
        seconds = self._seconds[self._stage] / len(self._buckets[self._stage])
        self._last = _Reduction(group, seconds, self._last)
        return self._last
