"""Break a training over emulated machines: see that nothing hangs, the cause is told, and nothing saved is lost.

    python scripts/chaos_hosts.py [--only WORD] [--rounds N] [--output FOLDER]

Each run is that of the torchrun command that `hf-gpipe launch` prints for two machines, in processes forked from this
one, which has imported everything. In some phase of it a machine loses its power, its agent is killed, its network is
cut or slow, its disk is full, its process is stopped, its clock is wrong, or two of these at once. Then what is left
ends in time, or goes on to its end where the fault passes; a message says why, on both machines where they cannot reach
each other; the newest checkpoint loads; the run, started again, ends with the weights of an undisturbed one.

The folder gets a line for each fault in results.jsonl. Started again with the same folder, the script goes on after the
last one. Without the right to make network namespaces it says why and exits with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.distributed import run as torchrun

from hf_gpipe.checkpoint import save
from hf_gpipe.commands.launch import main as launch
from hf_gpipe.job.job import ENDING, WORK_VARIABLE, Job, read_note
from hf_gpipe.train import main as train
from scripts import chaos, forked, tiny_run
from scripts.emulated_hosts import Hosts, why_not
from scripts.fault_results import Results

STEPS, SAVED, EVALUATED, MET = 60, 10, 15, 22
#: How long a process waits for a message; how long all may take to end after a fault, and a run without one.
TIMEOUT_SECONDS, LIMIT_SECONDS, RUN_SECONDS = 12, 90, 400
#: How long the network stays slow, and how long a process stays in a phase in which it is to be struck.
SLOW_SECONDS, LINGER_SECONDS = 12.0, 1.0


def worker(hosts: Hosts, number: int) -> int:
    """The training process on a machine, a child of torchrun's agent."""
    return hosts.processes(number)[1]


def kill_agent(hosts: Hosts, number: int) -> None:
    os.kill(hosts.processes(number)[0], signal.SIGKILL)


def lose_power(hosts: Hosts, number: int) -> None:
    """The network goes first, so that no other machine hears of the end."""
    hosts.cut(number)
    hosts.end_processes(number)


def stop_process(hosts: Hosts, number: int, seconds: float = 2.0 * TIMEOUT_SECONDS) -> None:
    """For longer than the others wait; torchrun itself would wait for it for ever."""
    process = worker(hosts, number)
    os.kill(process, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(process, signal.SIGCONT)


def slow_network(hosts: Hosts, number: int, delay_seconds: float, loss: float) -> None:
    """For some seconds the machine's messages take long, or some of its packets are lost."""
    hosts.slow_down(number, delay_seconds, loss)
    time.sleep(SLOW_SECONDS)
    hosts.speed_up(number)


def limit_rate(hosts: Hosts, number: int) -> None:
    """For some seconds."""
    hosts.limit_rate("1mbit")
    time.sleep(SLOW_SECONDS)
    hosts.limit_rate("10gbit")


def fill_disk(hosts: Hosts, number: int) -> None:
    """No file of the training process can grow beyond a size that the model's files have."""
    resource.prlimit(worker(hosts, number), resource.RLIMIT_FSIZE, (4096, 4096))


def both(first: Callable[[Hosts, int], None], second: Callable[[Hosts, int], None]) -> Callable[[Hosts, int], None]:
    """One fault on the machine, and another one on the other machine."""

    def strike(hosts: Hosts, number: int) -> None:
        first(hosts, number)
        second(hosts, 1 - number)

    return strike


_LOST = (
    r"machine [ab]: process \d.*"
    r"(waited \d+ seconds in vain|lost the connection to another process|has said nothing for \d+ seconds)"
    r"|machine [ab].*(cannot meet the others|waited \d+ seconds in vain)"
)


PHASES = ("training", "saving", "preparing", "first step", "evaluation", "generation", "end", "recovery")


@dataclass(frozen=True)
class Fault:
    """A fault of a machine.

    Attributes:
        name: for people.
        strike: does it.
        told: pattern of the message; None: the run must go on to its end.
        phases: in which it is tried.
        machines: on which it is tried.
        clock: of the machine, as libfaketime reads it, from its start on; empty: the right time.
    """

    name: str
    strike: Callable[[Hosts, int], None]
    told: str | None = _LOST
    phases: tuple[str, ...] = PHASES
    machines: tuple[int, ...] = (0, 1)
    clock: str = ""


def _nothing(hosts: Hosts, number: int) -> None:
    """The fault is there from the start."""


_SLOW = ("training", "evaluation", "recovery")
_CUT_ONE_WAY = partial(Hosts.cut, both_ways=False)
FAULTS = (
    Fault("power lost", lose_power),
    Fault("processes killed", Hosts.end_processes),
    Fault("agent killed", kill_agent),
    Fault("network cut both ways", Hosts.cut),
    Fault("network cut one way", _CUT_ONE_WAY),
    Fault("process stopped for long", stop_process),
    Fault("process stopped for a moment", partial(stop_process, seconds=TIMEOUT_SECONDS / 4), None),
    Fault("5% of the packets lost", partial(slow_network, delay_seconds=0.0, loss=0.05), None, _SLOW),
    Fault("200 ms of delay", partial(slow_network, delay_seconds=0.2, loss=0.0), None, _SLOW),
    Fault("1 Mbit/s", limit_rate, None, _SLOW),
    # Of the machine that writes its stage alone: the limit would also hold for what the other one prints.
    Fault("disk full", fill_disk, r"cannot write into .*File too large", ("training", "saving"), (1,)),
    Fault("power lost and the other stopped", both(lose_power, stop_process), phases=("training", "saving")),
    Fault("agent killed and the network cut", both(kill_agent, Hosts.cut), phases=("training", "saving")),
    Fault("both cut one way", both(_CUT_ONE_WAY, _CUT_ONE_WAY), phases=("training", "saving")),
    Fault("clock an hour ahead", _nothing, None, ("training",), clock="+1h"),
    Fault("clock an hour behind", _nothing, None, ("training",), clock="-1h"),
)


class Trial:
    """A run on two machines, which may be started several times.

    Args:
        folder: a new one, for what the run leaves.
        recipe: from `tiny_run.prepare`.
    """

    def __init__(self, folder: Path, recipe: Path) -> None:
        folder.mkdir()
        self.folder, self.output = folder, folder / "out"
        self.words = [str(recipe), f"training.output_dir={self.output}"]
        self.command = printed_command(self.words)

    def start(self, hosts: Hosts, phase: str, clocks: Mapping[int, str]) -> None:
        """Start torchrun's agents on all machines, with processes that linger in a phase.

        A machine with a clock of its own starts all of its programs anew, since libfaketime must be there before them.
        """
        for number, name in enumerate(hosts.names):
            self.note_file(number).unlink(missing_ok=True)
            if number in clocks:
                self._start_with_clock(hosts, number, clocks[number])
                continue

            def on_the_machine(number: int = number, name: str = name) -> int:
                hosts.settle(number)
                os.environ[WORK_VARIABLE] = str(self.note_file(number))
                forked.fork_ahead_of_torchrun(partial(self._work, phase), 1)
                torchrun.main(self._words_on(number))
                return 0

            def beside_it(number: int = number, first: Callable[[], int] = on_the_machine) -> int:
                hosts.enter(number)
                return forked.Forked(first).wait(3600.0) or 0

            hosts.note(number, forked.Forked(beside_it, self.folder / name))

    def _work(self, phase: str, rank: int) -> int:
        """In the training process of a machine."""
        linger(phase)
        return train(self.words)

    def _start_with_clock(self, hosts: Hosts, number: int, clock: str) -> None:
        environment = {"FAKETIME": clock, "LD_PRELOAD": str(faketime())}
        environment[WORK_VARIABLE] = str(self.note_file(number))
        with (self.folder / f"{hosts.names[number]}.err").open("w") as log:
            command = [sys.executable, "-m", "torch.distributed.run", *self._words_on(number)]
            hosts.start(number, command, log=log, environment=environment)

    def _words_on(self, number: int) -> list[str]:
        return [{"$machine": str(number), "$first": "a"}.get(word, word) for word in self.command]

    def note_file(self, number: int) -> Path:
        """Where the training process of a machine notes its work."""
        return self.folder / f"note-{number}"

    def wait_for(self, phase: str, number: int, hosts: Hosts, step: int) -> bool:
        """Wait until a machine's process is in a phase, in training from a step on; False: it does not come to it."""
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline and len(hosts.still_running()) == len(hosts.names):
            if phase == "saving":
                is_met = (self.output / f".checkpoint-{2 * SAVED}.tmp").exists()
            else:
                is_met = is_in(phase, read_note(self.note_file(number)), step)
            if is_met:
                return True
            time.sleep(0.001)
        return False

    def told(self, hosts: Hosts) -> list[str]:
        """The errors that were printed."""
        lines = [line for name in hosts.names for line in (self.folder / f"{name}.err").read_text().splitlines()]
        return [line for line in lines if line.startswith("error: ")]

    def tail(self) -> str:
        """The end of what the machines have printed."""
        return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted(self.folder.glob("?.err")))


def faketime() -> Path | None:
    """libfaketime, of Debian's package faketime; None: it is not here."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)


def is_in(phase: str, note: str, step: int = STEPS) -> bool:
    """Whether a process that has noted this work is in a phase, in training from a step on."""
    at = int(note.rpartition(" ")[2]) if note.startswith("training step") else 0
    return {
        "first step": at == 1,
        "training": at >= step,
        "saving": False,
        "evaluation": note == "evaluating",
        "generation": note.startswith("translating"),
        "end": note == ENDING,
        "preparing": note.startswith("preparing"),
        "recovery": note.startswith("creating"),
    }[phase]


def linger(phase: str) -> None:
    """Let this process stay for a while where it first comes to a phase; it saves slowly to be struck there."""
    note, save_file = Job.note, save.save_file
    left = [LINGER_SECONDS]

    def noting(job: Job, work: str) -> None:
        note(job, work)
        if left and is_in(phase, work):
            time.sleep(left.pop())

    def saving(tensors: Any, file: Path, **kwargs: Any) -> None:
        if phase == "saving" and file.name.startswith("optimizer"):
            time.sleep(LINGER_SECONDS)
        save_file(tensors, file, **kwargs)

    Job.note, save.save_file = noting, saving  # type: ignore[method-assign,assignment]


def printed_command(words: list[str]) -> list[str]:
    """The arguments of torchrun in the file that is printed for it, with the shell's variables."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if launch(["torchrun", *words, "--nodes", "2", "--no-plan"]):
            raise RuntimeError("the file for torchrun was not printed")
    (line,) = re.findall(r"^torchrun (.*) &$", out.getvalue().replace("\\\n", " "), re.MULTILINE)
    return shlex.split(line)


def still_running(hosts: Hosts, phase: str, fault: Fault) -> list[str]:
    """The machines whose run has not ended.

    Where training processes have come to their end, torchrun's agent waits for another one that is lost for up to
    300 s, which no option changes.
    """
    if phase != "end" or fault.told is None:
        return hosts.still_running()
    return [name for number, name in enumerate(hosts.names) if len(hosts.processes(number)) > 1]


def strike(trial: Trial, fault: Fault, phase: str, number: int, step: int) -> tuple[list[str], dict[str, Any]]:
    """Start the run, and let the fault happen; what is not as it should be, and what happened."""
    with Hosts(2) as hosts:
        trial.start(hosts, phase, {number: fault.clock} if fault.clock else {})
        if not trial.wait_for(phase, number, hosts, step):
            return [f"the run did not come to {phase}: {trial.tail()}"], {}
        struck = time.monotonic()
        fault.strike(hosts, number)
        limit = LIMIT_SECONDS if fault.told else RUN_SECONDS
        while (left := still_running(hosts, phase, fault)) and time.monotonic() < struck + limit:
            time.sleep(0.02)
        seconds = time.monotonic() - struck
        problems = [f"after {seconds:.0f} s still running: {', '.join(left)}; {trial.tail()}"] if left else []
        codes = hosts.exit_codes()
    told = trial.told(hosts)
    if fault.told is None and (codes != [0, 0] or told):
        problems.append(f"the run did not go on to its end: {trial.tail()}")
    machines = [line.split(":")[1] for line in told]
    is_twice = len(set(machines)) < len(told)
    # A run that was at its end may be over before it notices.
    is_over = phase in ("generation", "end") and not told and 0 in codes
    if fault.told and not is_over and (not told or is_twice or not all(re.search(fault.told, line) for line in told)):
        problems.append(f"{len(told)} messages, and each machine may have one, as {fault.told!r}: {trial.tail()}")
    return problems, {"seconds": round(seconds, 1), "exit_code": codes, "told": told, "hang": bool(left)}


def try_fault(
    fault: Fault, phase: str, number: int, recipe: Path, folder: Path, expected: dict[str, torch.Tensor], step: int
) -> dict[str, Any]:
    """Run with the fault on a machine, then start again without it."""
    trial = Trial(folder, recipe)
    problems: list[str] = []
    if phase == "recovery":
        problems, _ = strike(trial, FAULTS[0], "training", 1 - number, step)
    new_problems, result = strike(trial, fault, phase, number, step)
    problems += new_problems
    before = 0 if phase in ("preparing", "first step") else SAVED
    losses = chaos.what_was_lost(before, trial.words, folder, trial.output, expected)
    return {**result, "loss": bool(losses), "problems": [*problems, *losses]}


def main() -> int:
    """Try every fault on each machine; the exit code is 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="try the faults whose description has this word in it")
    parser.add_argument("--rounds", type=int, default=1, help="how often each fault is tried, at other steps")
    parser.add_argument("--output", type=Path, help="a folder for the results and for runs in which anything was wrong")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: there can be no emulated machines here: {reason}")
        return 0
    # The machines are taken away also when this script is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    forked.import_ahead(1)
    with tempfile.TemporaryDirectory(prefix="hf_gpipe-chaos-") as temporary:
        folder = options.output or Path(temporary)
        results = Results(folder)
        done = {result["fault"] for result in results.read()}
        expected, recipe = undisturbed(folder)
        for round_number in range(options.rounds):
            every = [(phase, fault, n) for phase in PHASES for fault in FAULTS for n in fault.machines]
            for phase, fault, number in every:
                key = f"{fault.name}, in {phase}, on {'ab'[number]}, round {round_number}"
                if fault.clock and faketime() is None:
                    print(f"skipped: {key}: libfaketime is not here (Debian's package faketime)")
                    continue
                if phase in fault.phases and options.only in key and key not in done:
                    step = random.Random(key).randrange(MET, STEPS - SAVED)
                    run = folder / re.sub(r"\W+", "-", key)
                    shutil.rmtree(run, ignore_errors=True)
                    result = try_fault(fault, phase, number, recipe, run, expected, step)
                    results.add(key, {"fault": key, **result}, run)
        return results.summary()


def undisturbed(folder: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """The weights that a run without a fault ends with, and its recipe."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        own = {"save": SAVED, "evaluate": EVALUATED, "timeout": TIMEOUT_SECONDS}
        tiny_run.prepare(folder, stages=2, steps=STEPS, **own)
    words = [str(recipe), f"training.output_dir={folder / 'undisturbed'}", "pipeline.num_processes=1"]
    if forked.Forked(lambda: train(words), folder / "undisturbed").wait() != 0:
        raise RuntimeError((folder / "undisturbed.err").read_text())
    return tiny_run.weights(folder / "undisturbed"), recipe


if __name__ == "__main__":
    sys.exit(main())
