"""Weights that are on the host and visit the device: the frozen ones of each stage, for the runs of its actions.

Each visiting stage has a buffer on its device while it is there. A table lets at most a few stages visit at once
(`hf_gpipe.schedule.visits`), mostly two, so the device holds so many buffers of the largest stage's size and no more.

Only weights that are not trained visit, such as those under LoRA adapters: nothing of them has to go back. On CUDA they
are in pinned memory of the host, and a stream of its own copies them beside the computation. On the CPU the memory is
the device, and the host is the mapped file of the checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hf_gpipe.adapters import StageModel
from hf_gpipe.errors import UserError

#: Each weight of a buffer begins at a multiple of it, as memory that CUDA hands out.
_ALIGNMENT = 512


@dataclass(eq=False)
class _Buffer:
    """Memory of a device for the weights of one stage at a time."""

    memory: torch.Tensor
    is_free: torch.cuda.Event | None
    """On CUDA, when the stage before has been computed with it."""


@dataclass(eq=False)
class _Loaded:
    """The weights of a stage that is there."""

    buffer: _Buffer
    weights: dict[nn.Parameter, torch.Tensor]
    is_copied: torch.cuda.Event | None
    """On CUDA, when all have come; None once the device waits for them."""


def leave_on_host(model: StageModel) -> None:
    """Move the frozen weights of a stage to the host, where they stay between visits; call it once it is assembled.

    Raises UserError for weights that bitsandbytes has quantised to 8 bits, whose layers keep memory of their own.
    """
    for parameter in _parameters(model):
        if hasattr(parameter, "SCB"):
            raise UserError(
                "offload_weights and a model in 8 bits: its layers keep the device's memory; quantise to 4 bits, or "
                "leave offload_weights out"
            )
        if model.device.type == "cpu":
            if parameter.requires_grad:
                # It changes, and must not depend on a file that may be replaced.
                parameter.data = parameter.data.clone()
        elif not parameter.requires_grad:
            there = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=True)
            parameter.data = there.copy_(parameter.data)


class VisitingWeights:
    """The frozen weights of the stages of this process that visit their devices.

    Args:
        models: these stages, by number, after `leave_on_host`.

    Attributes:
        hosted_bytes: of these weights, of each stage.
        parameters: all that visit.
    """

    def __init__(self, models: Mapping[int, StageModel]) -> None:
        self._homes = {
            stage: {p: p.data for p in _parameters(model) if not p.requires_grad} for stage, model in models.items()
        }
        self._devices = {stage: model.device for stage, model in models.items()}
        self.hosted_bytes = {
            stage: sum(_aligned(home.nbytes) for home in homes.values()) for stage, homes in self._homes.items()
        }
        counts: defaultdict[nn.Parameter, int] = defaultdict(int)
        for homes in self._homes.values():
            for parameter in homes:
                counts[parameter] += 1
        # A tied weight is in the buffer of each stage that uses it.
        self._tied = {stage: [p for p in homes if counts[p] > 1] for stage, homes in self._homes.items()}
        self.parameters = frozenset(counts)
        self._free: defaultdict[torch.device, list[_Buffer]] = defaultdict(list)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._there: dict[int, _Loaded] = {}

    def load(self, stage: int) -> None:
        """L: begin to copy the weights of a stage to its device; on the CPU copy them."""
        device = self._devices[stage]
        buffer = self._free[device].pop() if self._free[device] else self._new_buffer(device)
        weights, start = {}, 0
        for parameter, home in self._homes[stage].items():
            own = buffer.memory[start : start + home.nbytes]
            weights[parameter] = own.view(home.dtype).view(home.shape)
            start += _aligned(home.nbytes)
        copies = [(weights[parameter], home) for parameter, home in self._homes[stage].items()]
        is_copied = None
        if buffer.is_free is None:
            _copy(copies)
        else:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            with torch.cuda.stream(self._streams[device]):
                self._streams[device].wait_event(buffer.is_free)
                _copy(copies)
                is_copied = self._streams[device].record_event()
        for parameter, weight in weights.items():
            parameter.data = weight
        self._there[stage] = _Loaded(buffer, weights, is_copied)

    def enter(self, stage: int) -> None:
        """Before each action of a stage that is there: its device waits for the weights, once."""
        loaded = self._there[stage]
        if loaded.is_copied is not None:
            torch.cuda.current_stream(self._devices[stage]).wait_event(loaded.is_copied)
            loaded.is_copied = None
        for parameter in self._tied[stage]:
            parameter.data = loaded.weights[parameter]

    def drop(self, stage: int) -> None:
        """D: the weights of a stage are those on the host again, and another stage may have the buffer."""
        device, buffer = self._devices[stage], self._there.pop(stage).buffer
        for parameter, home in self._homes[stage].items():
            parameter.data = home
        if device.type == "cuda":
            buffer.is_free = torch.cuda.current_stream(device).record_event()
        self._free[device].append(buffer)

    @contextmanager
    def visit(self, stage: int) -> Iterator[None]:
        """Context manager in which the weights of a stage are there, outside of a table. Others always are."""
        if stage not in self._homes:
            yield
            return
        self.load(stage)
        try:
            self.enter(stage)
            yield
        finally:
            self.drop(stage)

    def reset(self) -> None:
        """End the visits of a failed step."""
        for stage in list(self._there):
            self.drop(stage)

    def _new_buffer(self, device: torch.device) -> _Buffer:
        size = max(self.hosted_bytes[stage] for stage, own in self._devices.items() if own == device)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        return _Buffer(memory, torch.cuda.current_stream(device).record_event() if is_cuda else None)


def _parameters(model: StageModel) -> dict[nn.Parameter, None]:
    return dict.fromkeys(p for p in model.model.parameters() if p.device.type != "meta")


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for weight, home in copies:
        weight.copy_(home, non_blocking=True)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
