"""Background threads of the executor: one sends messages that wait for a copy, one updates stages on the CPU.

The loop raises the first error of a thread before its next action. But the loop may be blocked in a receive from a
process that itself waits for the work of the failed thread, and nothing ends a receive before its time limit. So if
there are several processes and the loop does not raise the error soon, the thread prints it and ends the process.
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

#: How long a failed thread waits for the loop to raise its error.
_GRACE_SECONDS = 2.0


class BackgroundThreads:
    """The background threads of an executor: at most one for each resource, which runs its tasks one after another.

    The threads are daemons, so they do not keep the interpreter alive. A thread ends when it has no task left.

    Args:
        process: the number of this process, for error messages.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        #: For each resource whose thread runs, the tasks that it has not begun.
        self._waiting: dict[Resource, deque[tuple[Action, Callable[[], None]]]] = {}
        self._error: StageError | None = None
        #: Guards the two fields above; notified when one of them changes, and after each task.
        self._changed = threading.Condition()
        self._is_raised = threading.Event()

    def begin(self, resource: Resource, action: Action, work: Callable[[], None]) -> None:
        """Queue `work`, the remaining work of an action, on the thread of a resource; start the thread if none runs."""
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
            with self._changed:
                self._changed.notify_all()

    def _note(self, action: Action, error: Exception) -> None:
        where = f"process {self._process}, stage {action.stage}, action {action}, in a background thread"
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

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until a task has made something true, or raise the first error of a thread."""
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self._error is not None)
        self.check()

    def finish(self) -> None:
        """Wait until all tasks are done, or raise the first error of a thread."""
        self.wait_until(lambda: not self._waiting)

    def reset(self) -> None:
        """After a failed step, drop the tasks that have not begun; in a single process, wait for those that run."""
        with self._changed:
            for waiting in self._waiting.values():
                waiting.clear()
            if _is_alone():
                # With several processes a task may wait for a message that never comes.
                self._changed.wait_for(lambda: not self._waiting)
            self._error = None
        # The loop has failed already: a thread that fails from now on does not wait for it.
        self._is_raised.set()


def _is_alone() -> bool:
    """Whether no other process waits for this one."""
    return not dist.is_initialized() or dist.get_world_size() == 1
