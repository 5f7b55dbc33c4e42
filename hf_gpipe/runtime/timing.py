"""When each action of a step ran, measured without holding the device up.

On CUDA an action's times are events in the stream that computes it, read after the step: what they say is when the
device did the work, not when the host asked for it. Only the step's beginning and end wait for the device.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from hf_gpipe.schedule.actions import Action


@dataclass(frozen=True)
class ActionTime:
    """When an action ran on this process, in seconds of a monotonic clock."""

    action: Action
    start: float
    """When the process came to the action."""
    end: float
    waiting: float = 0.0
    """How long, at its beginning, it waited for the action's message."""
    sending: float = 0.0
    """How long, at its end, it handed a message over. What the message then travels costs this process nothing."""


class Timer:
    """Notes four moments of each action: come to, message there, computed, message handed over.

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
        """Wait until the devices have done their work, as an update of several of them does."""
        for device in self._origins:
            torch.cuda.synchronize(device)

    def mark(self, action: Action, device: torch.device) -> None:
        """The next moment of an action is now; each has four, in the order above."""
        self._actions.append(action)
        self._moments.append((device, _event(device)) if device.type == "cuda" else time.perf_counter())

    def read(self) -> list[ActionTime]:
        """All actions, once the devices have done their work."""
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


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
