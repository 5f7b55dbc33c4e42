"""The job that this process is part of: its groups, how long they wait, and a note of its current work.

torch.distributed has one default group and a signal has one handler, so a process is in one job at a time. Its state is
one object, `Job.current()`; other modules hold none of it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import torch.distributed as dist

from hf_gpipe.job import facts
from hf_gpipe.job.facts import RankFacts
from hf_gpipe.job.liveness import Liveness
from hf_gpipe.job.store import signed
from hf_gpipe.libraries.torch import default_store, timeout_of

Item = TypeVar("Item")

#: Set for the processes that our own launcher starts: it prints their failures.
LAUNCHER_PID = "HF_GPIPE_LAUNCHER_PID"
#: Names the file in which a process notes its current work; its launcher can read it even after SIGKILL.
WORK_VARIABLE = "HF_GPIPE_WORK_FILE"
#: On this signal a process writes the stack of its main thread to the file that STACK_VARIABLE names.
STACK_SIGNAL = signal.SIGUSR1
STACK_VARIABLE = "HF_GPIPE_STACK_FILE"
#: The first line of that file in a job with NCCL, followed by its time limit in seconds.
NCCL_LIMIT = "NCCL's time limit in seconds: "

#: What a process notes that waits for the others at the end.
ENDING = "waiting for all processes to end"
#: How many times the limit of a message a process may come to its end after the others, as long as it says that it is
#: there: one that does not is noticed after little more than one.
_END_LIMITS = 4
#: The time limit of the groups in which processes wait for work: a process that is lost is noticed by its beats.
_NO_LIMIT = timedelta(days=365)

#: Seconds in which a thread of gloo's surely drops the last message.
LAST_MESSAGE_SECONDS = 0.05

#: A note has this size, so that one write replaces the note before it completely.
_NOTE_BYTES = 120


class Job:
    """State of this process as a member of a job.

    Attributes:
        timeout: how long a process waits for another one; None: as long as in the user's own default group.
        start: name of this start of the job's processes; empty before they have met.
        work: a short description of this process's current work; empty if nothing was noted.
        in_forked_child: functions that a forked child of this process calls first, such as a data loader's worker.
        calls: what job/calls.py knows of the calls that every process must make; None before the first.
        is_in_call: whether this process is in such a call.
        liveness: in the store at which the processes meet; None: they have not met, or have not yet waited.
        failure: what `failures.note` has noted of this process; None: nothing.
        is_failing: whether this process has told why it fails, or tells it now.
        reading_since: since when this process reads a mini-batch, by `time.monotonic`; None: it does not.
        store: that of the start; None: the processes have not met by their launcher's word.
        parent: the launcher's number; None: this process does not end with it.
    """

    apart: ClassVar[timedelta] = timedelta(minutes=5)
    """How far apart processes may start, as on machines that read their programs over a network, and end, as when the
    main process draws and plans. It is more where the time limit of messages is longer."""

    _current: ClassVar[Job | None] = None

    def __init__(self) -> None:
        self.timeout: timedelta | None = None
        self.start = ""
        self.work = ""
        self.in_forked_child: list[Callable[[], None]] = []
        self.calls: Any = None
        self.is_in_call = False
        self.liveness: Liveness | None = None
        self.failure: Any = None
        self.is_failing = False
        self.reading_since: float | None = None
        self.store: dist.Store | None = None
        self.parent: int | None = None
        self._world: dist.ProcessGroup | None = None
        self._ranks: tuple[RankFacts, ...] = ()
        self._common_groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        self._work_files: dict[str, int] = {}
        self._num_groups = 0
        self._abort_file: int | None = None

    @classmethod
    def current(cls) -> Job:
        """Return the job of this process; before it has joined one, it has torch's defaults."""
        if cls._current is None:
            cls._current = cls()
        return cls._current

    @property
    def limit(self) -> timedelta:
        """How long a process waits for a message of another one."""
        return self.timeout or _timeout_of_default_group()

    # ------------------------------------------------------------------ the processes

    def met(self, ranks: tuple[RankFacts, ...]) -> None:
        """Note that the processes of the default group have told their facts."""
        self._follow_default_group()
        self._ranks = ranks

    def ranks(self) -> tuple[RankFacts, ...]:
        """The facts of all processes of the default group, by rank.

        They are told when the processes meet; in a process group that was there before, the first call tells them,
        which every process makes.
        """
        self._follow_default_group()
        if not self._ranks:
            store, limit = signed(self.store_of_group(), "group"), max(self.apart, self.limit)
            self._ranks = facts.exchange(store, dist.get_rank(), dist.get_world_size(), limit, "hf_gpipe/started")
        return self._ranks

    def store_of_group(self) -> dist.Store:
        """The store of the default group, without what was written for an earlier one, since torchrun's goes on."""
        self._follow_default_group()
        return dist.PrefixStore(f"hf_gpipe/group/{self._num_groups}", default_store())

    def _follow_default_group(self) -> None:
        """Forget what belongs to a default group that the user has ended, before joining another."""
        if self._world is not dist.group.WORLD:
            self._world, self._common_groups, self._ranks = dist.group.WORLD, {}, ()
            self._num_groups += self._world is not None
            if self.liveness is not None:
                self.liveness.stop()
                self.liveness = None

    def leave(self) -> None:
        """Leave the job at the end, once every process is here."""
        if not dist.is_initialized():
            return
        self.note(ENDING)
        if dist.get_world_size() > 1:
            longest = max(self.apart, _END_LIMITS * self.limit)
            self.wait_for_all("all processes to come to their end", longest.total_seconds())
        self._world = None
        self._follow_default_group()
        dist.destroy_process_group()
        self.store = None  # torch's groups had it

    def wait_for_all(self, what: str, longest: float = math.inf, thread: str = "") -> None:
        """Wait until every process calls this, for as long as all say that they are there (`Liveness.wait`)."""
        if self.liveness is None:
            self.liveness = Liveness(self.store_of_group(), dist.get_rank(), dist.get_world_size(), self.limit)
        self.liveness.wait(lambda: dist.barrier(group=self.waiting_group(thread)), what, longest, thread)

    def waiting_group(self, thread: str = "") -> dist.ProcessGroup:
        """The group of `wait_for_all`. Made while all are here, it shows one that waits the end of another."""
        return self.common_group("gloo", f"waiting {thread}", _NO_LIMIT)

    # ------------------------------------------------------------------ groups

    def new_group(self, ranks: Sequence[int], backend: str, limit: timedelta | None = None) -> dist.ProcessGroup:
        """Create a group of some processes with the job's time limit; torch's own default is 30 minutes."""
        if backend == "nccl":
            self.note_abort(self.limit)
        _wait_at_exit()
        return dist.new_group(list(ranks), timeout=limit or self.limit, backend=backend)

    def common_group(self, backend: str, thread: str = "", limit: timedelta | None = None) -> dist.ProcessGroup:
        """Our group of all processes on this backend. The first call, which every process makes, creates it.

        Args:
            backend: of torch.distributed.
            thread: whose messages it is for; threads must not send in one group at the same time.
            limit: of its messages, in place of the job's.
        """
        self._follow_default_group()
        key = backend, thread
        if key not in self._common_groups:
            self._common_groups[key] = self.new_group(range(dist.get_world_size()), backend, limit)
        return self._common_groups[key]

    def note_abort(self, limit: timedelta) -> None:
        """Note for the launcher the time limit of NCCL, and the stack of every thread if this process is aborted.

        NCCL's watchdog, a thread of torch's, ends a process by SIGABRT when a message does not come in time: no
        exception is raised that could be reported.
        """
        path = os.environ.get(STACK_VARIABLE)
        if path is None or self._abort_file is not None:
            return
        self._abort_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(self._abort_file, f"{NCCL_LIMIT}{limit.total_seconds():g}\n".encode())
        faulthandler.enable(file=self._abort_file)

    # ------------------------------------------------------------------ current work

    def note(self, work: str) -> None:
        """Note the current work of this process. It costs one system call of about a microsecond."""
        self.work = work
        path = os.environ.get(WORK_VARIABLE)
        if path is None:
            return
        with contextlib.suppress(OSError):
            if path not in self._work_files:
                self._work_files[path] = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.pwrite(self._work_files[path], work.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES), 0)

    @contextmanager
    def during(self, work: str) -> Iterator[None]:
        """Context manager in which this process does `work`. After an exception the note stays, for the report."""
        before = self.work
        self.note(work)
        yield
        self.note(before)

    def noting(self, items: Iterator[Item], work: str) -> Iterator[Item]:
        """Yield the same items of a dataset; `work` is noted while one is read, and since when it is."""
        end = object()
        while True:
            self.reading_since = time.monotonic()
            try:
                with self.during(work):
                    item = next(items, end)
            finally:
                self.reading_since = None
            if item is end:
                return
            yield cast(Item, item)


def _timeout_of_default_group() -> timedelta:
    """The time limit of the default group, which torch does not give to later groups; torch's own if it has none."""
    world = dist.group.WORLD
    assert world is not None, "there is a default group"
    try:
        return timeout_of(world)
    except (AttributeError, RuntimeError):
        return dist.default_pg_timeout


def in_job() -> bool:
    """Whether a launcher started this process as one of several."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def available_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_note(path: Path) -> str:
    """The work that a process noted in `path`; empty where there is no such file."""
    try:
        return path.read_bytes().decode(errors="replace").strip()
    except OSError:
        return ""


@cache
def _wait_at_exit() -> None:
    """Let the interpreter wait for a moment before it ends.

    A thread of gloo's that drops a tensor while the interpreter ends is aborted by it, and with it the process, which
    had done all its work ("terminate called without an active exception", pytorch issue 190489).
    """
    atexit.register(time.sleep, LAST_MESSAGE_SECONDS)


def _after_fork() -> None:
    job = Job.current()
    while job.in_forked_child:
        job.in_forked_child.pop()()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
