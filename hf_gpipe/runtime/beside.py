"""Threads beside the executor's loop: one sends messages that wait for a copy, one updates dealt stages on the host.

The loop raises the first error of a thread before its next action. But it may be waiting for a message of a process
that itself waits for what the thread did not do, and no one can end such a wait before its time limit. So where several
processes work and the loop does not come to the error in a moment, the thread tells it and ends its process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch.distributed as dist

from hf_gpipe.errors import StageError
from hf_gpipe.job import failures
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import Resource

#: How long the loop may take to come to an error of a thread.
_GRACE_SECONDS = 2.0


class Beside:
    """The threads of an executor: for each resource at most one, which does one thing after another.

    They are daemons, which the end of the interpreter does not wait for, and end when nothing is left to do.

    Args:
        process: the number that errors name.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        #: The work that the thread of a resource has not begun, for each resource whose thread runs.
        self._waiting: dict[Resource, deque[tuple[Action, Callable[[], None]]]] = {}
        self._error: StageError | None = None
        #: Held where one of these changes, and told of it.
        self._changed = threading.Condition()
        self._is_raised = threading.Event()

    def begin(self, resource: Resource, action: Action, work: Callable[[], None]) -> None:
        """Let the thread of a resource do what is left of an action, after what it was given before."""
        with self._changed:
            if (waiting := self._waiting.get(resource)) is not None:
                waiting.append((action, work))
                return
            self._waiting[resource] = deque([(action, work)])
        name = f"hf_gpipe-{resource}"
        threading.Thread(target=self._run, args=(resource,), name=name, daemon=True).start()

    def _run(self, resource: Resource) -> None:
        while True:
            with self._changed:
                if not self._waiting[resource] or self._error is not None:
                    del self._waiting[resource]
                    self._changed.notify_all()
                    return
                action, work = self._waiting[resource].popleft()
            try:
                work()
            except Exception as error:
                self._note(action, error)

    def _note(self, action: Action, error: Exception) -> None:
        where = f"process {self._process}, stage {action.stage}, action {action}, beside those after it"
        problem = StageError(f"{where}: {type(error).__name__}: {error}")
        problem.__cause__ = error
        with self._changed:
            if self._error is not None:
                return
            self._error = problem
            self._changed.notify_all()
        if _is_alone() or self._is_raised.wait(_GRACE_SECONDS):
            return
        failures.end(failures.describe(problem))

    def check(self) -> None:
        """Raise the first error of a thread."""
        if self._error is not None:
            self._is_raised.set()
            raise self._error

    def finish(self) -> None:
        """Wait until all is done, or raise the first error of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._error is not None)
        self.check()

    def reset(self) -> None:
        """After a failed step: forget what was not begun, and in a single process wait for what was."""
        with self._changed:
            for waiting in self._waiting.values():
                waiting.clear()
            if _is_alone():
                # In another it may wait for a message that does not come.
                self._changed.wait_for(lambda: not self._waiting)
            self._error = None
        # The loop has failed: what a thread finds from now on, nobody waits for.
        self._is_raised.set()


def _is_alone() -> bool:
    """Whether no other process waits for this one."""
    return not dist.is_initialized() or dist.get_world_size() == 1
