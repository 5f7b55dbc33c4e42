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
from hf_gpipe.job import failures

#: The end of the interpreter may wait for messages that no one answers any more, but for no longer.
END_SECONDS = 10.0


def tell_uncaught() -> None:
    """Let exceptions that the script does not catch be told as the command tells them.

    The process that failed first prints the traceback, unless the user can correct the error, and one line; processes
    that only lost their connection to it print nothing. Exit codes are those of the command. Called again, it comes
    first again among the hooks.
    """
    if sys.excepthook is not _Hook.first:
        sys.excepthook = _Hook.first = _Hook(sys.excepthook)


class _Hook:
    """Replaces `sys.excepthook`, and calls the one before for faults of this process itself."""

    first: ClassVar[_Hook | None] = None

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self is not self.first or not isinstance(error, Exception):
            self._before(kind, error, trace)
            return
        failure = failures.describe(error)
        if not isinstance(error, UserError) and not failure.is_consequence:
            self._before(kind, error, trace)
        code = failures.tell(failure)
        faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        # The interpreter ends with this code after its exit functions, such as those of experiment trackers.
        sys.exit(code)
