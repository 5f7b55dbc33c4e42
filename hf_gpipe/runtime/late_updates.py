"""Updates of stages that wait for the next step, beside whose forwards they run.

Clipping needs the norm of the whole gradient, so no update can begin before the last backward. But a stage's update may
end as late as the stage's next forward begins: weights, gradients and optimizer state of the stage are read by nothing
else until then (GreedySnake, arXiv 2512.17570, hides a part of the update so). Its gradients stay where they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import torch


class LateUpdates:
    """The updates of this process's stages that have not been made yet. They are made once, by whoever comes first.

    Attributes:
        parameters: the parameters that such updates are of, by stage; of other parameters no update waits.
    """

    def __init__(self) -> None:
        self.parameters: Mapping[int, Sequence[torch.nn.Parameter]] = {}
        self._waiting: dict[int, Callable[[], None]] = {}
        #: A thread makes the updates beside forwards, and any other thread that needs their weights waits for it.
        self._lock = threading.RLock()

    def __contains__(self, stage: int) -> bool:
        """Whether the update of a stage has still to be made."""
        return stage in self._waiting

    def add(self, stage: int, update: Callable[[], None]) -> None:
        """Let the update of a stage wait."""
        self._waiting[stage] = update

    def make(self, stages: Collection[int] | None = None) -> None:
        """Make the updates of some stages that wait; None: of all. An update that fails does not wait any more.

        Whatever reads trained weights or the optimizer's state between two steps calls it.
        """
        stages = [stage for stage in [*self._waiting] if stages is None or stage in stages]
        if not stages:
            return
        with self._lock:
            for stage in stages:
                if stage in self._waiting:
                    try:
                        self._waiting[stage]()
                    finally:
                        del self._waiting[stage]
