"""Stopping on request: on SIGTERM or SIGINT a training ends its step, saves, and ends, in all processes.

A signal only sets a flag. The processes agree on stopping where a step ends. Python runs a handler between two
of its own instructions, so never while a process waits in gloo or NCCL; the system's own handler writes the signal's
number into a pipe all the same, and a thread reads it there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

from hf_gpipe.errors import EXIT_FAILURE, EXIT_STOPPED
from hf_gpipe.job import failures
from hf_gpipe.job.failures import Failure
from hf_gpipe.job.job import Job
from hf_gpipe.job.signals import STOP_SIGNALS, StopSignal
from hf_gpipe.job.world import World

if TYPE_CHECKING:
    from hf_gpipe.training.arguments import PipelineTrainingArguments

_POLL_SECONDS = 0.25


class TrainingStopped(SystemExit):
    """Ends the program after a training was stopped and saved, with exit code 75: start it again to go on.

    A script that has something to do before its end may catch this exception.

    Attributes:
        step: the number of updates that were made.
        checkpoint: the directory in which everything is saved.
    """

    def __init__(self, step: int, checkpoint: os.PathLike[str]) -> None:
        super().__init__(EXIT_STOPPED)
        self.step = step
        self.checkpoint = checkpoint


class StopRequest:
    """Context manager in which SIGTERM and SIGINT ask the training to stop instead of ending this process, if `is_on`.

    The process still ends at once, without saving, on a second signal, where the step does not end within
    `within` seconds, and where another process of this machine has ended meanwhile. Python handles signals in the main
    thread only: in another thread, the context manager changes nothing.
    """

    def __init__(self, world: World, within: float, *, is_on: bool = True) -> None:
        #: The other processes of the pipeline that are on this machine.
        self._peers = [world.ranks[rank].pid for rank in world.neighbours if rank != world.rank]
        self._rank = world.rank
        self._stop = StopSignal(within)
        self._is_on = is_on

    @classmethod
    def of(cls, args: PipelineTrainingArguments, world: World) -> StopRequest:
        """Make the request that the arguments of a trainer ask for."""
        return cls(world, args.stop_seconds, is_on=args.enable_jit_checkpoint)

    @property
    def within(self) -> float:
        """The seconds that this process waits for a step, or for another process that writes."""
        return self._stop.within

    @property
    def signal(self) -> int:
        """The number of the signal that was sent; 0: no signal."""
        return self._stop.signal or 0

    def __enter__(self) -> StopRequest:
        self._is_active = self._is_on and threading.current_thread() is threading.main_thread()
        if not self._is_active:
            return self
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._handlers: dict[int, Any] = {number: signal.signal(number, _leave_to_thread) for number in STOP_SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="hf_gpipe-stop", daemon=True)
        self._thread.start()
        Job.current().in_forked_child.append(self._forget_in_child)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._is_active:
            return
        Job.current().in_forked_child.remove(self._forget_in_child)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])

    def forget_peers(self) -> None:
        """Let the other processes end before this one from now on, since all is saved."""
        self._peers = []

    def _forget_in_child(self) -> None:
        """Give signals their usual meaning in a forked process, such as a data loader's worker."""
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._pipe[0]], [], [], _POLL_SECONDS if self.signal else None)
            numbers = os.read(self._pipe[0], 64) if ready else b""
            if ready and not numbers:
                return  # the context was left
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._stop.receive(number)
            if self._stop.is_urgent:
                self._end("a second one came")
            if self._stop.seconds > self._stop.within:
                self._end(f"its step did not end within {self._stop.within:g} seconds (training.stop_seconds)")
            if self.signal and any(not _is_running(peer) for peer in self._peers):
                # Whatever this process waits for will not come. The peer's own message says why it ended, unless it
                # ended because of this one, which still looks for advice.
                with contextlib.suppress(Exception):
                    failures.tell_noted()
                os._exit(EXIT_FAILURE)

    def _end(self, why: str) -> None:
        name = signal.Signals(self.signal).name
        message = f"process {self._rank} was asked to stop by {name} and ended without saving, since {why}"
        failures.end(Failure(message, 128 + self.signal))


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing in Python's handler, since the thread reads the signal's number from the pipe."""


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
