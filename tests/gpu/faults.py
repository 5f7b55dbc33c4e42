"""Faults in a training: every process ends in seconds, or seconds after its limit, and the cause is printed once.

`python -m tests.gpu.faults FAULT FILE` is one process of the training; `end_together` starts it. On emulated devices it
is a fork of the check's process, which has imported everything.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_gpipe import Pipeline
from hf_gpipe.errors import StageError
from hf_gpipe.job import failures
from hf_gpipe.job.joining import join_job
from hf_gpipe.job.launch import launch
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.settings.pipeline import PipelineConfig
from scripts.forked import fork_ahead
from tests.emulated_cuda.models import config_of
from tests.oracle import padded_batch, plain_model

#: From the fault to the end of the last process.
MOST_SECONDS = 15.0
#: What the message says about each fault in process 1.
SAID = {
    "killed": "process 1 was killed by SIGKILL",
    "raised": "process 1, stage 1, action 1F1: ValueError: injected",
    "blocked": "process 0",
}
#: How long a process waits for a message.
LIMITS = {"blocked": 10.0}


def failed_step(job: dict[str, Any]) -> dict[str, Any]:
    """A pipeline of one process goes on after a failed step, with the numbers of one that had none."""
    device = [f"cuda:{index}" for index in range(job["num_devices"])]
    losses = []
    problems = []
    for fails in (False, True):
        pipe = Pipeline(plain_model(config_of("llama")), max(2, len(device)), 3, "1f1b", device=device)
        batch = padded_batch(pipe.adapter.config)
        if fails:
            forward = Stage.forward
            Stage.forward = _failing  # type: ignore[method-assign]
            try:
                pipe.train_step(batch)
                problems.append("no error was raised")
            except StageError as error:
                if "ValueError: injected" not in str(error):
                    problems.append(f"another error was raised: {error}")
            finally:
                Stage.forward = forward  # type: ignore[method-assign]
            pipe.zero_grad()
        losses.append(float(pipe.train_step(batch)))
    if not problems and abs(losses[1] - losses[0]) > 1e-10:
        problems.append(f"the loss after a failed step is {losses[1]!r} and not {losses[0]!r}")
    return {"figures": {}, "problems": problems}


def _failing(self: Stage, context: Any, **options: bool) -> Any:
    raise ValueError("injected")


def end_together(job: dict[str, Any]) -> dict[str, Any]:
    """A process is killed, fails, or goes no further, in its third forward of a step."""
    with tempfile.TemporaryDirectory() as folder:
        struck, said = Path(folder) / "struck", Path(folder) / "stderr"
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        before = os.dup(2)
        with said.open("w") as file:
            os.dup2(file.fileno(), 2)
            try:
                words = [job["fault"], str(struck)]
                if job["emulated"]:
                    fork_ahead(lambda rank: main(words), Path(folder), job["num_processes"])
                code = launch("tests.gpu.faults", words, job["num_processes"], threads=1)
            finally:
                os.dup2(before, 2)
        end = time.time()
        if not struck.exists():
            return {"problems": [f"the training never came to the fault: {said.read_text()[-1000:]}"]}
        seconds = end - struck.stat().st_mtime - LIMITS.get(job["fault"], 0.0)
        errors = [line for line in said.read_text().splitlines() if line.startswith("error: ")]
    problems = []
    if seconds > MOST_SECONDS:
        problems.append(f"the last process ended {seconds:.0f} s after the fault, later than {MOST_SECONDS:g} s")
    if code != 1:
        problems.append(f"the exit code is {code}")
    if len(errors) != 1 or SAID[job["fault"]] not in errors[0]:
        problems.append(f"the cause should be named once: {errors}")
    return {"figures": {"seconds to the end": seconds, "bound": MOST_SECONDS}, "problems": problems}


def train(fault: str, struck: Path) -> None:
    """Train until process 1 has its fault."""
    join_job(LIMITS.get(fault, PipelineConfig().timeout_seconds))
    pipe = Pipeline(plain_model(config_of("llama")), num_micro_batches=2, num_stages=_size(), device="cuda")
    forward, calls = Stage.forward, 0

    def faulty(self: Stage, context: Any, **options: bool) -> Any:
        nonlocal calls
        calls += 1
        if pipe.world.rank == 1 and calls == 4:
            torch.cuda.synchronize()
            struck.touch()
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "blocked":
                time.sleep(10 * LIMITS[fault])
            raise ValueError("injected")
        return forward(self, context, **options)

    Stage.forward = faulty  # type: ignore[method-assign]
    while True:
        pipe.train_step(padded_batch(pipe.adapter.config) if pipe.world.rank == 0 else None)


def _size() -> int:
    return int(os.environ["WORLD_SIZE"])


def main(words: list[str]) -> int:
    """The exit code of a process of the training."""
    try:
        train(words[0], Path(words[1]))
    except Exception as error:
        return failures.report(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
