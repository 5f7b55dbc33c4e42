"""An exception that a user's script does not catch: its process tells it in one line, and all end in seconds.

Without it each process prints a traceback: the one that failed, and those that only lost their connection to it.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar

from hf_gpipe.errors import UserError
from hf_gpipe.runtime import failures
from hf_gpipe.runtime.job import Job, in_job

#: The end of the interpreter may wait for messages that no one answers any more, but for no longer.
END_SECONDS = 10.0


def join_from_script(timeout_seconds: float | None = None) -> Job:
    """`Job.join` for what scripts call: exceptions that they do not catch are told as the command tells them.

    The process that failed first prints the traceback, unless the user can correct the error, and one line; processes
    that only lost their connection to it print nothing. Exit codes are those of the command.

    Args:
        timeout_seconds: as for `Job.join`; None: its default.

    Raises:
        UserError: as `Job.join`.
    """
    _Hook.put_first()
    job = Job.join() if timeout_seconds is None else Job.join(timeout_seconds)
    # torch puts one of its own before it, which keeps what is printed there until it returns.
    _Hook.put_first()
    return job


class _Hook:
    """In place of `sys.excepthook`, which it calls for faults of this process itself."""

    _first: ClassVar[_Hook | None] = None

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    @classmethod
    def put_first(cls) -> None:
        """Let an instance be the hook of this process, if it is one of several."""
        if in_job() and sys.excepthook is not cls._first:
            sys.excepthook = cls._first = cls(sys.excepthook)

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self is not self._first or not isinstance(error, Exception):
            self._before(kind, error, trace)
            return
        faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        failure = failures.describe(error)
        if not isinstance(error, UserError) and not failure.is_consequence:
            self._before(kind, error, trace)
        # The interpreter ends with this code after its exit functions, such as those of experiment trackers.
        sys.exit(failures.tell(failure))
