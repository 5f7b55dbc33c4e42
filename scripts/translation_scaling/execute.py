"""Runs, one or some at a time, each by `python -m hf_gpipe.train`; signals pass on, and all can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import hf_gpipe
from hf_gpipe.errors import UserError
from translation_scaling.keep import bring_back, keep
from translation_scaling.runs import LOG_FILE, METRICS_FILE, STARTS_FILE, Run, folder_of
from translation_scaling.signals import Signals

TRAIN = (sys.executable, "-m", "hf_gpipe.train")

EXIT_FAILED = 1
"""Of this script's command: a run failed."""

EXIT_STOPPED = 75
"""Of the training command: a signal stopped it, and all of it is saved."""

EXIT_USER_ERROR = 2
"""Of the same: the recipe or its data are wrong, and nothing was trained."""

_LOG_LINES = 15
_POLL_SECONDS = 0.5
_KEEP_SECONDS = 60.0


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
        work = _Work(runs, kept, signals, writes_over=at_once == 1)
        codes = [one.result() for one in [pool.submit(work.go_on) for _ in range(at_once)]]
    return EXIT_STOPPED if EXIT_STOPPED in codes else max(codes)


class _Work:
    """The runs that are left, which several threads take one by one."""

    def __init__(self, runs: Sequence[Run], kept: Path | None, signals: Signals, *, writes_over: bool) -> None:
        self._waiting, self._kept, self._signals = list(enumerate(runs, 1)), kept, signals
        self._writes_over, self._count = writes_over, len(runs)
        self._unfinished = {(run.name, run.seed) for run in runs}
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
                    self._unfinished.discard((taken[1].name, taken[1].seed))
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
                    if not self._unfinished & {(one.name, one.seed) for one in run.sweep}:
                        return self._waiting.pop(place)
                self._changed.wait(_POLL_SECONDS)
        return None

    def _run(self, number: int, run: Run) -> int:
        copy = None if self._kept is None else folder_of(self._kept, run.name, run.seed)
        if copy is not None:
            bring_back(copy, run.folder)
        progress, detail = run.progress()
        label = f"[{number}/{self._count}] {run.title}"
        if progress == "finished":
            print(f"{label}: finished already, {result_text(run.folder)}", flush=True)
            return 0
        detail = f"{detail + '; ' if detail else ''}log {run.folder / LOG_FILE}"
        line = _Line(label, detail) if self._writes_over else _Lines(label, detail)
        code, signals = 0, self._signals
        while code == 0 and not signals.received and (arguments := run.next_arguments()) is not None:
            code = _train(run, arguments, signals, line, copy)
            if not run.to_end:
                break
        if code == 0 and not signals.received:
            line.end(result_text(run.folder))
            return 0
        if signals.received or code == EXIT_STOPPED:
            line.end("stopped; the same command goes on from its last checkpoint")
            return EXIT_STOPPED
        line.end(f"failed with exit code {code}")
        lines = [
            f"\n{run.title} failed; its log {run.folder / LOG_FILE} ends with\n",
            *(f"    {text}" for text in log_end(run.folder / LOG_FILE)),
            "\nThe other runs' results are kept. Correct the cause and give the same command again: it skips what is "
            "finished.",
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        return EXIT_FAILED


def result_text(folder: Path) -> str:
    """A finished run in a few words."""
    metrics = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    nll = metrics["nll_per_character"]
    return (
        f"NLL per character {'no number' if nll is None else f'{nll:.4f}'}, chrF {metrics['chrf']:.1f} "
        f"(copy {metrics['chrf_copy']:.1f}), {wall_seconds(folder):.0f} s"
    )


def starts(folder: Path) -> list[dict[str, float]]:
    """Each start of a run's command: when, how many seconds it took, and its exit code."""
    path = folder / STARTS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wall_seconds(folder: Path) -> float:
    """Of all starts of a run's command, imports and evaluation included, but for those that were refused."""
    return sum(one["seconds"] for one in starts(folder) if one["exit_code"] != EXIT_USER_ERROR)


def log_end(path: Path, count: int = _LOG_LINES) -> list[str]:
    """The last lines of a log that say something."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return [line for line in lines if line.strip()][-count:]


def _train(run: Run, arguments: Sequence[str], signals: Signals, line: _Line | _Lines, copy: Path | None) -> int:
    """One start of a run's command; its exit code."""
    run.folder.mkdir(parents=True, exist_ok=True)
    began, begin = datetime.now(UTC), time.perf_counter()
    copied = begin
    with (run.folder / LOG_FILE).open("a", encoding="utf-8") as log:
        _hold(log, run)
        log.write(f"\n{began:%Y-%m-%d %H:%M:%S} {' '.join([*TRAIN, *arguments])}\n")
        log.flush()
        child = start(arguments, log)
        with signals.passed_to(child):
            while True:
                try:
                    code = child.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    line.show(_progress(run.folder))
                    if copy is not None and time.perf_counter() - copied > _KEEP_SECONDS:
                        keep(run.folder, copy)
                        copied = time.perf_counter()
    seconds = time.perf_counter() - begin
    with (run.folder / STARTS_FILE).open("a") as file:
        entry = {"began": f"{began:%Y-%m-%dT%H:%M:%SZ}", "seconds": round(seconds, 1), "exit_code": code}
        file.write(json.dumps(entry) + "\n")
    if copy is not None:
        keep(run.folder, copy)
    return code


def start(arguments: Sequence[str], log: TextIO) -> subprocess.Popen[bytes]:
    """Start the training command, which writes to a log.

    It has a session of its own: a terminal's Ctrl-C reaches it once, through this script, for a second one would end it
    without saving.
    """
    command = [*TRAIN, *arguments]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True)


def is_running(run: Run) -> bool:
    """Whether a training command of this run is under way on this machine."""
    path = run.folder / LOG_FILE
    if not path.exists():
        return False
    with path.open("a") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _hold(log: TextIO, run: Run) -> None:
    """Lock the log for this start and for its processes, which inherit it. Raises UserError where it is locked."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{run.title} is being trained already, by processes that write to {run.folder / LOG_FILE}; wait for them "
            "or end them, and give the command again"
        ) from error


def environment() -> dict[str, str]:
    """Of a training: it imports the same hf_gpipe as this script."""
    root = str(Path(hf_gpipe.__file__).parents[1])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *others])}


def _progress(folder: Path) -> str:
    """The last line of the metrics, in a few words."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return ""
    for text in reversed(path.read_text().splitlines()):
        try:
            entry = json.loads(text)
        except ValueError:
            continue
        if "loss" in entry:
            return f"step {entry['step']}, loss {entry['loss']:.3f}"
    return ""


class _Line:
    """The line of one run: what goes on stands at its end, where the terminal can be written over."""

    def __init__(self, label: str, detail: str) -> None:
        self._text, self._start, self._width = f"{label}: {detail}", time.perf_counter(), 0
        self._is_terminal = sys.stdout.isatty()
        print(self._text, end="" if self._is_terminal else ": ", flush=True)

    def show(self, what: str) -> None:
        if self._is_terminal and what:
            self._write(f"{what}, {time.perf_counter() - self._start:.0f} s")

    def end(self, what: str) -> None:
        if self._is_terminal:
            self._write(what)
            print(flush=True)
        else:
            print(what, flush=True)

    def _write(self, what: str) -> None:
        text = f"{self._text}: {what}"
        print("\r" + text.ljust(self._width), end="", flush=True)
        self._width = len(text)


class _Lines:
    """The first and the last line of one run of several at a time."""

    def __init__(self, label: str, detail: str) -> None:
        self._label = label
        self.end(detail)

    def show(self, what: str) -> None:
        """Nothing: `--status` says how far each run is."""

    def end(self, what: str) -> None:
        print(f"{self._label}: {what}", flush=True)
