"""One case: a run, a fault at a moment that is drawn, what came of it, and the run that is started again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_gpipe.checkpoint.directory import checkpoints, step_of
from hf_gpipe.job.job import ENDING
from scripts import tiny_run
from scripts.emulated_hosts import is_running
from scripts.random_faults.faults import FAULTS, STUCK, Fault, Scene
from scripts.random_faults.runs import (
    BY_HAND,
    COMMAND,
    EVALUATED,
    SAVED,
    SCRIPT,
    STEPS,
    TIMEOUT_SECONDS,
    TORCHRUN,
    Lingering,
    Run,
)

#: A run that has not ended so long after its fault hangs: six time limits of a message, which a save may take, and the
#: time that torchrun gives its processes.
HANG_SECONDS = 100.0
#: How long a run without a fault may take on a busy machine.
RUN_SECONDS = 240.0

#: The phases, and how the notes of the processes begin that are in them.
_STARTING = "starting"
_BOTH = {
    "reading": "reading a mini-batch",
    "first step": "training step 1",
    "training": "training step ",
    "saving": "saving checkpoint-",
    "evaluating": "evaluating",
}
PHASES_OF_SCRIPT = {_STARTING: "", **_BOTH}
PHASES = {
    **PHASES_OF_SCRIPT,
    "checking": "checking the recipe",
    "preparing": "preparing the corpus",
    "creating": "creating the model",
    "saving the model": "saving the model",
    "translating": "translating",
    "measuring": "measuring a step",
    "end": ENDING,
}


@dataclass(frozen=True)
class Prepared:
    """The files that all cases read.

    Attributes:
        folder: has the recipe, and for each kind of program the output of a whole run.
        expected: the weights of that run.
    """

    folder: Path
    expected: dict[str, dict[str, torch.Tensor]]

    @property
    def recipe(self) -> Path:
        return self.folder / "recipe.yaml"


def program_of(launch: str) -> str:
    """Launches of one program end with the same weights."""
    return COMMAND if launch in (COMMAND, TORCHRUN) else SCRIPT


def combinations(only: str) -> list[tuple[Fault, str]]:
    """The faults and kinds of launch that have a word in their names."""
    return [(fault, launch) for fault in FAULTS for launch in fault.launches if only in f"{fault.name}, {launch}"]


def combination(seed: int, number: int, only: str) -> tuple[Fault, str]:
    """The fault and the kind of launch of a case: in each round every one comes once, in an order of its own."""
    every = combinations(only)
    if not every:
        raise SystemExit(f"no fault and launch have {only!r} in their names")
    order = random.Random(f"{seed} round {number // len(every)}").sample(every, len(every))
    return order[number % len(every)]


def try_case(seed: int, number: int, only: str, prepared: Prepared, folder: Path) -> dict[str, Any]:
    """One case of a seed, in a new folder; what came of it, as JSON."""
    dice = random.Random(f"{seed} case {number}")
    fault, launch = combination(seed, number, only)
    phase = dice.choice(sorted(PHASES if program_of(launch) == COMMAND else PHASES_OF_SCRIPT))
    phase = _STARTING if fault.is_at_start else phase
    lingers = dice.choice((0.0, dice.uniform(0.05, 0.8)))
    # The main process alone reads the data.
    victim = 0 if phase == "reading" else dice.randrange(2)
    folder.mkdir(parents=True)
    shutil.copytree(prepared.folder / "cache", folder / "cache")
    if fault.prepare is not None:
        fault.prepare(folder / "out", prepared.folder / program_of(launch) / "out", dice)
    work = PHASES[phase] + (str(dice.randrange(2, STEPS + 1)) if phase == "training" else "")
    run = Run(launch, prepared.recipe, folder / "first", folder / "out", Lingering(work, lingers))
    scene = Scene(run, victim, dice)
    try:
        is_met = _wait_for(run, victim, work)
        time.sleep(dice.uniform(0.0, 2.0) * lingers if work else dice.uniform(0.0, 3.0))
        before = [step_of(path) for path in checkpoints(folder / "out")] if (folder / "out").exists() else []
        begin = time.monotonic()
        fault.strike(scene)
        if fault.name == STUCK and phase == "preparing" and victim == 0:
            # The others wait for as long as the main process says that it prepares: somebody ends it.
            time.sleep(2 * TIMEOUT_SECONDS)
            with suppress(ProcessLookupError):
                os.kill(scene.worker, signal.SIGKILL)
        result = {"seed": seed, "case": number, "fault": fault.name, "launch": launch, "phase": phase}
        result |= {"victim": victim, "met": is_met} | _judge(fault, scene, begin, before, prepared.expected, folder)
    finally:
        for own_run in (run, scene.second):
            if own_run is not None:
                own_run.end()
    return result


def _wait_for(run: Run, victim: int, work: str) -> bool:
    deadline = time.monotonic() + RUN_SECONDS
    while run.launcher.poll() is None and time.monotonic() < deadline:
        if len(run.workers()) == 2 and run.note(victim).startswith(work):
            return True
        time.sleep(0.001)
    return False


def _judge(
    fault: Fault,
    scene: Scene,
    begin: float,
    before: list[int],
    expected: dict[str, dict[str, torch.Tensor]],
    folder: Path,
) -> dict[str, Any]:
    """The outcome of a fault."""
    run, problems = scene.run, []
    # A fault that the run survives takes no time from it.
    limit = RUN_SECONDS if fault.survives else HANG_SECONDS
    left = _wait_for_end(scene, begin + limit)
    seconds = time.monotonic() - begin
    if left:
        problems.append(f"{len(left)} processes still run: {[run.note(rank) for rank in range(2)]}")
    # Somebody ends what he has stopped; whoever waited for it must end then.
    for pid in scene.stopped:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT if pid == run.launcher.pid else signal.SIGKILL)
    run.launcher.wait(30.0)
    code, told = run.launcher.poll(), run.told()
    run.end()
    is_over = code == 0
    must_tell = not is_over and not fault.is_silent and (bool(scene.stopped) or not run.is_silenced())
    if must_tell and not told:
        problems.append(f"no line says why: exit code {code}")
    if len(told) > 1:
        problems.append(f"{len(told)} lines")
    if run.launch == COMMAND and "Traceback" in run.printed():
        problems.append("a traceback")
    if fault.survives and not is_over:
        problems.append(f"the run did not go on to its end: exit code {code}")
    if is_over and not fault.survives and told:
        problems.append("a line says that it failed, and it did not")
    second: dict[str, Any] = {}
    if scene.second is not None:
        second = _judge_second(scene.second, begin, problems)
    want = expected[program_of(run.launch)]
    silent = is_over and not _is_equal(folder / "out", want)
    if silent:
        problems.append("it ended well, with other weights")
    for undo in scene.tidy:
        undo()
    after = [step_of(path) for path in checkpoints(folder / "out")] if (folder / "out").exists() else []
    loss = max(after, default=0) < max(before, default=0)
    if loss:
        problems.append(f"there are checkpoints {after}, and there were {before}")
    bit_equal = is_over and not silent
    if not is_over:
        bit_equal = _resume(run, folder, want, problems)
    return {
        "seconds": round(seconds, 1),
        "exit_code": code,
        "told": told,
        "must_tell": must_tell,
        "hang": bool(left),
        "loss": loss,
        "silent": silent,
        "bit_equal": bit_equal,
        "checkpoints": [before, after],
        "problems": problems,
        **second,
    }


def _wait_for_end(scene: Scene, deadline: float) -> list[int]:
    """Wait until nothing runs but what was stopped, and its launcher, which nothing tells; what runs at the end."""
    run = scene.run
    while left := [pid for pid in run.running() if pid not in scene.stopped]:
        # A shell waits for a stopped process until somebody ends it.
        waits = any(pid in run.workers() and is_running(pid) for pid in scene.stopped)
        if run.launch == BY_HAND and left == [run.launcher.pid] and waits:
            return []
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _judge_second(second: Run, begin: float, problems: list[str]) -> dict[str, Any]:
    """A second run must end with a line, or train where the first one was over already."""
    second.launcher.wait(max(1.0, begin + RUN_SECONDS - time.monotonic()))
    seconds, code, told = time.monotonic() - begin, second.launcher.poll(), second.told()
    if second.running():
        problems.append("the second run hangs")
    elif code != 0 and not told and second.launch != TORCHRUN:
        problems.append(f"no line says why the second run ended with exit code {code}")
    return {"second": {"exit_code": code, "told": told, "seconds": round(seconds, 1)}}


def _resume(run: Run, folder: Path, want: dict[str, torch.Tensor], problems: list[str]) -> bool:
    """Start the run again; whether it ends with the weights of a whole one."""
    again = Run(run.launch, run.recipe, folder / "again", folder / "out")
    again.launcher.wait(RUN_SECONDS)
    code = again.launcher.poll()
    again.end()
    if code != 0:
        problems.append(f"the run does not go on: {code}: {again.printed()[-300:]}")
        return False
    if not _is_equal(folder / "out", want):
        problems.append("the resumed run ends with other weights")
        return False
    return True


def _is_equal(output: Path, want: dict[str, torch.Tensor]) -> bool:
    weights = tiny_run.weights(output)
    return weights.keys() == want.keys() and all(torch.equal(weights[name], want[name]) for name in want)


def prepare(folder: Path, only: str) -> Prepared:
    """The recipe, the cache, and a whole run of each program that may be tried, unless the folder has them."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        tiny_run.prepare(folder, stages=2, steps=STEPS, save=SAVED, evaluate=EVALUATED)
    tiny_run.observe(recipe)
    expected = {}
    # The command comes first: it makes the cache.
    for launch in sorted({COMMAND, *(program_of(launch) for _, launch in combinations(only))}):
        own = folder / launch
        if not (own / "done").exists():
            shutil.rmtree(own, ignore_errors=True)
            run = Run(COMMAND if launch == COMMAND else BY_HAND, recipe, own / "first", own / "out")
            if run.launcher.wait(RUN_SECONDS) != 0:
                run.end()
                raise RuntimeError(f"the run without a fault fails: {run.printed()}")
            if launch == COMMAND:
                shutil.rmtree(folder / "cache", ignore_errors=True)
                (own / "cache").mkdir(exist_ok=True)
                (own / "cache").rename(folder / "cache")
            (own / "done").touch()
        expected[launch] = tiny_run.weights(own / "out")
    return Prepared(folder, expected)
