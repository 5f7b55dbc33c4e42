"""Break a training over emulated machines: see that nothing hangs, the cause is told, and nothing saved is lost.

    python scripts/chaos_hosts.py [--only WORD] [--output FOLDER]

Each run is started on two machines by the file that `hf_gpipe.launch` prints for torchrun. In the middle of it a
machine loses its power, its agent is killed, its network is cut, or its process is stopped. Then: all that is left ends
in time; a message says why, on both machines where they cannot reach each other; the newest checkpoint loads; the run,
started again, ends with the weights of an undisturbed one.

Without the right to make network namespaces the script says why and exits with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from hf_gpipe.launch import main as launch
from scripts import chaos
from scripts.emulated_hosts import Hosts, why_not

STEPS, SAVED, MET = 160, 20, 50
#: How long a process waits for a message; how long all may take to end after a fault, and a run without one.
TIMEOUT_SECONDS, LIMIT_SECONDS, RUN_SECONDS = 4, 45, 200
MODULE = "hf_gpipe.train"


def lose_power(hosts: Hosts, number: int) -> None:
    """The network goes first, so that no other machine hears of the end."""
    hosts.cut(number)
    hosts.end_processes(number)


def kill_agent(hosts: Hosts, number: int) -> None:
    """The agent is torchrun's, the parent of the training process."""
    os.kill(hosts.processes(number, MODULE)[0], signal.SIGKILL)


def stop_process(hosts: Hosts, number: int, seconds: float = 3.0 * TIMEOUT_SECONDS) -> None:
    """For longer than the others wait; torchrun itself would wait for it for ever."""
    process = hosts.processes(number, MODULE)[-1]
    os.kill(process, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process, signal.SIGCONT)


@dataclass(frozen=True)
class Fault:
    """A fault of a machine.

    Attributes:
        name: for people.
        strike: does it.
        told: pattern of the message; None: the run must go on to its end.
    """

    name: str
    strike: Callable[[Hosts, int], None]
    told: str | None = r"machine [ab]: process \d.*(waited \d+ seconds in vain|lost the connection to another process)"


FAULTS = (
    Fault("power lost", lose_power),
    Fault("processes killed", lambda hosts, number: hosts.end_processes(number)),
    Fault("agent killed", kill_agent),
    Fault("network cut both ways", lambda hosts, number: hosts.cut(number)),
    Fault("network cut one way", lambda hosts, number: hosts.cut(number, both_ways=False)),
    Fault("process stopped for long", stop_process),
    Fault("process stopped for a moment", lambda hosts, number: stop_process(hosts, number, TIMEOUT_SECONDS / 2), None),
)


def start(hosts: Hosts, script: Path, folder: Path) -> None:
    """Start the script on every machine."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for number, name in enumerate(hosts.names):
        log = (folder / f"{name}.log").open("w")
        hosts.start(number, ["bash", str(script), str(number), "a"], log=log, environment=environment)


def try_fault(fault: Fault, number: int, recipe: Path, folder: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """Run with the fault on a machine, then start again without it; what is not as it should be."""
    folder.mkdir()
    output = folder / "out"
    words = [str(recipe), f"training.output_dir={output}"]
    script = folder / "job.sh"
    script.write_text(printed(words))
    problems = []
    with Hosts(2) as hosts:
        start(hosts, script, folder)
        deadline = time.monotonic() + RUN_SECONDS
        while not steps_done(output) >= MET and time.monotonic() < deadline:
            time.sleep(0.02)
        if steps_done(output) < MET:
            return [f"the run did not come to step {MET}: {tail(folder)}"]
        struck = time.monotonic()
        fault.strike(hosts, number)
        limit = LIMIT_SECONDS if fault.told else RUN_SECONDS
        while (left := hosts.still_running()) and time.monotonic() < struck + limit:
            time.sleep(0.05)
        seconds = time.monotonic() - struck
        if left:
            problems.append(f"after {seconds:.0f} s still running: {', '.join(left)}")
        codes = hosts.exit_codes()
    told = [
        line
        for name in hosts.names
        for line in (folder / f"{name}.log").read_text().splitlines()
        if line.startswith("error: ")
    ]
    print(f"{fault.name:30} {hosts.names[number]}  {seconds:6.1f} s  exit codes {codes}  {'; '.join(told)}", flush=True)
    if fault.told is None:
        if codes != [0, 0] or told:
            problems.append("the run did not go on to its end")
        return problems
    machines = [line.split(":")[1] for line in told]
    if not told or len(set(machines)) < len(told) or not all(re.search(fault.told, line) for line in told):
        problems.append(f"{len(told)} messages, and each machine may have one, as {fault.told!r}: {tail(folder)}")
    lost = chaos.Fault(0, "update", "stuck")
    return problems + chaos._what_was_lost(lost, words, folder, output, expected)


def printed(words: list[str]) -> str:
    """The file for torchrun."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if launch(["torchrun", *words, "--nodes", "2", "--no-plan"]):
            raise RuntimeError("the file for torchrun was not printed")
    return out.getvalue()


def steps_done(output: Path) -> int:
    """How many steps the log has."""
    log = output / "metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def tail(folder: Path) -> str:
    """The end of what the machines have printed."""
    return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("?.log")))


def main() -> int:
    """Try every fault on each machine; the exit code is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="try the faults whose name has this word in it")
    parser.add_argument("--output", type=Path, help="an empty folder to keep all runs in")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: there can be no emulated machines here: {reason}")
        return 0
    # The machines are taken away also when this script is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    torch.set_num_threads(1)
    wrong = tried = 0
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-chaos-") as temporary:
        folder = options.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recipe = chaos.prepare(folder)
        text = (
            recipe.read_text().replace("num_stages: 3", "num_stages: 2").replace("max_steps: 6", f"max_steps: {STEPS}")
        )
        recipe.write_text(text.replace("save_steps: 2, eval_steps: 3", f"save_steps: {SAVED}"))
        words = [str(recipe), f"training.output_dir={folder / 'undisturbed'}", "pipeline.num_processes=1"]
        if chaos.Forked(lambda: chaos.train(words), folder / "undisturbed").wait() != 0:
            raise RuntimeError((folder / "undisturbed.err").read_text())
        expected = chaos.weights(folder / "undisturbed")
        for fault in FAULTS:
            for number in range(2) if options.only in fault.name else ():
                problems = try_fault(fault, number, recipe, folder / f"{tried:02}", expected)
                tried += 1
                wrong += bool(problems)
                for problem in problems:
                    print(f"    WRONG: {problem}", flush=True)
    print(f"\n{tried} faults, {wrong} with anything wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
