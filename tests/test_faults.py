"""A signal stops a training between two steps, all of it saved; a fault ends every process and loses nothing saved."""

from __future__ import annotations

import ast
import ctypes
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSeq2SeqLM

from hf_gpipe.commands.launch import main as launch
from hf_gpipe.train import main
from scripts import chaos, tiny_run
from tests import forked_command
from tests.forked_command import Program, start_worker
from tests.test_train import ENVIRONMENT, REPOSITORY

pytestmark = pytest.mark.usefixtures("undo_the_command_s_settings", "no_prediction")

STOPPED = 75


def test_each_kind_of_fault(tmp_path: Path) -> None:
    """scripts/chaos.py tries all; here each phase comes once, and each kind."""
    process = forked_command.start_function(tmp_path, chaos.main, ["--quick"])
    try:
        process.join(280)
    finally:
        process.kill()
    out, err = ((tmp_path / name).read_text() for name in ("run.out", "run.err"))
    assert process.exitcode == 0, out + err
    assert re.search(r"1\d faults: 0 hangs, 0 lost or corrupt checkpoints, 0 with anything wrong", out)


def test_faults_that_are_drawn(tmp_path: Path) -> None:
    """A case at least, and in the same folder another: what is done is not done again."""
    words = ["--minutes", "0", "--seed", "3", "--only", "SIGKILL to a process, command", "--output"]
    counts = []
    for turn in ("first", "second"):
        (tmp_path / turn).mkdir()
        process = forked_command.start_function(tmp_path / turn, chaos.main, [*words, str(tmp_path / "out")])
        try:
            process.join(400)
        finally:
            process.kill()
        out, err = ((tmp_path / turn / name).read_text() for name in ("run.out", "run.err"))
        assert process.exitcode == 0, out + err
        results = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
        assert all(one["bit_equal"] and not one["hang"] and not one["loss"] for one in results)
        counts.append(len(results))
    assert 0 < counts[0] < counts[1]
    assert len({one["case"] for one in results}) == counts[1]
    met = [one for one in results if one["met"]]
    assert f"| SIGKILL to a process | command | {len(met)} |" in out or not met


# ---------------------------------------------------------------------- stopping


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe of 60 steps, and what they end with, undisturbed and in one process, in `whole`."""
    folder = tmp_path_factory.mktemp("prepared")
    recipe = tiny_run.prepare(folder)
    text = recipe.read_text().replace("max_steps: 6", "max_steps: 60").replace("save_steps: 2", "save_steps: null")
    recipe.write_text(text.replace(f"timeout_seconds: {tiny_run.TIMEOUT_SECONDS}", "timeout_seconds: 60"))
    assert main([str(recipe), "pipeline.num_processes=1", f"training.output_dir={folder / 'whole'}"]) == 0
    return folder


def wait_for_steps(output: Path, is_running: Callable[[], bool], count: int = 3) -> None:
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or (output / "metrics.jsonl").read_text().count("\n") < count:
        assert is_running()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop_forked(words: Sequence[str], folder: Path, num_processes: int, number: int) -> tuple[int, str]:
    """Start a training in `folder`, send it a signal after some steps; its exit code and stderr."""
    process = forked_command.start(folder, *words, num_processes=num_processes)
    assert process.pid is not None
    try:
        wait_for_steps(folder / "out", process.is_alive)
        os.kill(process.pid, number)
        process.join(60)
    finally:
        process.kill()
    return process.exitcode or 0, (folder / "run.err").read_text()


@pytest.mark.parametrize(("num_processes", "number"), [(2, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_signal_stops_a_training_after_its_step(
    num_processes: int, number: signal.Signals, prepared: Path, tmp_path: Path
) -> None:
    words = [str(prepared / "recipe.yaml"), f"training.output_dir={tmp_path / 'out'}"]
    code, err = stop_forked([*words, f"pipeline.num_processes={num_processes}"], tmp_path, num_processes, number)
    assert code == STOPPED, err
    (line,) = (line for line in err.splitlines() if not line.startswith("step "))
    found = re.fullmatch(rf"stopped by {number.name} after step (\d+) of 60; all of it is saved in (.*): start.*", line)
    assert found is not None, line
    step, checkpoint = int(found[1]), Path(found[2])
    assert checkpoint == tmp_path / "out" / f"checkpoint-{step}"
    assert not (tmp_path / "out" / "metrics.json").exists(), "it is neither evaluated nor taken for finished"
    AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    stages = [] if num_processes == 1 else ["pipeline.num_stages=1", "pipeline.recompute=none"]
    assert main([*words, "pipeline.num_processes=1", *stages]) == 0
    expected, resumed = tiny_run.weights(prepared / "whole"), tiny_run.weights(tmp_path / "out")
    assert resumed.keys() == expected.keys()
    for name in expected:
        if num_processes == 1:
            assert torch.equal(resumed[name], expected[name]), name
        else:
            torch.testing.assert_close(resumed[name], expected[name], rtol=0, atol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 61)), "no loss is lost or twice"


def test_a_second_run_in_the_output_directory_leaves_the_first_alone(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a lock the second one deletes what the first one is writing, and both end with a missing file."""
    words = [str(prepared / "recipe.yaml"), f"training.output_dir={tmp_path / 'out'}", "training.max_steps=100000"]
    words += ["training.resume=never", "pipeline.num_processes=2"]
    first, started, processes = forked_command.start(tmp_path, *words), [], list[int]()
    try:
        wait_for_steps(tmp_path / "out", first.is_alive)
        before = (tmp_path / "out/recipe.yaml").stat().st_mtime_ns
        processes = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        for pid in processes:  # else both train for as long as the second one waits
            os.kill(pid, signal.SIGSTOP)
        (tmp_path / "second").mkdir()
        second = forked_command.start(tmp_path / "second", *words)
        started.append(second)
        second.join(100)
        (line,) = (tmp_path / "second/run.err").read_text().splitlines()
        assert second.exitcode == 2
        assert re.search(r"^error: \S+/out is the output directory of the run of process \d+ on machine ", line)
        assert (tmp_path / "out/recipe.yaml").stat().st_mtime_ns == before
        done = (tmp_path / "out/metrics.jsonl").read_text()
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        wait_for_steps(tmp_path / "out", first.is_alive, done.count("\n") + 1)
        # Of the first, nobody can tidy up.
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        first.join(60)
    finally:
        for process in (first, *started):
            process.kill()
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # one that stands still does not see that its launcher has ended
    again = ["training.max_steps=2", "training.resume=never", "pipeline.num_processes=1"]
    assert main([*words, *again]) == 0, capsys.readouterr().err


def exchange(one: Path, other: Path) -> None:
    """Let two files have each other's names, at one moment (renameat2 with RENAME_EXCHANGE)."""
    assert ctypes.CDLL(None).renameat2(-100, bytes(one), -100, bytes(other), 2) == 0


def test_metrics_that_cannot_be_written_end_all_processes(prepared: Path, tmp_path: Path) -> None:
    """As where a file system becomes read-only, or a quota is used up, between two checkpoints."""
    words = [str(prepared / "recipe.yaml"), f"training.output_dir={tmp_path / 'out'}", "training.max_steps=100000"]
    words.append("pipeline.num_processes=2")
    process, file = forked_command.start(tmp_path, *words), tmp_path / "out/metrics.jsonl"
    try:
        wait_for_steps(tmp_path / "out", process.is_alive)
        # At once, for the next step makes the file anew.
        (tmp_path / "directory").mkdir()
        exchange(tmp_path / "directory", file)
        process.join(60)
    finally:
        process.kill()
    told = [line for line in (tmp_path / "run.err").read_text().splitlines() if not line.startswith("step ")]
    assert told == [
        f"error: cannot write {file}: Is a directory; earlier checkpoints are unchanged; make room there, or correct "
        "the permissions, and start again"
    ]
    assert process.exitcode == 2


def test_the_file_for_torchrun_passes_the_signal_on(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(prepared / "recipe.yaml"), f"training.output_dir={tmp_path / 'out'}", "pipeline.num_stages=2"]
    assert launch(["torchrun", *words, "--nodes", "1", "--no-plan"]) == 0
    (tmp_path / "job.sh").write_text(capsys.readouterr().out)
    (tmp_path / "programs").mkdir()
    with forked_command.torchrun_in_path(tmp_path / "programs") as path:
        job = subprocess.Popen(
            ["bash", str(tmp_path / "job.sh")],
            cwd=REPOSITORY,
            env={**ENVIRONMENT, "PATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for_steps(tmp_path / "out", lambda: job.poll() is None)
            job.send_signal(signal.SIGTERM)
            _, err = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == STOPPED, err
    found = re.search(r"stopped by SIGTERM after step (\d+) of 60; all of it is saved in (\S+):", err)
    assert found is not None, err
    assert err.count("stopped by SIGTERM after") == 1
    assert (tmp_path / "out/stopped").read_text() == f"after step {found[1]}: {found[2]}\n"
    AutoModelForSeq2SeqLM.from_pretrained(found[2])


def test_a_job_that_is_started_again_without_a_lost_machine_goes_on_with_those_left(
    prepared: Path, tmp_path: Path
) -> None:
    """torchrun's agents start processes anew, in a store that still has the addresses of those before."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    output = tmp_path / "out"
    words = [str(prepared / "recipe.yaml"), f"training.output_dir={output}", "evaluation.max_examples=1"]
    words += ["pipeline.num_stages=auto", "pipeline.replicas=auto"]

    def start(num_processes: int, save_steps: int) -> list[BaseProcess]:
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num_processes)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        folders = [tmp_path / f"{num_processes}-{rank}" for rank in range(num_processes)]
        for folder in folders:
            folder.mkdir()
        saving = f"training.save_steps={save_steps}"
        return [
            start_worker(folder, *words, saving, RANK=str(rank), **variables) for rank, folder in enumerate(folders)
        ]

    processes = start(3, save_steps=2)
    try:
        wait_for_steps(output, processes[0].is_alive)
        while not list(output.glob("checkpoint-*")):
            assert processes[0].is_alive()
            time.sleep(0.01)
        os.kill(processes[2].pid or 0, signal.SIGKILL)
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [1, 1, -signal.SIGKILL]
        processes = start(2, save_steps=60)
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0], (tmp_path / "2-0" / "run.err").read_text()
    finally:
        for process in processes:
            process.kill()
    told = (tmp_path / "2-0" / "run.out").read_text()
    assert "resuming   from" in told
    assert "in 2 processes" in told or "2 stages of" in told
    expected, found = tiny_run.weights(prepared / "whole"), tiny_run.weights(output)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


STUCK = """
import ctypes, os, signal, sys, threading, time
from hf_gpipe.job.world import World
from hf_gpipe.training.stopping import StopRequest
with StopRequest(World.current(), float(sys.argv[2])):
    print("ready", flush=True)
    if sys.argv[1] == "python":
        while True:
            time.sleep(60)
    # Outside of Python, as in gloo, where no handler of Python's runs.
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)
"""


@pytest.mark.parametrize("where", ["python", "outside"])
@pytest.mark.parametrize("why", ["a second one came", "its step did not end within 0.2 seconds"])
def test_a_step_that_does_not_end_is_not_waited_for(where: str, why: str, tmp_path: Path) -> None:
    process = Program(tmp_path, STUCK, where, "0.2" if "0.2" in why else "60")
    try:
        assert process.line() == "ready\n"
        process.send_signal(signal.SIGTERM)
        if "a second" in why:
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)  # the same request, as when a scheduler and a launcher both send it
            time.sleep(1.0)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert err.startswith(f"error: process 0 was asked to stop by SIGTERM and ended without saving, since {why}")


ENDED_EARLY = """
import os, signal, subprocess, sys, time
from hf_gpipe.job import failures
from hf_gpipe.job.world import World
from hf_gpipe.training.stopping import StopRequest
with StopRequest(World.current(), 60.0) as request:
    child = subprocess.Popen(["true"])
    child.wait()
    request.peers = [child.pid]
    if sys.argv[1] == "failed":
        failures.note(MemoryError("too little"))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


@pytest.mark.parametrize(("what", "told"), [("failed", "error: process 0: MemoryError: too little\n"), ("stopped", "")])
def test_a_process_that_looks_for_advice_is_told_to_end(what: str, told: str, tmp_path: Path) -> None:
    """torchrun ends it as soon as another one has ended, which has only lost its connection and says nothing."""
    ended = Program(tmp_path, ENDED_EARLY, what)
    _, err = ended.communicate(timeout=100)
    assert (ended.returncode, err) == (1, told)


def test_the_handlers_are_given_back(tmp_path: Path) -> None:
    program = """
import os, signal, warnings
from hf_gpipe.job.world import World
from hf_gpipe.training.stopping import StopRequest
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 has one of forks beside threads
before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
with StopRequest(World.current(), 5.0) as request:
    is_there, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say, b".")
        signal.pause()
    os.read(is_there, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM, "a child has its usual handlers"
    assert request.signal == 0, "and its signals are its own"
assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
assert signal.set_wakeup_fd(-1) == -1
"""
    process = Program(tmp_path, program)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


# ---------------------------------------------------------------------- what is never done


FORBIDDEN = {
    "import": {"pickle", "dill", "cloudpickle", "marshal", "shelve"},
    "call": {
        "eval",
        "exec",
        "os.system",
        "os.popen",
        "torch.load",
        "yaml.load",
        "yaml.unsafe_load",
        "numpy.load",
    },
    "keyword": {"shell", "allow_pickle"},
}
#: Functions of torch.distributed that pickle what they send.
PICKLES = re.compile(r"(gather|scatter|broadcast|send|recv)_object(_list)?\b")


def test_nothing_is_unpickled_evaluated_or_given_to_a_shell() -> None:
    """What comes out of a checkpoint, a recipe, a data file or another process is data."""
    for path in sorted((REPOSITORY / "hf_gpipe").rglob("*.py")):
        assert not PICKLES.search(path.read_text().replace("use_gather_object", "")), f"{path}"
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
                assert not FORBIDDEN["import"] & names, f"{path}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in FORBIDDEN["import"], f"{path}:{node.lineno}"
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in FORBIDDEN["call"], f"{path}:{node.lineno}"
                given = {keyword.arg for keyword in node.keywords}
                assert not FORBIDDEN["keyword"] & given, f"{path}:{node.lineno}"
