"""Measure when each action of a step ran, without making the device wait.

On CUDA an action's times are events in the stream that computes it, read after the step: the times at which the device
did the work, not those at which the host launched it. Only the beginning and the end of a step wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from hf_gpipe.libraries.torch import is_profiling
from hf_gpipe.schedule.actions import Action


@dataclass(frozen=True)
class ActionTime:
    """When an action ran on this process, in seconds of a monotonic clock."""

    action: Action
    start: float
    """When the process started the action."""
    end: float
    waiting: float = 0.0
    """How long it waited for the action's message, at the beginning."""
    sending: float = 0.0
    """How long the call that sends the message took, at the end; the transfer itself is asynchronous."""


class Timer:
    """Notes four times of each action: started, message received, computed, message sent.

    Args:
        devices: where the actions of this process compute.
    """

    def __init__(self, devices: Collection[torch.device]) -> None:
        self._actions: list[Action] = []
        self._moments: list[float | tuple[torch.device, torch.cuda.Event]] = []
        self._origins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                self._origins[device] = time.perf_counter(), _event(device)

    def synchronize(self) -> None:
        """Wait until the devices have done their work."""
        for device in self._origins:
            torch.cuda.synchronize(device)

    def mark(self, action: Action, device: torch.device) -> None:
        """Note the next of the four times of an action: it is now."""
        self._actions.append(action)
        self._moments.append((device, _event(device)) if device.type == "cuda" else time.perf_counter())

    def read(self) -> list[ActionTime]:
        """Wait for the devices, and return the times of all actions."""
        self.synchronize()
        seconds = [self._seconds(moment) for moment in self._moments]
        quarters = zip(self._actions[::4], *(seconds[i::4] for i in range(4)), strict=True)
        return [ActionTime(a, come, sent, there - come, sent - done) for a, come, there, done, sent in quarters]

    def _seconds(self, moment: float | tuple[torch.device, torch.cuda.Event]) -> float:
        if isinstance(moment, float):
            return moment
        device, event = moment
        began, origin = self._origins[device]
        return began + origin.elapsed_time(event) / 1000


class NamedRanges:
    """Gives each action a range in the traces of torch's profilers, named as in the table, such as "action 2F0".

    `torch.profiler.profile()` records them, and `torch.autograd.profiler.emit_nvtx()` makes NVTX ranges of them.
    """

    def __init__(self) -> None:
        self._num_marks = 0
        self._range: torch.profiler.record_function | None = None

    def mark(self, action: Action, device: torch.device) -> None:
        """Open the range of an action at the first of its four marks, and close it at the last, as `Timer.mark`."""
        if self._num_marks % 4 == 0:
            # Not "2F0" alone: torch takes it for a mangled name of C++ and shows "F0".
            self._range = torch.profiler.record_function(f"action {action}")
            self._range.__enter__()
        elif self._num_marks % 4 == 3 and self._range is not None:
            self._range.__exit__(None, None, None)
        self._num_marks += 1


def is_profiled() -> bool:
    """Whether one of torch's profilers records this thread."""
    return is_profiling()


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
