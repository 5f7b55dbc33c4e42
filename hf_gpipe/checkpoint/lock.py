"""One run at a time writes into an output directory: its main process holds a lock on a file there.

The kernel drops the lock (flock) when the process ends, however it ends, so what a killed run leaves stops nobody on
the same machine. A network file system may not know the locks of other machines, or keep those of a machine that is
lost. So the owner also touches the file every few seconds. An owner on another machine that touches it no more is gone,
and where it comes back after all, it finds the file of another one and ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from hf_gpipe.errors import EXIT_USER_ERROR, CheckpointError, UserError
from hf_gpipe.job import failures
from hf_gpipe.job.facts import boot_id
from hf_gpipe.job.failures import Failure
from hf_gpipe.job.world import World

LOCK_FILE = ".hf_gpipe.lock"
#: How often the owner touches its file, and after how long without that an owner on another machine is gone.
BEAT_SECONDS, SILENT_SECONDS = 5.0, 30.0
#: How long a run that ends, or was killed, may still hold its lock.
ENDING_SECONDS = 5.0

_POLL_SECONDS = 0.1
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Owner:
    """The main process of a run.

    Attributes:
        host: the name of its machine.
        boot: tells machines of one name apart.
        process: its number there.
        start: when it took the lock.
        token: that no other owner has.
    """

    host: str = field(default_factory=socket.gethostname)
    boot: str = field(default_factory=boot_id)
    process: int = field(default_factory=os.getpid)
    start: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    token: str = field(default_factory=lambda: uuid4().hex)

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine, whose kernel then knows its lock."""
        return (self.boot or self.host) == (boot_id() or socket.gethostname())


#: The locks that this process holds.
_held: dict[Path, _Lock] = {}


@contextmanager
def owned(output_dir: Path, world: World) -> Iterator[None]:
    """Context manager in which no other run writes into `output_dir`. Every process enters it.

    In a process that has the directory already, such as a trainer's inside of the command's run, it does nothing.

    Raises:
        UserError: on every process: another run has the directory.
        CheckpointError: on every process: it cannot be written into.
    """
    taken: list[_Lock] = []

    def take() -> None:
        try:
            path = Path(os.path.realpath(output_dir)) / LOCK_FILE
            if path not in _held:
                taken.append(_Lock(path))
        except UserError:
            raise
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"cannot write into the directory {str(output_dir)!r}: {why}") from error

    try:
        # It takes long where the writer waits for an owner that is about to end.
        world.from_writer(take, takes_long=True)
        yield
    finally:
        for lock in taken:
            lock.release()


class _Lock:
    """The lock on a file, from its making to `release`. Raises OSError if the file cannot be written, or UserError."""

    def __init__(self, path: Path) -> None:
        self._path, self._owner = path, Owner()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _free(path)
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(asdict(self._owner)).encode(), 0)
            os.fsync(self._file)
        except OSError:
            os.close(self._file)
            raise
        _held[path] = self
        self._is_over = threading.Event()
        threading.Thread(target=self._beat, name="hf_gpipe-lock", daemon=True).start()

    def release(self) -> None:
        """Delete the file and let others have the directory."""
        self._is_over.set()
        if _held.pop(self._path, None) is not self:
            return  # in a forked child, of which it is not
        with suppress(OSError):
            if _read(self._path) == self._owner:
                self._path.unlink()
        os.close(self._file)

    def close_in_child(self) -> None:
        """A forked child, such as a data loader's worker, would keep the lock for as long as it runs."""
        os.close(self._file)

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            # A file system that does not answer now may do so at the next beat.
            with suppress(OSError):
                os.utime(self._file)
                other = _read(self._path)
                if other is not None and other != self._owner and not self._is_over.is_set():
                    self._end(other)

    def _end(self, other: Owner) -> None:
        """End this process: another run writes into its directory."""
        problem = (
            f"this run said nothing in its output directory {self._path.parent} for {SILENT_SECONDS:g} seconds, and "
            f"{_name(other)} has taken the directory over; end that one, or leave it to it"
        )
        failures.end(Failure(problem, EXIT_USER_ERROR))


def _free(path: Path) -> int:
    """Wait until no living owner has the lock on a file; returns the open file, locked.

    Raises:
        OSError: the file cannot be written.
        UserError: another run has it.
    """
    begin, has_told = time.monotonic(), False
    seen: tuple[Owner | None, int, float] | None = None  # the owner, when it touched the file, since when we know it
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        is_locked, is_mine = _lock(file), False
        try:
            owner, status, now = _read(path), os.fstat(file), time.monotonic()
            if seen is None or seen[0] != owner:
                seen = owner, status.st_mtime_ns, now
            is_silent = now - seen[2] > SILENT_SECONDS and status.st_mtime_ns == seen[1]
            is_other_machine_s = owner is not None and not owner.is_here
            if not _is_at(path, status):
                continue  # its owner has just deleted it
            if is_locked is not False and (owner is None or is_silent or (owner.is_here and is_locked)):
                is_mine = True
                return file
            if is_silent and is_other_machine_s:
                path.unlink()  # the lock of a lost machine outlives it on its server
                continue
            has_beaten = status.st_mtime_ns != seen[1]
            if now - begin > ENDING_SECONDS and (has_beaten or (is_locked is False and not is_other_machine_s)):
                raise UserError(
                    f"{path.parent} is the output directory of {_name(owner)}, which is under way; wait for its end, "
                    "stop it, or choose another output directory"
                )
        finally:
            if not is_mine:
                os.close(file)
        if (is_other_machine_s or is_locked is None) and not has_told:
            has_told = True
            print(
                f"{path.parent} was the output directory of {_name(owner)}: waiting up to {SILENT_SECONDS:g} seconds "
                "to see whether it is still there",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_POLL_SECONDS)


def _lock(file: int) -> bool | None:
    """Try to lock an open file; whether it is locked now. None: its file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(path: Path, status: os.stat_result) -> bool:
    """Whether an open file of this status is still the one at `path`."""
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def _read(path: Path) -> Owner | None:
    """The owner that is written in a file; None: nobody is. It is opened anew, for a network file system to look."""
    try:
        with path.open("rb") as file:
            noted = json.loads(file.read(_MOST_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    names = Owner.__dataclass_fields__
    if not isinstance(noted, dict) or noted.keys() != names.keys():
        return None
    kinds = {"process": int}
    if not all(isinstance(value, kinds.get(name, str)) for name, value in noted.items()):
        return None
    return Owner(**noted)


def _name(owner: Owner | None) -> str:
    if owner is None:
        return "another run"
    return f"the run of process {owner.process} on machine {owner.host}, since {owner.start}"


def _after_fork() -> None:
    for lock in _held.values():
        lock.close_in_child()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
