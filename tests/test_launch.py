"""The files of `hf-gpipe launch`: they parse, and say what the recipe and the plan say; and how a launcher is noticed.

The file for torchrun is run by tests/test_faults.py.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hf_gpipe.commands import train
from hf_gpipe.commands.launch import main
from hf_gpipe.commands.launch_file import ENGINES
from hf_gpipe.job.started import first_node, of_srun, tasks_per_node
from scripts import tiny_run
from tests import gloo
from tests.conftest import leave_out

pytestmark = pytest.mark.usefixtures("undo_the_command_s_settings", "no_prediction")

SMALL = ["pipeline.num_stages=2", "training.max_steps=2", "training.eval_steps=null"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.prepare(tmp_path_factory.mktemp("launch"))


def printed(capsys: pytest.CaptureFixture[str], *args: str | Path) -> str:
    code = main(list(map(str, args)))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def joined(script: str) -> str:
    """A script with the lines joined that end in a backslash."""
    return re.sub(r" \\\n *", " ", script)


def check_bash(script: str) -> None:
    result = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("stop_seconds", "shutdown"), [("30", 40), ("100.5", 111)])
def test_each_file_parses_and_leaves_time_to_save(
    stop_seconds: str, shutdown: int, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [recipe, "training.output_dir=an output", f"training.stop_seconds={stop_seconds}", "pipeline.device=auto"]
    options = [
        "pipeline.num_stages=4",
        "--nodes",
        "2",
        "--no-plan",
        "--device",
        "h100",
        "--image",
        "im",
        "--claim",
        "c",
    ]
    arguments = shlex.join([*map(str, words), options[0]])
    files = {engine: joined(printed(capsys, engine, *words, *options)) for engine in ENGINES}

    check_bash(files["torchrun"])
    check_bash(files["slurm"])
    assert all("HF_GPIPE_SECRET" in files[engine] for engine in ENGINES if engine != "ray")
    made = re.search("^export HF_GPIPE_SECRET=.*$", files["slurm"], re.MULTILINE)
    assert made is not None
    script = f"unset HF_GPIPE_SECRET\n{made[0]}\necho $HF_GPIPE_SECRET\n"
    secrets = {subprocess.run(["bash", "-c", script], capture_output=True, text=True).stdout for _ in range(2)}
    assert len(secrets) == 2
    assert all(re.fullmatch(r"[0-9a-f]{64}\n", secret) for secret in secrets)
    slurm = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", files["slurm"], re.MULTILINE))
    assert (slurm["nodes"], slurm["ntasks-per-node"], slurm["gpus-per-node"]) == ("2", "2", "2")
    assert slurm["signal"] == f"TERM@{shutdown + 20}"
    assert f"srun --kill-on-bad-exit=1 ${{container:-}} python -m hf_gpipe.train {arguments}\n" in files["slurm"]
    for word in (
        "##SBATCH --cpus-per-task=",
        "# source ",
        "# export HF_HOME=",
        "# export NCCL_SOCKET_IFNAME=",
        "# container=",
    ):
        assert f"\n{word}" in files["slurm"], "a line for the site's own"

    runtime, job = yaml.safe_load_all(files["kubernetes"])
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == shutdown + 20
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "c"}
    trainer = job["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("im", 2, 2)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 2}}
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "recipe"

    task = yaml.safe_load(files["skypilot"])
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:2")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]

    for script in (files["torchrun"], trainer["command"][2], task["run"]):
        check_bash(script)
        assert f"-m hf_gpipe.train {arguments} &" in script
        assert f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={shutdown}\n" in script
    for script in (files["torchrun"], task["run"], files["slurm"], trainer["command"][2]):
        assert f"stopped='an output/{train.STOPPED_FILE}'\n" in script

    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(files["ray"]).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert values == {"FOLDER": os.getcwd(), "ARGUMENTS": [*map(str, words), options[0]]}
    assert "num_workers=4, use_gpu=True" in files["ray"]


def test_the_plan_is_in_the_file_and_its_ranks_in_the_command(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two replicas of two stages on two machines: over a slow link the replicas of a stage are on one machine."""
    words = [recipe, "pipeline.num_stages=2", "pipeline.replicas=2", "pipeline.device=cpu", "--nodes", "2"]
    slow = printed(capsys, "slurm", *words, "--links", "1Mbit/s+1ms,25GB/s")
    assert not [line for line in slow.splitlines() if len(line) > 100 and str(recipe) not in line]
    slow = joined(slow)
    assert "pipeline.placement=0,1 2,3' pipeline.num_processes=4" in slow
    assert "Machines of stage 0: 0; stage 1: 1" in re.sub(r"\n# +", " ", slow)
    assert re.search(r"^# +step +\S+ m?s", slow, re.MULTILINE), slow
    assert "gpus" not in slow
    check_bash(slow)
    # The planner chooses the mesh for the cluster, which a run does not know.
    words = [recipe, "pipeline.num_stages=auto", "pipeline.replicas=auto", "pipeline.device=cpu"]
    chosen = printed(capsys, "torchrun", *words, "--nodes", "2", "--nproc-per-node", "1")
    command = next(line for line in joined(chosen).splitlines() if "-m hf_gpipe.train" in line)
    assert "auto" not in command.replace("recompute=auto", "")
    assert "pipeline.num_processes=2" in command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slrum", "RECIPE", "--nodes", "2"], "'slrum' is not an engine; .*did you mean 'slurm'"),
        (["slurm", "RECIPE", "--nodes", "2"], "the recipe has 3 processes, and --nodes is 2"),
        (["slurm", "RECIPE", "--nodes", "0"], "--nodes is 0"),
        (["slurm", "RECIPE", "pipeline.replicas=auto", "--nodes", "2"], "add --nproc-per-node P"),
        (["kubernetes", "RECIPE", "--nodes", "3", "--no-plan"], "--image is not given"),
        (["skypilot", "RECIPE", "--nodes", "3", "--no-plan", "pipeline.device=auto"], "--device is not given"),
        (["slurm", "RECIPE"], "--nodes; hf-gpipe launch --help"),
        (["torchrun", "RECIPE", 'training.output_dir="a\\ntouch b"', "--nodes", "1", "--no-plan"], "has a line break"),
        (["slurm", "RECIPE", "model.config.x='a\ntouch b'", "--nodes", "1", "--no-plan"], "has a line break"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], message: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe) if word == "RECIPE" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(f"error: .*{message}", err), err


# ---------------------------------------------------------------------- who started this process

TASK = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "123",
}


def test_a_task_of_srun_knows_its_rank_and_the_first_node() -> None:
    assert of_srun(TASK) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "10123",
    }


@pytest.mark.parametrize(
    "changes",
    [{"SLURM_STEP_ID": ""}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["sbatch", "salloc", "alone"],
)
def test_what_slurm_starts_alone_waits_for_nobody(changes: dict[str, str]) -> None:
    assert of_srun({**TASK, **changes}) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b[1-2]", "a"), ("n[001-010]", "n001"), ("n[3,5-7],x", "n3"), ("r[1-2]n[05,7]-ib", "r1n05-ib")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(1, 5)), min_size=1))
def test_tasks_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{tasks}(x{count})" if count > 1 else f"{tasks}" for tasks, count in runs)
    assert tasks_per_node(text) == [tasks for tasks, count in runs for _ in range(count)]


def _task(words: list[str], environment: dict[str, str], errors: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(train.main(words))


def test_tasks_of_srun_meet_and_tell_an_error_once(recipe: Path, tmp_path: Path) -> None:
    step = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    words = [str(recipe), "pipeline.num_stages=1", f"training.output_dir={tmp_path / 'out'}"]
    context = multiprocessing.get_context("forkserver")
    tasks = []
    for rank in range(2):
        own = {**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        tasks.append(context.Process(target=_task, args=(words, own, tmp_path / f"{rank}")))
        tasks[-1].start()
    for task in tasks:
        task.join(100)
    assert [task.exitcode for task in tasks] == [2, 2]
    # Libraries say things of their own as they are imported.
    told = [line for rank in range(2) for line in (tmp_path / f"{rank}").read_text().split("\n") if "error" in line]
    assert len(told) == 1
    assert told[0].startswith("error: 2 processes were started for num_stages=1")


def _in_a_group(texts: list[str]) -> list[str]:
    """Call the function of files for Ray in the process group that is here; their errors."""
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        leave_out(patch)
        for text in texts:
            module = ModuleType("job")
            exec(compile(text, "job.py", "exec"), vars(module))
            try:
                module.train()  # type: ignore[attr-defined]  # the file has it
                errors.append("")
            except RuntimeError as found:
                errors.append(str(found))
            assert dist.is_initialized()
    return errors


def test_ray_s_function_trains_in_a_group_that_is_there(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words: list[Any] = [recipe, *SMALL, f"training.output_dir={tmp_path / 'out'}", "--nodes", "2", "--no-plan"]
    text = printed(capsys, "ray", *words)
    # An error ends the function, not the worker.
    wrong = text.replace("num_stages=2", "num_stages=1")
    assert gloo.run_gloo(_in_a_group, 2, [wrong, text]) == [["hf_gpipe.train ended with exit code 2", ""]] * 2
    assert (tmp_path / "out/metrics.json").exists()
