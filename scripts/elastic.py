"""Lose a host under torchrun, or let one join, and see that the training ends with the weights that it would have had.

    python scripts/elastic.py [--hosts 3] [--kills 10] [--join] [--folder FOLDER]

Agents of torchrun on this machine stand for hosts with one process each; the store of their rendezvous is in this
program. At a random step one of them is killed with its process. torchrun starts the others anew, the planner chooses
stages and replicas for as many as there are, and the run resumes from its last checkpoint. With --join another agent
is started in place of the killed one. All runs compute in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch.distributed as dist
from bench.runner import parser
from tiny_run import prepare, weights
from translation_scaling.curves import read_curve

STEPS, LIMIT_SECONDS = 60, 180
TOLERANCE = 1e-9


class Agent:
    """torchrun's agent on one host, and everything that it starts."""

    def __init__(self, words: list[str], log: Path) -> None:
        # Every start has a store in its own rank 0. A shared one would be in the first agent, which may be lost.
        own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.log = log.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words],
            env={**os.environ, **own},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        """End all of it at once, as when the host loses power."""
        try:
            agent = psutil.Process(self.process.pid)
            own = [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            own = []
        for process in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()


def wait_for_step(output: Path, step: int, agents: list[Agent]) -> None:
    """Wait until the run has made more than `step` steps."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while read_curve(output).step <= step:
        if time.monotonic() > deadline or all(agent.process.poll() is not None for agent in agents):
            raise RuntimeError(f"the run does not come to step {step + 1}: see {[agent.log.name for agent in agents]}")
        time.sleep(0.02)


def try_kill(folder: Path, recipe: list[str], options: argparse.Namespace, chance: random.Random) -> float:
    """Kill one host of a run; the seconds from then to the next step that is new."""
    folder.mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "elastic"]
    limits = "is_host=0,last_call_timeout=3,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3"
    words = ["--nnodes", f"1:{options.hosts}", "--nproc-per-node", "1", "--max-restarts", "3", *endpoint]
    words += ["--rdzv-conf", limits, "-m", "hf_gpipe.train", *recipe, f"training.output_dir={folder / 'out'}"]
    agents = [Agent(words, folder / f"host-{number}.log") for number in range(options.hosts)]
    try:
        step, lost = chance.randrange(3, STEPS // 2), chance.randrange(options.hosts)
        wait_for_step(folder / "out", step, agents)
        agents.pop(lost).kill()
        killed, reached = time.monotonic(), read_curve(folder / "out").step
        if options.join:
            agents.append(Agent(words, folder / "joined.log"))
        wait_for_step(folder / "out", reached, agents)
        seconds = time.monotonic() - killed
        for agent in agents:
            if agent.process.wait(LIMIT_SECONDS) != 0:
                raise RuntimeError(f"a host that was left has failed: see {agent.log.name}")
        logs = "".join(Path(agent.log.name).read_text() for agent in agents)
        print(f"killed after step {reached}; {' '.join(re.findall('resuming .*', logs))}")
        return seconds
    finally:
        for agent in agents:
            agent.kill()


def main() -> int:
    """Kill hosts; the exit code is 1 where a run ends with other weights."""
    made = parser(__doc__, hosts=3, kills=10, seed=0)
    made.add_argument("--join", action="store_true", help="let another host join")
    made.add_argument("--folder", type=Path, help="an empty folder to keep all runs in")
    options = made.parse_args()
    chance, wrong = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-elastic-") as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        own = {"stages": "auto", "micro": 4, "steps": STEPS, "evaluate": "null", "timeout": 60}
        recipe = [str(prepare(folder, **own)), "pipeline.replicas=auto", "model.dtype=float64"]
        whole = [sys.executable, "-m", "hf_gpipe.train", *recipe, "pipeline.num_stages=1", "pipeline.replicas=1"]
        subprocess.run([*whole, f"training.output_dir={folder / 'whole'}"], check=True, stdout=subprocess.DEVNULL)
        expected = weights(folder / "whole")
        for number in range(options.kills):
            run = folder / f"{number:02}"
            seconds = try_kill(run, recipe, options, chance)
            result = weights(run / "out")
            error = max(float((result[name] - expected[name]).abs().max()) for name in expected)
            wrong += error > TOLERANCE
            print(
                f"run {number}: {seconds:.1f} s from the kill to the next step; weights differ by {error:.1e}",
                flush=True,
            )
    print(f"{options.kills} lost hosts: {wrong} runs ended with other weights")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
