"""Stopping on request: on SIGTERM or SIGINT a training ends its step, saves, and ends, in all processes.

A signal only sets a flag. The processes agree on stopping where a step ends. Python runs a handler between two
of its own instructions, so never while a process waits in gloo or NCCL; the system's own handler writes the signal's
number into a pipe all the same, and a thread reads it there.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from contextlib import ExitStack, suppress

from hf_gpipe.errors import EXIT_FAILURE, EXIT_STOPPED
from hf_gpipe.job import failures
from hf_gpipe.job.failures import Failure
from hf_gpipe.job.job import Job
from hf_gpipe.job.signals import STOP_SIGNALS, StopSignal
from hf_gpipe.job.world import World


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

    Attributes:
        peers: the other processes of the pipeline that are on this machine, none of which may end before this one.
    """

    def __init__(self, world: World, within: float, *, is_on: bool = True) -> None:
        self.peers = [world.ranks[rank].pid for rank in world.neighbours if rank != world.rank]
        self._rank, self._stop, self._is_on = world.rank, StopSignal(within), is_on

    @property
    def signal(self) -> int:
        """The number of the signal that was sent; 0: no signal."""
        return self._stop.signal or 0

    def __enter__(self) -> StopRequest:
        self._stack = stack = ExitStack()
        if not self._is_on or threading.current_thread() is not threading.main_thread():
            return self
        self._signals, written = os.pipe()
        for end in (self._signals, written):
            os.set_blocking(end, False)
        thread = threading.Thread(target=self._watch, name="hf_gpipe-stop", daemon=True)
        thread.start()
        stack.callback(os.close, self._signals)
        stack.callback(thread.join)
        stack.callback(os.close, written)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(written, warn_on_full_buffer=False))
        for number in STOP_SIGNALS:
            # Python's handler does nothing, since the thread reads the number from the pipe.
            stack.callback(signal.signal, number, signal.signal(number, lambda number, frame: None))
        Job.current().in_forked_child.append(_behave_as_usual)
        stack.callback(Job.current().in_forked_child.remove, _behave_as_usual)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._signals], [], [], 0.25 if self.signal else None)
            numbers = os.read(self._signals, 64) if ready else b""
            if ready and not numbers:
                return  # the context was left
            for number in numbers:
                if number in STOP_SIGNALS:
                    self._stop.receive(number)
            if self._stop.is_urgent:
                self._end("a second one came")
            if self._stop.seconds > self._stop.within:
                self._end(f"its step did not end within {self._stop.within:g} seconds (training.stop_seconds)")
            if self.signal and any(map(_has_ended, self.peers)):
                # Whatever this process waits for will not come. The peer's own message says why it ended, unless it
                # ended because of this one, which still looks for advice.
                with suppress(Exception):
                    failures.tell_noted()
                os._exit(EXIT_FAILURE)

    def _end(self, why: str) -> None:
        name = signal.Signals(self.signal).name
        message = f"process {self._rank} was asked to stop by {name} and ended without saving, since {why}"
        failures.end(Failure(message, 128 + self.signal))


def _behave_as_usual() -> None:
    """Give signals their usual meaning in a forked process, such as a data loader's worker."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _has_ended(process: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
    return False
