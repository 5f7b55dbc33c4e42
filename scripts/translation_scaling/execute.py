"""Runs, one or some at a time, each by `hf-gpipe train`; signals pass on, and all can be resumed."""

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

_POLL_SECONDS, _KEEP_SECONDS = 0.1, 60.0


def execute(runs: Sequence[Run], kept: Path | None = None, at_once: int = 1) -> int:
    """Run what is not finished, until a run fails or a signal comes.

    Args:
        runs: in this order; one whose learning rate is swept begins once its sweep is finished.
        kept: a folder for copies of their checkpoints and curves, from which a run goes on if its own folder has less.
        at_once: how many are trained at a time. After a failure those under way go on, and no other begins.

    Returns:
        0: all are finished; 1: a run failed; EXIT_STOPPED: a signal came, the same command goes on.

    Raises:
        UserError: another script trains a run.
    """
    waiting, active, codes = list(enumerate(runs, 1)), list[_Training](), {0}
    unfinished, refusal = {run.key for run in runs}, None
    with _noted_signals() as received:
        while True:
            for training in list(active):
                if (code := training.poll(received)) is not None:
                    active.remove(training)
                    codes.add(code)
                    if code == 0:
                        unfinished.discard(training.run.key)
            may_begin = waiting and codes == {0} and not received and refusal is None and len(active) < at_once
            ready = [entry for entry in waiting if not unfinished & {member.key for member in entry[1].sweep}]
            if may_begin and ready:
                waiting.remove(ready[0])
                number, run = ready[0]
                try:
                    active.append(_Training(run, f"[{number}/{len(runs)}] {run.title}: ", kept))
                except UserError as error:
                    refusal = error
            elif not active:
                break
            else:
                time.sleep(_POLL_SECONDS)
    if refusal is not None:
        raise refusal
    return EXIT_STOPPED if received or EXIT_STOPPED in codes else max(codes)


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Context manager with a list of the signals SIGINT, SIGTERM and SIGHUP that have come; they do nothing else."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # What nohup ignores stays ignored.
    taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in taken}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Training:
    """A run that is under way: one start of the training command, or several where it trains to its end.

    Args:
        run: what is trained.
        label: before what is printed about it.
        kept: as for `execute`.

    Raises:
        UserError: the run is being trained already.
    """

    def __init__(self, run: Run, label: str, kept: Path | None) -> None:
        self.run, self._label, self._log = run, label, run.folder / LOG_FILE
        self._copy = None if kept is None else folder_of(kept, run.name, run.seed)
        self._child: subprocess.Popen[bytes] | None = None
        self._passed_on = 0
        if self._copy is not None:
            bring_back(self._copy, run.folder)
        progress, detail = run.progress()
        self._result = "finished already, " if progress == "finished" else ""
        if progress != "finished":
            print(f"{label}{detail + '; ' if detail else ''}log {self._log}", flush=True)
            self._start()

    def _start(self) -> None:
        """Start the training command, unless the run is finished."""
        if (arguments := self.run.next_arguments()) is None:
            return
        self.run.folder.mkdir(parents=True, exist_ok=True)
        self._began, self._begin = datetime.now(UTC), time.perf_counter()
        self._copied = self._begin
        with self._log.open("a", encoding="utf-8") as log:
            # The processes of this start, which inherit the log, hold it.
            if not _locked(log):
                raise UserError(
                    f"{self.run.title} is being trained already, by processes that write to {self._log}; wait for them "
                    "or end them, and give the command again"
                )
            log.write(f"\n{self._began:%Y-%m-%d %H:%M:%S} {' '.join([*TRAIN, *arguments])}\n")
            log.flush()
            self._child = start(arguments, log)

    def poll(self, received: Sequence[int]) -> int | None:
        """Pass signals on and start what comes next; the code of the whole run once that is over."""
        code, child = 0, self._child
        if child is not None:
            for number in received[self._passed_on :]:
                child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
            self._passed_on = len(received)
            ended = child.poll()
            if self._copy is not None and (ended is not None or time.perf_counter() - self._copied > _KEEP_SECONDS):
                keep(self.run.folder, self._copy)
                self._copied = time.perf_counter()
            if ended is None:
                return None
            code, self._child = ended, None
            seconds = round(time.perf_counter() - self._begin, 1)
            entry = {"began": f"{self._began:%Y-%m-%dT%H:%M:%SZ}", "seconds": seconds, "exit_code": code}
            with (self.run.folder / STARTS_FILE).open("a") as file:
                file.write(json.dumps(entry) + "\n")
            if code == 0 and self.run.to_end and not received:
                self._start()
                if self._child is not None:
                    return None
        return self._told(EXIT_STOPPED if code == EXIT_STOPPED or (received and child is not None) else code)

    def _told(self, code: int) -> int:
        """Print how the run ended; returns the code of the script's command."""
        if code == EXIT_STOPPED:
            print(f"{self._label}stopped; the same command goes on from its last checkpoint", flush=True)
            return EXIT_STOPPED
        if code == 0:
            print(f"{self._label}{self._result}{result_text(self.run.folder)}", flush=True)
            return 0
        text = "\n".join(f"    {line}" for line in log_end(self._log))
        print(
            f"{self._label}failed with exit code {code}\n\n{self.run.title} failed; its log {self._log} ends with\n\n"
            f"{text}\n\nThe other runs' results are kept. Correct the cause and give the same command again: it skips "
            "what is finished.",
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
