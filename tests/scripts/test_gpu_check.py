"""The checks for GPUs run on emulated devices, and report what fails."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hf_gpipe.schedule import build, placement_for
from tests.emulated_cuda.processes import check_available, run_emulated
from tests.forked_command import without_collector

ROOT = Path(__file__).parents[2]


def checked(*words: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """What `bash scripts/gpu_check.sh` did."""
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *words]
    environment = without_collector({**os.environ, "HF_GPIPE_PYTHON": python, "OMP_NUM_THREADS": "1"})
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)


def run_pytest(words: list[str]) -> int:
    return int(pytest.main(words))


def test_on_emulated_devices(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of each kind of check one: in one process and in two, with one killed, and speed without its figures.

    Of exactness all but what differs from these in the type of the weights alone. Checks in one process of two devices
    asked for schedules that need a process for each, so the script failed for every owner of two GPUs.

    The command's words are those of the script; it runs in a process that is forked from one with the devices.
    """
    check_available()
    words = ["float64, 2 p", "a failed", "killed", "raised", "step, 2 processes", "sanitizer, 1", "profile", "speed"]
    words += ["float64, weights and", "plan: activations", "float64, one p", "float64, 2 replicas", "autocast"]
    words += ["BLOCKING=1, one p", "synchronisations of a step, one process, 2"]
    only = [f"--only={word}" for word in words]
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    given = ["--emulated", "--quick", "--output", str(tmp_path), "--profile", str(tmp_path / "profiles"), *only]
    _, *command = checked(*given, python=str(tmp_path / "python")).stdout.splitlines()
    assert command[:4] == ["-m", "tests.emulated_cuda", "-m", "pytest"]
    assert run_emulated(run_pytest, 1, command[4:], timeout=280.0) == [0]
    assert "EMULATED" in capfd.readouterr().out
    text = (tmp_path / "gpu_check.json").read_text()
    found = json.loads(text)
    assert found["emulated"]
    assert found["passed"]
    assert len(found["environment"]["gpus"]) == 8
    results = {one["kind"]: one["result"] for one in found["checks"]}
    assert results.keys() == {"exactness", "hang", "order", "waiting", "plan", "profile", "speed"}
    assert {name for name, result in results.items() if result == "skipped"} == {"order"}
    assert not [one for one in found["checks"] if one["result"] == "failed"]
    speed = {one["name"]: one["figures"] for one in found["checks"] if one["kind"] == "speed"}
    assert len(speed) == 4
    assert len({round(one["last loss"], 4) for name, one in speed.items() if name.startswith("2 GPUs")}) == 1
    assert all(one.keys() == {"last loss"} for one in speed.values())
    assert str(ROOT) not in text
    assert (tmp_path / "profiles" / "trace-stage1.json").exists()


def test_two_processes_on_one_emulated_device(tmp_path: Path) -> None:
    """The mode was refused, so an owner of one GPU saw nothing of NCCL."""
    check_available()
    words = ["-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", "--emulated", "--quick", "--one-gpu"]
    given = [*words, "--output", str(tmp_path), "--only=ZeRO", "--only=replicas, chunks"]
    assert run_emulated(run_pytest, 1, given, timeout=280.0) == [0]
    found = json.loads((tmp_path / "gpu_check.json").read_text())["checks"]
    assert {(one["kind"], one["result"]) for one in found} == {("one GPU", "passed")}
    assert len(found) == 2


def test_the_most_important_comes_first() -> None:
    from tests.gpu.checks import Check
    from tests.gpu.half_hour import in_order

    names = ["plan: graphs stay", "exactness: compiled, 1 GPU", "speed: 1 GPU", "exactness: float64", "plan: chunks"]
    names += ["one GPU: ZeRO-1", "profile: all"]
    made = in_order([Check(*name.split(": "), "", {}) for name in names])
    order = ["float64", "ZeRO-1", "1 GPU", "compiled, 1 GPU", "chunks", "graphs stay", "all"]
    assert [check.name for check in made] == order


def test_the_time_of_all_checks() -> None:
    """A check that had less time than others is run again, unless it failed in another way."""
    from tests.gpu.checks import Result
    from tests.gpu.half_hour import Clock

    started = (time.time() - psutil.Process().create_time()) / 60
    clock = Clock.of(started + 1.0, 300.0)
    check = clock.begin()
    assert not clock.is_over
    assert check.limit <= 60
    late, wrong = (Result("hang", "a", "failed", True, 1.0, {}, message) for message in ("took too long", "wrong"))
    assert clock.was_cut(check, late)
    assert not clock.was_cut(check, wrong)
    assert Clock.of(started + 0.4, 300.0).is_over
    forever = Clock.of(0.0, 300.0)
    assert forever.begin() == forever
    assert not forever.was_cut(forever, late)


def test_the_same_command_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A call that its machine ended had no results. Each check writes its own, and the next call keeps it."""
    check_available()
    words = ["-m", "gpu", "tests/gpu", "-p", "no:cacheprovider", "--emulated", "--quick", "--half-hour", "--only=gain"]
    given, file = [*words, "--output", str(tmp_path)], tmp_path / "gpu_check.json"
    assert run_emulated(run_pytest, 1, [*given, "--minutes=0.4"], timeout=280.0) == [0]
    assert "0 passed, 0 failed, 0 skipped, 2 still to run by the same command" in capfd.readouterr().out
    assert run_emulated(run_pytest, 1, [*given, "--minutes=4"], timeout=280.0) == [0]
    assert "2 passed, 0 failed, 0 skipped; written" in capfd.readouterr().out
    before = json.loads(file.read_text())["checks"]
    assert run_emulated(run_pytest, 1, [*given, "--minutes=4"], timeout=280.0) == [0]
    assert json.loads(file.read_text())["checks"] == before
    found = json.loads(file.read_text())
    file.write_text(json.dumps(found | {"environment": found["environment"] | {"torch": "2.0"}}))
    assert run_emulated(run_pytest, 1, [*given, "--minutes=0.4"], timeout=280.0) == [0]
    assert json.loads(file.read_text())["checks"] == []


def test_no_gpu_is_one_message(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = checked("--output", str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "error: torch finds no CUDA device here" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "text", "decides"),
    [("waiting", "took too long", True), ("waiting", "exit code 1", False), ("exactness", "exit code 1", True)],
)
def test_a_check_that_breaks_is_a_result(kind: str, text: str, decides: bool) -> None:
    from bench.processes import JobFailedError

    from tests.gpu.checks import Result

    error = JobFailedError(f'waits: {text}\n  File "/a/b.py", line 3\nValueError: in /a/b.py')
    result = Result.of_error(kind, "a", 1.0, error)
    assert (result.result, result.decides) == ("failed", decides)
    assert result.message == f"{text}: ValueError: in b.py"


def test_no_names_and_no_folders() -> None:
    from tests.gpu.checks import anonymous

    assert anonymous("at /home/someone/src/x.py:3 < ~/y.py") == "at x.py:3 < y.py"
    user = getpass.getuser()
    text = anonymous(f"{socket.gethostname()} of {user} at 3 tokens/s, 1/2")
    assert text == "HOST of USER at 3 tokens/s, 1/2"


@pytest.mark.parametrize(("num_processes", "num_devices"), [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)])
def test_every_schedule_has_a_table_on_these_gpus(num_processes: int, num_devices: int) -> None:
    from tests.gpu.checks import FAMILIES
    from tests.gpu.exact import NUM_MICRO_BATCHES, stages_of, ways

    for quick in (True, False):
        for _, schedule, recompute in ways(FAMILIES, num_processes, num_devices, quick=quick):
            num_stages = stages_of(schedule, num_processes, num_devices)
            assert num_stages >= min(num_devices, 2)
            placement = placement_for(schedule, num_stages, num_processes)
            build(schedule, num_stages, NUM_MICRO_BATCHES, placement, "none" if recompute == "block" else recompute)


def test_the_work_of_the_comparisons() -> None:
    from tests.gpu.peaks import peak_flops
    from tests.gpu.speed import comparisons, cut, flops_per_token

    gpus = [{"name": "NVIDIA H100 80GB HBM3", "free_bytes": 80 << 30}] * 4
    made = comparisons({"gpus": gpus}, 4, quick=False, emulated=False)
    assert [one.num_gpus for one in made] == [1, 2, 4]
    for one in made:
        for case in one.cases:
            assert sum(case.options.blocks) in (0, one.work.layers)
    work = made[0].work
    assert flops_per_token(work) == pytest.approx(6 * 1.3e9, rel=0.15)
    assert cut(work, 2)[0] > cut(work, 2)[1], "the head takes time"
    assert not comparisons({"gpus": [{"name": "", "free_bytes": 1 << 30}]}, 1, quick=False, emulated=False)
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA L40S") == 362.05e12
    assert peak_flops("NVIDIA H100 NVL") == 835e12
    assert peak_flops("NVIDIA H200 NVL") is None
    assert peak_flops("NVIDIA GeForce RTX 4090 Laptop GPU") is None
