"""A training of two processes, started in one of four ways, whose processes say where they are."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import datasets
from torch.distributed import run as torchrun

from hf_gpipe import PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.checkpoint import lock
from hf_gpipe.data import PairCollator
from hf_gpipe.data.tokenizer import read_tokenizer
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.job.job import Job, read_note
from hf_gpipe.job.store import SECRET_VARIABLE, new_secret
from hf_gpipe.recipe import load_recipe
from hf_gpipe.train import main as train
from scripts import forked
from scripts.emulated_hosts import is_running

NUM_PROCESSES = 2
STEPS, SAVED, EVALUATED = 12, 3, 4
#: How long a process waits for a message, and for others that have not started yet (in the product: 300 s).
TIMEOUT_SECONDS, APART_SECONDS = 8, 40
#: How long a run waits for another one in its directory to end (in the product: 5 s, in which these runs are over).
ENDING_SECONDS = 0.3
#: On these a process raises an error or is stuck, wherever it is in Python.
RAISE_SIGNAL, NO_MEMORY_SIGNAL, STUCK_SIGNAL = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6, signal.SIGRTMIN + 7

COMMAND, TORCHRUN, SCRIPT, BY_HAND = "command", "torchrun", "script", "script by hand"
#: By hand means: with torchrun's variables, from a parent that only waits, as a shell does.
LAUNCHES = (COMMAND, TORCHRUN, SCRIPT, BY_HAND)


#: What torchrun itself says of a process that was killed, whose kind its own end leaves no time to speak.
_AGENT = re.compile(r"^ *exitcode +: -\d+ \(pid: .*|.*SignalException: Process \d+ got signal.*", re.MULTILINE)


def free_port() -> int:
    """A port that nobody has at this moment, and that the system gives nobody: another case may start meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 30_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


@dataclass(frozen=True)
class Lingering:
    """Lets a process stay for a while where it first comes to a phase, to be struck there.

    Attributes:
        work: how the note begins by which the phase is known; empty: it stays nowhere.
        seconds: how long it stays.
    """

    work: str = ""
    seconds: float = 0.0


@dataclass
class Run:
    """A training that has been started.

    Attributes:
        launch: of LAUNCHES.
        recipe: of the command; scripts take its model.
        folder: a new one, for what the processes print and note.
        output: its output directory.
        lingering: where its processes stay.
        port: where they meet; 0: a free one. The command has one of its own.
        environment: variables of all processes.
    """

    launch: str
    recipe: Path
    folder: Path
    output: Path
    lingering: Lingering = Lingering()
    port: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.port = self.port or free_port()
        self.words = [str(self.recipe), f"training.output_dir={self.output}"]
        self.launcher = forked.Forked(self._launch, self.folder / "run")

    def _launch(self) -> int:
        """In the launcher's process: start the others and wait for them."""
        Job.apart, lock.ENDING_SECONDS = timedelta(seconds=APART_SECONDS), ENDING_SECONDS
        os.environ.update({SECRET_VARIABLE: new_secret(), **self.environment})
        # torchrun waits for so long before it kills what does not end.
        os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "10"
        if self.launch == BY_HAND:
            return self._by_hand()
        if self.launch == COMMAND:
            forked.fork_ahead(self._work, self.folder, NUM_PROCESSES)
            return train(self.words)
        forked.fork_ahead_of_torchrun(self._work, NUM_PROCESSES)
        where = ["--nproc-per-node", str(NUM_PROCESSES), "--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        torchrun.main([*where, "-m", "hf_gpipe.train", *self.words])
        return 0

    def _by_hand(self) -> int:
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)})
        os.environ.update({"WORLD_SIZE": str(NUM_PROCESSES), "LOCAL_WORLD_SIZE": str(NUM_PROCESSES)})
        processes = []
        for rank in range(NUM_PROCESSES):
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
            processes.append(forked.Forked(partial(self._work, rank)))
        while any(process.poll() is None for process in processes):
            time.sleep(0.02)
        codes = [process.poll() or 0 for process in processes]
        (self.folder / "codes").write_text(json.dumps(codes))
        # As a shell says it: a signal is 128 and its number.
        return max(code if code >= 0 else 128 - code for code in codes)

    def _work(self, rank: int) -> int:
        """In a process of the training."""
        _note_work(self.folder / f"note-{rank}", self.lingering)
        _handle_mishaps()
        datasets.config.HF_DATASETS_CACHE = self.cache
        note = self.folder / f"process-{rank}"
        note.with_suffix(".new").write_text(f"{os.getpid()} {os.environ['MASTER_PORT']}")
        note.with_suffix(".new").rename(note)
        return train(self.words) if self.launch in (COMMAND, TORCHRUN) else run_script(self.recipe, self.output)

    @property
    def cache(self) -> Path:
        """The cache of prepared data."""
        return self.output.with_name("cache")

    # ------------------------------------------------------------------ as seen from outside

    def workers(self) -> list[int]:
        """The numbers of the training's processes, in the order of their ranks; fewer before all have started."""
        return [int(words[0]) for words in self._processes()]

    def port_of_store(self) -> int | None:
        """Where the processes meet; None before they have started."""
        return next((int(words[1]) for words in self._processes()), None)

    def _processes(self) -> list[list[str]]:
        files = (self.folder / f"process-{rank}" for rank in range(NUM_PROCESSES))
        return [file.read_text().split() for file in files if file.exists()]

    def note(self, rank: int) -> str:
        """The work of a process."""
        return read_note(self.folder / f"note-{rank}")

    def running(self) -> list[int]:
        """The processes that have not ended, the launcher among them."""
        return [pid for pid in (self.launcher.pid, *self.workers()) if self._is_running(pid)]

    def _is_running(self, pid: int) -> bool:
        return self.launcher.poll() is None if pid == self.launcher.pid else is_running(pid)

    def is_silenced(self) -> bool:
        """Whether nobody is left who could say why the run has ended: nothing of it but a shell watches over it, which
        was killed, or process 0 was, which has the store."""
        codes = self.folder / "codes"
        return self.launch == BY_HAND and (not codes.exists() or json.loads(codes.read_text())[0] < 0)

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.running():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launcher.wait(20.0)

    def printed(self, name: str = "err") -> str:
        """The output of the processes."""
        return (self.folder / f"run.{name}").read_text(errors="replace")

    def told(self) -> list[str]:
        """The lines that say why a run has ended."""
        printed = self.printed()
        told = [line for line in printed.splitlines() if line.startswith(("error: ", "stopped by "))]
        if not told and self.launch in (TORCHRUN, SCRIPT):
            return [f"torchrun: {match[0].strip()}" for match in _AGENT.finditer(printed)][-1:]
        return told


def _note_work(path: Path, lingering: Lingering) -> None:
    """Let this process write each note of its work to a file of ours, and stay where it shall."""
    note, left = Job.note, [lingering.seconds]
    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def noting(current: Job, work: str) -> None:
        note(current, work)
        os.pwrite(file, work.encode()[:120].ljust(120), 0)
        if left and lingering.work and work.startswith(lingering.work):
            time.sleep(left.pop())

    Job.note = noting  # type: ignore[method-assign]


def _handle_mishaps() -> None:
    def fail(error: type[Exception]) -> Callable[[int, FrameType | None], NoReturn]:
        def handle(number: int, frame: FrameType | None) -> NoReturn:
            raise error("injected")

        return handle

    signal.signal(RAISE_SIGNAL, fail(ValueError))
    signal.signal(NO_MEMORY_SIGNAL, fail(MemoryError))
    signal.signal(STUCK_SIGNAL, lambda number, frame: forked.stuck())


def run_script(recipe: Path, output: Path) -> int:
    """Run as a user's script in Python does; returns the exit code."""
    try:
        _script(recipe, output)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        # As the interpreter does with what a script does not catch.
        try:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        except SystemExit as error:
            return error.code if isinstance(error.code, int) else 1
        return 1
    return 0


def _script(recipe: Path, output: Path) -> None:
    """Train the recipe's model on rows that are drawn."""
    tokenizer, dice = read_tokenizer(recipe.with_name("tokenizer")), random.Random(0)
    drawn = [[dice.randrange(3, 40) for _ in range(dice.randrange(2, 9))] for _ in range(24)]
    rows: Any = [{"input_ids": ids, "labels": [*ids, tokenizer.eos_token_id]} for ids in drawn]
    arguments = PipelineTrainingArguments(
        output_dir=str(output),
        num_stages=2,
        num_micro_batches=2,
        schedule="gpipe",
        recompute="stage",
        partition="count",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=SAVED,
        eval_strategy="steps",
        eval_steps=EVALUATED,
        ddp_timeout=TIMEOUT_SECONDS,
        enable_jit_checkpoint=True,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    model, collator = model_config(load_recipe(recipe), tokenizer), PairCollator.for_tokenizer(tokenizer)
    trainer = PipelineTrainer(model, arguments, collator, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
