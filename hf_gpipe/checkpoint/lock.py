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
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from typing_extensions import TypedDict

from hf_gpipe import strict_json
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


class Owner(TypedDict):
    """The main process of a run, as its file names it: no two have the same token."""

    host: str
    boot: str
    process: int
    start: str
    token: str


#: The open file of each lock that this process holds. A forked child, such as a data loader's worker, holds none.
_held: dict[Path, int] = {}


@contextmanager
def owned(output_dir: Path, world: World) -> Iterator[None]:
    """Context manager in which no other run writes into `output_dir`. Every process enters it.

    In a process that has the directory already, such as a trainer's inside of the command's run, it does nothing.

    Raises:
        UserError: on every process: another run has the directory.
        CheckpointError: on every process: it cannot be written into.
    """
    with ExitStack() as stack:

        def take() -> None:
            try:
                path = Path(os.path.realpath(output_dir)) / LOCK_FILE
                if path not in _held:
                    stack.enter_context(_locked(path))
            except UserError:
                raise
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", error)
                raise CheckpointError(f"cannot write into the directory {str(output_dir)!r}: {why}") from error

        # It takes long where the main process waits for an owner that is about to end.
        world.from_main(take, takes_long=True)
        yield


def this_process() -> Owner:
    """This process as an owner, from now on."""
    start = datetime.now().astimezone().isoformat(timespec="seconds")
    return Owner(host=socket.gethostname(), boot=boot_id(), process=os.getpid(), start=start, token=uuid4().hex)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context manager with the lock on a file. Raises OSError if the file cannot be written, or UserError."""
    owner, is_over = this_process(), threading.Event()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _held[path] = _free(path)

    def beat() -> None:
        while not is_over.wait(BEAT_SECONDS):
            # A file system that does not answer now may do so at the next beat.
            with suppress(OSError):
                os.utime(file)
                other = _read(path)
                if other not in (None, owner) and not is_over.is_set():
                    why = f"and {_name(other)} has taken the directory over; end that one, or leave it to it"
                    run = f"this run said nothing in its output directory {path.parent} for {SILENT_SECONDS:g} seconds"
                    failures.end(Failure(f"{run}, {why}", EXIT_USER_ERROR))

    try:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(owner).encode(), 0)
        os.fsync(file)
        threading.Thread(target=beat, name="hf_gpipe-lock", daemon=True).start()
        yield
    finally:
        is_over.set()
        if _held.pop(path, None) is not None:  # not in a forked child
            with suppress(OSError):
                if _read(path) == owner:
                    path.unlink()
            os.close(file)


def _free(path: Path) -> int:
    """Wait until no living owner has the lock on a file; returns the open file, locked.

    Raises:
        OSError: the file cannot be written.
        UserError: another run has it.
    """
    begin = time.monotonic()
    seen: tuple[Owner | None, int, float] = this_process(), 0, 0.0
    while True:
        with ExitStack() as stack:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, file)
            is_locked, owner, status, now = _lock(file), _read(path), os.fstat(file), time.monotonic()
            if is_new := owner != seen[0]:
                seen = owner, status.st_mtime_ns, now  # the owner, its last touch, since when this process knows it
            has_beaten = status.st_mtime_ns != seen[1]
            is_silent = not has_beaten and now - seen[2] > SILENT_SECONDS
            # The kernel knows the locks of this machine's processes. `boot` tells machines of one name apart.
            is_here = owner is not None and (owner["boot"] or owner["host"]) == (boot_id() or socket.gethostname())
            is_elsewhere = owner is not None and not is_here
            if not _is_at(path, status):
                continue  # its owner has just deleted it
            if is_locked is not False and (owner is None or is_silent or (is_here and is_locked)):
                stack.pop_all()
                return file
            if is_silent and is_elsewhere:
                path.unlink()  # the lock of a lost machine outlives it on its server
                continue
        if now - begin > ENDING_SECONDS and (has_beaten or (is_locked is False and not is_elsewhere)):
            rest = "which is under way; wait for its end, stop it, or choose another output directory"
            raise UserError(f"{path.parent} is the output directory of {_name(owner)}, {rest}")
        if is_new and (is_elsewhere or is_locked is None):
            wait = f"waiting up to {SILENT_SECONDS:g} seconds to see whether it is still there"
            print(f"{path.parent} was the output directory of {_name(owner)}: {wait}", file=sys.stderr, flush=True)
        time.sleep(0.1)


def _lock(file: int) -> bool | None:
    """Try to lock an open file; whether it is locked now. None: its file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    return True


def _is_at(path: Path, status: os.stat_result) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), status)
    return False


def _read(path: Path) -> Owner | None:
    """The owner that is written in a file; None: nobody is. It is opened anew, for a network file system to look."""
    owner: Owner | None = None
    with suppress(FileNotFoundError, CheckpointError), path.open("rb") as file:
        owner = strict_json.parse(file.read(4096), LOCK_FILE, Owner)
    return owner


def _name(owner: Owner | None) -> str:
    if owner is None:
        return "another run"
    return f"the run of process {owner['process']} on machine {owner['host']}, since {owner['start']}"


def _after_fork() -> None:
    """A child would keep the locks for as long as it runs."""
    while _held:
        os.close(_held.popitem()[1])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
