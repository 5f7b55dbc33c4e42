"""Break a training in every way, in every process and phase, and see that nothing hangs and nothing saved is lost.

    python scripts/chaos.py [--quick] [--only WORD] [--output FOLDER]
    python scripts/chaos.py --minutes N [--seed S] [--case C] [--only WORD] [--output FOLDER]

Each fault is injected into a run of `hf-gpipe train` over three processes, by wrapping one function of the
product in one of them. Then: every process is gone in time; the exit code and the one message are right and name the
place; the newest checkpoint loads in transformers; the run, started again, ends with the weights of one that was never
disturbed. The processes are forked from this one, which has imported everything, and so start in no time.

With --minutes faults are drawn: the kind, the launch (our command, torchrun, a script in Python under torchrun, and one
started by hand), the process, the phase and the moment. Each is a line in FOLDER/results.jsonl, and the table of all
comes last. The seed is printed. Started again with the same seed and folder, the script goes on after the last case.
"""

from __future__ import annotations

import argparse
import errno
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForSeq2SeqLM

from hf_gpipe import pipeline
from hf_gpipe.checkpoint import save
from hf_gpipe.checkpoint.directory import checkpoints, last_checkpoint, step_of
from hf_gpipe.checkpoint.save import PATIENCE
from hf_gpipe.errors import EXIT_STOPPED
from hf_gpipe.job.world import World
from hf_gpipe.runtime import batches, generation, stage
from hf_gpipe.train import main as train
from hf_gpipe.training import loader, updates
from scripts.emulated_hosts import is_running
from scripts.fault_results import Results
from scripts.forked import Forked, import_ahead, stuck, train_forked
from scripts.random_faults.search import search
from scripts.tiny_run import TIMEOUT_SECONDS, observe, prepare, weights

NUM_PROCESSES = 3
#: The run that is started again has one process, of one stage.
ALONE = ("pipeline.num_processes=1", "pipeline.num_stages=1", "pipeline.recompute=none")
#: How long all processes may take to end.
LIMIT_SECONDS = 15
#: How long a run may take to come to its fault, and how often it is tried: one that a busy machine ends before, by the
#: time limit of its messages, says nothing about the fault.
MEET_SECONDS, ATTEMPTS = 120, 3


@dataclass(frozen=True)
class Place:
    """Where a fault strikes: the call of a function that is the `call`-th in its process.

    Attributes:
        owner: the module or class that has the function.
        name: of the function.
        call: counted from 1.
        said: what the message says about the place.
        processes: those that call it.
    """

    owner: Any
    name: str
    call: int
    said: str
    processes: tuple[int, ...] = tuple(range(NUM_PROCESSES))


PHASES = {
    "data": Place(loader, "seed_generators", 4, "reading a mini-batch", (0,)),
    "batch": Place(batches, "unpack", 5, "training step", (1, 2)),
    "forward": Place(stage.Stage, "forward", 8, "stage {process}, action {process}F1"),
    "recompute": Place(stage.Stage, "recompute", 7, "stage {process}, action {process}R"),
    "backward": Place(stage.Stage, "backward", 8, "stage {process}, action {process}B0"),
    "update": Place(pipeline.Pipeline, "clip_grad_norm_", 4, "training step 4"),
    # A process writes a file of weights and one of state for each checkpoint.
    "weights": Place(save, "save_file", 3, "saving checkpoint-4"),
    "state": Place(save, "save_file", 4, "saving checkpoint-4"),
    "publish": Place(save, "replace_directory", 2, "saving checkpoint-4", (0,)),
    "evaluation": Place(stage.Stage, "evaluate", 2, "stage {process}, action {process}F1"),
    "generation": Place(generation.Generator, "generate", 1, "translating"),
}


def _raise(error: Exception) -> NoReturn:
    raise error


KINDS: dict[str, Callable[[], None]] = {
    "exception": partial(_raise, ValueError("injected")),
    "memory": partial(_raise, MemoryError("injected")),
    "device memory": partial(_raise, torch.OutOfMemoryError("injected")),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stuck": stuck,
    "disk full": partial(_raise, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
}
WRITES = ("weights", "state", "publish")


@dataclass(frozen=True)
class Fault:
    """The failure to inject, and where."""

    process: int
    phase: str
    kind: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.phase}, process {self.process}"

    @property
    def place(self) -> Place:
        return PHASES[self.phase]

    @property
    def seconds_of_wait(self) -> int:
        """How long the others wait where the process is stuck."""
        return TIMEOUT_SECONDS * (PATIENCE if self.phase in WRITES else 1)

    def inject(self, folder: Path) -> None:
        """Let it happen in this process, which notes when it did."""
        original, calls = getattr(self.place.owner, self.place.name), 0

        def broken(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.place.call:
                (folder / "injected").write_text(str(time.time()))
                KINDS[self.kind]()
            return original(*args, **kwargs)

        setattr(self.place.owner, self.place.name, broken)


def all_faults() -> list[Fault]:
    """Every kind in every phase, in a process of its turn, and a full disk wherever something is written."""
    faults: list[Fault] = []
    for turn, phase in enumerate(PHASES):
        allowed = PHASES[phase].processes
        for number, kind in enumerate(KINDS):
            if kind != "disk full":
                faults.append(Fault(allowed[(turn + number) % len(allowed)], phase, kind))
            elif phase in WRITES:
                faults += [Fault(process, phase, kind) for process in allowed]
    return faults


def some_faults() -> list[Fault]:
    """Each phase once, each kind at least once."""
    kinds = ["exception", "SIGKILL", "stuck", "memory", "SIGTERM", "device memory", "disk full"]
    faults = []
    for turn, phase in enumerate(PHASES):
        allowed = PHASES[phase].processes
        faults.append(Fault(allowed[turn % len(allowed)], phase, kinds[turn % len(kinds)]))
    return faults


def run_forked(words: Sequence[str], folder: Path, fault: Fault | None) -> Forked:
    """The command in a process of its own, with a fault in one of its processes."""

    def prepared(rank: int) -> None:
        if fault is not None:
            wait_for_checkpoint(folder)
            if fault.process == rank:
                fault.inject(folder)

    return Forked(partial(train_forked, words, folder, NUM_PROCESSES, prepared), folder / "run")


def wait_for_checkpoint(folder: Path) -> None:
    """Let this process wait in step 3 until the checkpoint of step 2 is complete: it is written in the background.

    All processes wait, at the same place: while one waits for a slow disk, no other reaches its time limit.
    """
    original, calls = updates.Updates.run, 0

    def waiting(*args: Any) -> None:
        nonlocal calls
        calls += 1
        deadline = time.monotonic() + MEET_SECONDS / 2
        while calls == 3 and not checkpoints(folder / "out") and time.monotonic() < deadline:
            time.sleep(0.01)
        original(*args)

    updates.Updates.run = waiting  # type: ignore[method-assign]


# ---------------------------------------------------------------------- one fault


def try_fault(fault: Fault, recipe: Path, folder: Path, expected: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """Run with the fault, then start again without it; what came of it, None where the run did not come to its fault.

    Args:
        fault: to inject.
        recipe: from `prepare`.
        folder: a new one, for what the run leaves.
        expected: the weights that an undisturbed run ends with.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    output = folder / "out"
    words = [str(recipe), f"training.output_dir={output}"]
    launcher = run_forked(words, folder, fault)
    limit = LIMIT_SECONDS + (fault.seconds_of_wait if fault.kind == "stuck" else 0)
    deadline = time.time() + MEET_SECONDS
    while launcher.poll() is None and time.time() < _injected(folder, deadline) + limit:
        time.sleep(0.02)
    seconds = time.time() - _injected(folder, math.nan)
    is_hang = launcher.poll() is None
    left = [int(pid) for pid in (folder / "pids").read_text().split() if is_running(int(pid))]
    for process in (launcher.pid, *left):
        if is_running(process):
            os.kill(process, signal.SIGKILL)
    if math.isnan(seconds):
        return None
    problems = [f"{len(left)} processes still run"] if left or is_hang else []
    stderr = (folder / "run.err").read_text()
    told = [line for line in stderr.splitlines() if line.startswith(("error: ", "stopped by "))]
    problems += _wrong_end(fault, launcher.poll(), told, stderr)
    losses = what_was_lost(1 if fault.phase == "evaluation" else 2, words, folder, output, expected)
    return {
        **{"fault": str(fault), "seconds": seconds, "exit_code": launcher.poll(), "told": told or [stderr[-200:]]},
        **{"problems": [*problems, *losses], "hang": is_hang or bool(left), "loss": bool(losses)},
    }


def _injected(folder: Path, otherwise: float) -> float:
    try:
        return float((folder / "injected").read_text())
    except (FileNotFoundError, ValueError):
        return otherwise


def _wrong_end(fault: Fault, exit_code: int | None, told: list[str], stderr: str) -> list[str]:
    """Problems with the exit code and the message."""
    problems = []
    is_stopped = fault.kind == "SIGTERM" and fault.phase != "generation"
    is_user_error = fault.kind == "disk full"
    wanted = EXIT_STOPPED if is_stopped else 2 if is_user_error else 1
    if exit_code != wanted:
        problems.append(f"exit code {exit_code}, expected {wanted}")
    if len(told) != 1 or "Traceback" in stderr:
        problems.append(f"{len(told)} messages{', and a traceback' * ('Traceback' in stderr)}")
    place = fault.place.said.format(process=fault.process)
    # A thread that writes is waited for by the main thread.
    stuck = "while saving checkpoint-4" if fault.phase in WRITES else ".* in stuck"
    patterns = {
        "SIGTERM": r"stopped by SIGTERM after step \d of 6; all of it is saved" if is_stopped else "killed by SIGTERM",
        "SIGKILL": rf"process {fault.process} was killed by SIGKILL",
        "stuck": rf"waited {fault.seconds_of_wait} seconds in vain.*process {fault.process} was stuck {stuck}",
        "disk full": rf"process {fault.process}.*No space left on device",
    }
    if fault.phase == "data":
        patterns["stuck"] = rf"process 0, {place}: the dataset has given nothing for \d+ seconds, in stuck"
    # Where memory runs out, the planner's advice stands between the two.
    pattern = patterns.get(fault.kind, rf"(?=.*{place}).*process {fault.process}.*injected")
    if not any(re.search(pattern, line) for line in told):
        problems.append(f"the message does not match {pattern!r}")
    return problems


def what_was_lost(
    before: int, words: list[str], folder: Path, output: Path, expected: dict[str, torch.Tensor]
) -> list[str]:
    """Problems with the checkpoints, of which one was saved after `before` steps, and with the run that resumes."""
    newest = last_checkpoint(output, World.current())
    steps = [step_of(path) for path in checkpoints(output)]
    if max(steps, default=0) < before:
        return [f"there are the checkpoints {steps}, and {before} had been saved"]
    problems = []
    if newest is not None and Forked(lambda: _loads(newest), folder / "load").wait() != 0:
        problems.append(f"{newest.name} does not load: {(folder / 'load.err').read_text()[-200:]}")
    again = Forked(lambda: train([*words, *ALONE]), folder / "again")
    if again.wait() != 0:
        problems.append(f"the run does not go on: {(folder / 'again.err').read_text()[-300:]}")
    elif newest is not None and "resuming   from" not in (folder / "again.out").read_text():
        problems.append("the run started anew")
    else:
        result = weights(output)
        if result.keys() != expected.keys() or not all(
            torch.allclose(result[n], expected[n], atol=1e-5) for n in result
        ):
            problems.append("the run ends with other weights")
    return problems


def _loads(folder: Path) -> int:
    AutoModelForSeq2SeqLM.from_pretrained(folder)
    return 0


def undisturbed(recipe: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The weights at the end of a run without a fault."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    words = [str(recipe), f"training.output_dir={folder / 'out'}"]
    if run_forked(words, folder, None).wait() != 0:
        raise RuntimeError(f"the run without a fault fails: {(folder / 'run.err').read_text()}")
    return weights(folder / "out")


def main(argv: Sequence[str] | None = None) -> int:
    """Try every fault; the exit code is 1 where there was a hang, a loss or a wrong message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="try the faults whose description has this word in it")
    parser.add_argument("--quick", action="store_true", help="try each phase once, and each kind")
    parser.add_argument("--output", type=Path, help="a folder for the results and for runs in which anything was wrong")
    parser.add_argument("--minutes", type=float, help="draw faults for so long")
    parser.add_argument("--seed", type=int, help="of the faults that are drawn; without it a new one")
    parser.add_argument("--case", type=int, help="with --seed: this case alone, which is tried again")
    options = parser.parse_args(argv)
    import_ahead(NUM_PROCESSES)
    if options.minutes is not None:
        return _draw(options.minutes, options.seed, options.case, options.only, options.output)
    faults = [fault for fault in (some_faults() if options.quick else all_faults()) if options.only in str(fault)]
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-chaos-") as temporary:
        folder = options.output or Path(temporary)
        results = Results(folder)
        done = {result["fault"] for result in results.read()}
        recipe = prepare(folder)
        observe(recipe)
        expected = undisturbed(recipe, folder / "undisturbed")
        for number, fault in enumerate(fault for fault in faults if str(fault) not in done):
            for attempt in range(ATTEMPTS):
                run = folder / f"{len(done) + number:02}.{attempt}"
                if (result := try_fault(fault, recipe, run, expected)) is not None:
                    break
            else:
                result = {"fault": str(fault), "problems": ["the fault was not met"]}
            results.add(str(fault), result, run)
        return results.summary()


def _draw(minutes: float, seed: int | None, case: int | None, only: str, output: Path | None) -> int:
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    folder = output or Path(tempfile.mkdtemp(prefix="hf_gpipe-chaos-"))
    print(f"seed {seed}, in {folder}", flush=True)
    return search(seed, 60 * minutes, folder.resolve(), only, case)


if __name__ == "__main__":
    sys.exit(main())
