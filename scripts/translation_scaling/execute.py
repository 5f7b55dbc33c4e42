"""Runs one after the other, each by `python -m hf_gpipe.train`; signals pass on, and all can be resumed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TextIO

import hf_gpipe
from hf_gpipe.errors import UserError
from translation_scaling.keep import bring_back, keep
from translation_scaling.runs import LOG_FILE, METRICS_FILE, STARTS_FILE, Run, folder_of

TRAIN = (sys.executable, "-m", "hf_gpipe.train")

EXIT_STOPPED = 75
"""Of the training command: a signal stopped it, and all of it is saved."""

EXIT_USER_ERROR = 2
"""Of the same: the recipe or its data are wrong, and nothing was trained."""

_LOG_LINES = 15
_POLL_SECONDS = 0.5
_KEEP_SECONDS = 60.0


def execute(runs: Sequence[Run], kept: Path | None = None) -> int:
    """Run what is not finished, up to the first run that fails or until a signal.

    Args:
        runs: in this order.
        kept: a folder for copies of their checkpoints and curves, from which a run goes on if its own folder has less.

    Returns:
        0: all are finished; 1: a run failed; EXIT_STOPPED: a signal came, the same command goes on.
    """
    with _Signals() as signals:
        for number, run in enumerate(runs, 1):
            copy = None if kept is None else folder_of(kept, run.name, run.seed)
            if copy is not None:
                bring_back(copy, run.folder)
            progress, detail = run.progress()
            label = f"[{number}/{len(runs)}] {run.title}"
            if progress == "finished":
                print(f"{label}: finished already, {result_text(run.folder)}", flush=True)
                continue
            if signals.received:
                return EXIT_STOPPED
            line = _Line(f"{label}: {detail + '; ' if detail else ''}log {run.folder / LOG_FILE}")
            code = 0
            while code == 0 and not signals.received and (arguments := run.next_arguments()) is not None:
                code = _train(run, arguments, signals, line, copy)
                if not run.to_end:
                    break
            if code == 0 and not signals.received:
                line.end(result_text(run.folder))
            elif signals.received or code == EXIT_STOPPED:
                line.end("stopped; the same command goes on from its last checkpoint")
                return EXIT_STOPPED
            else:
                line.end(f"failed with exit code {code}")
                print(f"\n{run.title} failed; its log {run.folder / LOG_FILE} ends with\n", file=sys.stderr)
                print("\n".join(f"    {text}" for text in log_end(run.folder / LOG_FILE)), file=sys.stderr)
                print(
                    "\nThe other runs' results are kept. Correct the cause and give the same command again: it skips "
                    "what is finished.",
                    file=sys.stderr,
                    flush=True,
                )
                return 1
    return 0


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


def _train(run: Run, arguments: Sequence[str], signals: _Signals, line: _Line, copy: Path | None) -> int:
    """One start of a run's command; its exit code."""
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [*TRAIN, *arguments]
    began, start = datetime.now(UTC), time.perf_counter()
    copied = start
    with (run.folder / LOG_FILE).open("a", encoding="utf-8") as log:
        _hold(log, run)
        log.write(f"\n{began:%Y-%m-%d %H:%M:%S} {' '.join(command)}\n")
        log.flush()
        # A session of its own: a terminal's Ctrl-C reaches it once, through this script, for a second one would end it
        # without saving.
        child = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
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
    seconds = time.perf_counter() - start
    with (run.folder / STARTS_FILE).open("a") as file:
        entry = {"began": f"{began:%Y-%m-%dT%H:%M:%SZ}", "seconds": round(seconds, 1), "exit_code": code}
        file.write(json.dumps(entry) + "\n")
    if copy is not None:
        keep(run.folder, copy)
    return code


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


def _environment() -> dict[str, str]:
    """The child imports the same hf_gpipe as this script."""
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

    def __init__(self, text: str) -> None:
        self._text, self._start, self._width = text, time.perf_counter(), 0
        self._is_terminal = sys.stdout.isatty()
        print(text, end="" if self._is_terminal else ": ", flush=True)

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


class _Signals:
    """Passes SIGINT, SIGTERM and SIGHUP on to the run, as SIGINT and SIGTERM, and remembers that one came."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Signals:
        self._before = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # What nohup ignores stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def passed_to(self, child: subprocess.Popen[bytes]) -> Iterator[None]:
        """Context manager that passes the signals on to the child."""
        self._child = child
        if self.received is not None:
            self._send(self.received)
        try:
            yield
        finally:
            self._child = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self._send(number)

    def _send(self, number: int) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
