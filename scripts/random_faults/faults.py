"""The faults that are injected into a run: into its processes, its files, and its ports, at a moment that is drawn."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hf_gpipe.checkpoint.directory import checkpoints
from scripts import forked
from scripts.file_fuzz import mutate
from scripts.random_faults import peers
from scripts.random_faults.runs import (
    BY_HAND,
    LAUNCHES,
    NO_MEMORY_SIGNAL,
    RAISE_SIGNAL,
    STUCK_SIGNAL,
    TIMEOUT_SECONDS,
    TORCHRUN,
    Run,
)

DISK_BYTES = 2 * 2**20
#: mount(2)'s and unshare(2)'s flags: a name space of its own, all mounts in it private.
_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x20000, 0x4000, 0x40000


@dataclass
class Scene:
    """A run in which a fault happens.

    Attributes:
        run: that is struck.
        victim: the number of one of its processes.
        dice: of the case.
        second: another run, if the fault is one.
        stopped: processes that stay as they are until somebody ends them.
        tidy: undoes what a user would undo before the next start.
    """

    run: Run
    victim: int
    dice: random.Random
    second: Run | None = None
    stopped: list[int] = field(default_factory=list)
    tidy: list[Callable[[], object]] = field(default_factory=list)

    @property
    def worker(self) -> int:
        """The process that is struck; 0 where it has not started."""
        workers = self.run.workers()
        return workers[self.victim] if self.victim < len(workers) else 0


STUCK = "a process stuck"


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: for people.
        strike: does it.
        launches: in which kinds of launch it is tried.
        is_at_start: it is there before the run starts.
        survives: the run must go on to its end.
        prepare: what is done before the run starts, with the folder of the case and the output of a whole run.
        is_silent: nobody is left to tell a cause.
    """

    name: str
    strike: Callable[[Scene], None]
    launches: tuple[str, ...] = LAUNCHES
    is_at_start: bool = False
    survives: bool = False
    prepare: Callable[[Path, Path, random.Random], None] | None = None
    is_silent: bool = False


def _send(pid: int, number: int) -> None:
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _to_worker(number: int, scene: Scene) -> None:
    _send(scene.worker, number)
    if number == signal.SIGSTOP:
        scene.stopped.append(scene.worker)


def _get_stuck(scene: Scene) -> None:
    _send(scene.worker, STUCK_SIGNAL)
    if scene.run.launch == BY_HAND:
        scene.stopped.append(scene.worker)  # nobody is there to end it


def _to_launcher(number: int, scene: Scene) -> None:
    _send(scene.run.launcher.pid, number)
    if number == signal.SIGSTOP:
        scene.stopped.append(scene.run.launcher.pid)


def _to_all(number: int, scene: Scene) -> None:
    for pid in scene.run.workers() if number == signal.SIGKILL else scene.run.running():
        _send(pid, number)


def _pause(is_launcher: bool, scene: Scene) -> None:
    pid = scene.run.launcher.pid if is_launcher else scene.worker
    _send(pid, signal.SIGSTOP)
    time.sleep(TIMEOUT_SECONDS / 8)
    _send(pid, signal.SIGCONT)


def _limit(kind: int, limit: Callable[[int], int], scene: Scene) -> None:
    with suppress(ProcessLookupError):
        pid = scene.worker
        if pid:
            resource.prlimit(pid, kind, (limit(pid), resource.prlimit(pid, kind)[1]))


def _open_files(pid: int) -> int:
    try:
        return max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    except (OSError, ValueError):
        return 64


def _fill_disk(scene: Scene) -> None:
    ballast = scene.run.output / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    scene.tidy.append(ballast.unlink)


def _small_disk(output: Path, whole: Path, dice: random.Random) -> None:
    """A file system of its own for the output directory, seen by this process and its children alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None):
        raise OSError(ctypes.get_errno(), "no name space of mounts")
    output.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(output)], check=True)


def _damage_cache(output: Path, whole: Path, dice: random.Random) -> None:
    _damage_one(output.with_name("cache"), dice)


def _damage_checkpoint(output: Path, whole: Path, dice: random.Random) -> None:
    """A run that has ended after some checkpoints, the newest of which is damaged."""
    shutil.copytree(whole, output)
    every = checkpoints(output)
    keep = dice.randrange(2, len(every) + 1)
    for newer in every[keep:]:
        shutil.rmtree(newer)
    for file in [*output.glob("*.safetensors"), *output.glob("metrics.json"), *output.glob("hf_gpipe_digests.json")]:
        file.unlink()
    _damage_one(every[keep - 1], dice)


def _damage_one(folder: Path, dice: random.Random) -> None:
    file = dice.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))
    before = file.read_bytes()
    changed = before
    while changed == before:
        changed = dice.choice((b"", before[: len(before) // 2], mutate.in_bytes(before, dice)))
    file.write_bytes(changed)


def _nothing(scene: Scene) -> None:
    """It is there from the start."""


def _meddle(scene: Scene) -> None:
    port = scene.run.port_of_store()
    if port:
        forked.Forked(partial(peers.meddle, port, scene.dice), scene.run.folder / "peer").wait(20.0)


def _same_directory(scene: Scene) -> None:
    run = scene.run
    scene.second = Run(run.launch, run.recipe, run.folder.with_name("second"), run.output)


def _same_port(scene: Scene) -> None:
    run = scene.run
    output = run.output.with_name("other") / "out"
    output.parent.mkdir()
    scene.second = Run(run.launch, run.recipe, run.folder.with_name("second"), output, port=run.port)


FAULTS = (
    *(
        Fault(f"{signal.Signals(number).name} to a process", partial(_to_worker, number))
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGSTOP)
    ),
    *(
        Fault(f"{signal.Signals(number).name} to the launcher", partial(_to_launcher, number), is_silent=is_silent)
        for number, is_silent in (
            (signal.SIGKILL, True),
            (signal.SIGTERM, False),
            (signal.SIGINT, False),
            (signal.SIGSTOP, False),
        )
    ),
    Fault("SIGKILL to all processes", partial(_to_all, signal.SIGKILL)),
    Fault("SIGTERM to all and the launcher", partial(_to_all, signal.SIGTERM)),
    Fault("a process stopped for a moment", partial(_pause, False), survives=True),
    Fault("the launcher stopped for a moment", partial(_pause, True), survives=True),
    Fault("an exception", partial(_to_worker, RAISE_SIGNAL)),
    Fault("out of memory", partial(_to_worker, NO_MEMORY_SIGNAL)),
    Fault(STUCK, _get_stuck),
    Fault("files limited to 4 KiB", partial(_limit, resource.RLIMIT_FSIZE, lambda pid: 4096)),
    Fault("no more open files", partial(_limit, resource.RLIMIT_NOFILE, _open_files)),
    Fault("a full disk", _fill_disk, prepare=_small_disk),
    Fault("a damaged cache", _nothing, (LAUNCHES[0], TORCHRUN), True, True, _damage_cache),
    Fault("a damaged newest checkpoint", _nothing, LAUNCHES, True, True, _damage_checkpoint),
    Fault("garbage to open ports", lambda scene: peers.send_garbage(scene.run.running(), scene.dice), survives=True),
    Fault("a flood of connections", lambda scene: peers.flood(scene.run.running()), survives=True),
    Fault("an uninvited peer in the store", _meddle),
    Fault("two runs in one directory", _same_directory, survives=True),
    Fault("two runs with one MASTER_PORT", _same_port, (TORCHRUN, BY_HAND), survives=True),
)
