"""Runs, one or some at a time, each by `python -m hf_gpipe.train`; signals pass on, and all can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TextIO

import hf_gpipe
from hf_gpipe.errors import UserError
from translation_scaling.keep import bring_back, keep
from translation_scaling.runs import LOG_FILE, METRICS_FILE, STARTS_FILE, Run, folder_of, wall_seconds

TRAIN = (sys.executable, "-m", "hf_gpipe.train")
EXIT_FAILED = 1
"""Of this script's command: a run failed."""

EXIT_STOPPED = 75
"""Of the training command: a signal stopped it, and all of it is saved."""

_POLL_SECONDS, _KEEP_SECONDS = 0.5, 60.0


class Signals:
    """Passes SIGINT, SIGTERM and SIGHUP on to the trainings, as SIGINT and SIGTERM, and remembers that one came."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Signals:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # What nohup ignores stays ignored.
        taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._receive) for number in taken}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def passed_to(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Context manager that passes the signals on to the child."""
        self._children.append(child)
        if self.received is not None:
            self._receive(self.received)
        try:
            yield
        finally:
            self._children.remove(child)

    def _receive(self, number: int, frame: FrameType | None = None) -> None:
        self.received = number
        for child in list(self._children):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)


def execute(runs: Sequence[Run], kept: Path | None = None, at_once: int = 1) -> int:
    """Run what is not finished, until a run fails or a signal comes.

    Args:
        runs: in this order; one whose learning rate is swept begins once its sweep is finished.
        kept: a folder for copies of their checkpoints and curves, from which a run goes on if its own folder has less.
        at_once: how many are trained at a time. After a failure those under way go on, and no other begins.

    Returns:
        0: all are finished; 1: a run failed; EXIT_STOPPED: a signal came, the same command goes on.
    """
    with Signals() as signals, ThreadPoolExecutor(at_once) as pool:
        work = _Work(runs, kept, signals)
        codes = [future.result() for future in [pool.submit(work.go_on) for _ in range(at_once)]]
    return EXIT_STOPPED if EXIT_STOPPED in codes else max(codes)


class _Work:
    """The runs that are left, which several threads take one by one."""

    def __init__(self, runs: Sequence[Run], kept: Path | None, signals: Signals) -> None:
        self._waiting, self._kept, self._signals, self._count = list(enumerate(runs, 1)), kept, signals, len(runs)
        self._unfinished = {run.key for run in runs}
        self._changed, self._has_failed = threading.Condition(), False

    def go_on(self) -> int:
        """Train one run after the other; returns the command's exit code as far as these runs decide it."""
        code = EXIT_FAILED
        try:
            while (taken := self._take()) is not None:
                code = self._run(*taken)
                if code:
                    return code
                with self._changed:
                    self._unfinished.discard(taken[1].key)
                    self._changed.notify_all()
            code = 0
            return EXIT_STOPPED if self._signals.received else code
        finally:
            with self._changed:
                self._has_failed |= code != 0
                self._changed.notify_all()

    def _take(self) -> tuple[int, Run] | None:
        """The first run whose sweep is finished, with its number; None: no more is to be begun."""
        with self._changed:
            while self._waiting and not self._has_failed and not self._signals.received:
                for place, (_, run) in enumerate(self._waiting):
                    if not self._unfinished & {member.key for member in run.sweep}:
                        return self._waiting.pop(place)
                self._changed.wait(_POLL_SECONDS)
        return None

    def _run(self, number: int, run: Run) -> int:
        label, log, copy = f"[{number}/{self._count}] {run.title}: ", run.folder / LOG_FILE, None
        if self._kept is not None:
            copy = folder_of(self._kept, run.name, run.seed)
            bring_back(copy, run.folder)
        progress, detail = run.progress()
        if progress == "finished":
            print(f"{label}finished already, {result_text(run.folder)}", flush=True)
            return 0
        print(f"{label}{detail + '; ' if detail else ''}log {log}", flush=True)
        code, signals = 0, self._signals
        while code == 0 and not signals.received and (arguments := run.next_arguments()) is not None:
            code = _train(run, arguments, signals, copy)
            if not run.to_end:
                break
        if signals.received or code == EXIT_STOPPED:
            print(f"{label}stopped; the same command goes on from its last checkpoint", flush=True)
            return EXIT_STOPPED
        if code == 0:
            print(f"{label}{result_text(run.folder)}", flush=True)
            return 0
        text = "\n".join(f"    {line}" for line in log_end(log))
        print(
            f"{label}failed with exit code {code}\n\n{run.title} failed; its log {log} ends with\n\n{text}\n\n"
            "The other runs' results are kept. Correct the cause and give the same command again: it skips what is "
            "finished.",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_FAILED


def result_text(folder: Path) -> str:
    """A finished run in a few words."""
    metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    nll = metrics["nll_per_character"]
    return (
        f"NLL per character {'no number' if nll is None else f'{nll:.4f}'}, chrF {metrics['chrf']:.1f} "
        f"(copy {metrics['chrf_copy']:.1f}), {wall_seconds(folder):.0f} s"
    )


def log_end(path: Path, count: int = 15) -> list[str]:
    """The last lines of a log that say something."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if line.strip()][-count:]


def _train(run: Run, arguments: Sequence[str], signals: Signals, copy: Path | None) -> int:
    """One start of a run's command; its exit code."""
    run.folder.mkdir(parents=True, exist_ok=True)
    began, begin = datetime.now(UTC), time.perf_counter()
    copied = begin
    with (run.folder / LOG_FILE).open("a", encoding="utf-8") as log:
        # This start and its processes, which inherit the log, hold it.
        if not _locked(log):
            raise UserError(
                f"{run.title} is being trained already, by processes that write to {run.folder / LOG_FILE}; wait for "
                "them or end them, and give the command again"
            )
        log.write(f"\n{began:%Y-%m-%d %H:%M:%S} {' '.join([*TRAIN, *arguments])}\n")
        log.flush()
        child = start(arguments, log)
        with signals.passed_to(child):
            while (code := _exit_code(child)) is None:
                if copy is not None and time.perf_counter() - copied > _KEEP_SECONDS:
                    keep(run.folder, copy)
                    copied = time.perf_counter()
    entry = {
        "began": f"{began:%Y-%m-%dT%H:%M:%SZ}",
        "seconds": round(time.perf_counter() - begin, 1),
        "exit_code": code,
    }
    with (run.folder / STARTS_FILE).open("a") as file:
        file.write(json.dumps(entry) + "\n")
    if copy is not None:
        keep(run.folder, copy)
    return code


def _exit_code(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def start(arguments: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    """Start the training command, which writes to a log and imports the same hf_gpipe as this script.

    It has a session of its own: a terminal's Ctrl-C reaches it once, through this script, for a second one would end it
    without saving.
    """
    root = str(Path(hf_gpipe.__file__).parents[1])
    paths = dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [*TRAIN, *arguments]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def is_running(run: Run) -> bool:
    """Whether a training command of this run is under way on this machine."""
    path = run.folder / LOG_FILE
    if not path.exists():
        return False
    with path.open("a") as log:
        return not _locked(log)


def _locked(log: TextIO) -> bool:
    """Lock a log; False: other processes have locked it."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
