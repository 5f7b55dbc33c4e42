"""Calls that every process must make: one that a process makes alone is an error that names it, not a wait.

Without it, such as where a script saves the model `if trainer.is_world_process_zero()`, that process waits for messages
until their time limit. In the store of the default group each process writes the name of its n-th call, and that it has
ended.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.job.job import Job

Self = TypeVar("Self")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_LONGEST_PAUSE_SECONDS = 0.2


class _Calls:
    """The calls that this process has made in a default group of torch.distributed."""

    def __init__(self, world: dist.ProcessGroup | None) -> None:
        self.world = world
        self._store, self._num_calls, self._process = Job.current().store_of_group(), 0, os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        # After an uncaught exception the launcher ends the others, and the exception is the cause to tell.
        if os.getpid() == self._process and not hasattr(sys, "last_value"):
            with suppress(Exception):  # the store may be gone
                self._store.set(f"hf_gpipe/calls/ended/{dist.get_rank()}", "")

    def meet(self, name: str) -> None:
        """Wait until every process has made its call of this number.

        Raises:
            UserError: another process has made another call, has ended, or has not called within the time limit.
        """
        job, rank = Job.current(), dist.get_rank()
        limit = (job.timeout or dist.default_pg_timeout).total_seconds()
        deadline = time.monotonic() + limit
        self._num_calls += 1
        self._store.set(f"hf_gpipe/calls/{self._num_calls}/{rank}", name)
        for other in range(dist.get_world_size()):
            key, pause, did = f"hf_gpipe/calls/{self._num_calls}/{other}", 0.001, ""
            while not self._store.check([key]) and not did:
                if self._store.check([f"hf_gpipe/calls/ended/{other}"]):
                    did = "has ended without that call"
                elif time.monotonic() > deadline:
                    did = f"did not within {limit:g} seconds"
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if not did and (called := self._store.get(key).decode()) != name:
                did = f"called {called}"
            if did:
                raise UserError(
                    f"process {rank} called {name} and process {other} {did}; every process must call the same "
                    "methods, so take the call out of conditions such as `if trainer.is_world_process_zero()`"
                )


def by_every_process(
    method: Callable[Concatenate[Self, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Decorator of a method that every process of the job must call, at the same place of its program.

    The decorated method raises UserError, within a second, where another process has called another one or has ended.
    Without such a sign it waits for the others, as long as for a message.
    """

    @functools.wraps(method)
    def called(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        job = Job.current()
        # What a method calls in its turn, all processes call.
        if job.is_in_call or not dist.is_initialized() or dist.get_world_size() == 1:
            return method(self, *args, **kwargs)
        if job.calls is None or job.calls.world is not dist.group.WORLD:
            job.calls = _Calls(dist.group.WORLD)
        job.calls.meet(f"{type(self).__name__}.{method.__name__}")
        job.is_in_call = True
        try:
            return method(self, *args, **kwargs)
        finally:
            job.is_in_call = False

    return called
