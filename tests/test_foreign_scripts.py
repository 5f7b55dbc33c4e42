"""transformers' own example scripts run to their end when only two imports are changed, as docs/trainer.md says.

The scripts are not part of this project. They are looked for in a folder beside the checkout, or in the one that
HF_GPIPE_FOREIGN_SCRIPTS names; where there are none, the tests are skipped. With each launcher all three run one after
another in the same processes, which are forked; scripts/foreign_scripts.py starts each anew.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants, hf_api

from scripts import foreign_scripts
from scripts.foreign_scripts import (
    LAUNCHERS,
    NAMES,
    PIPELINE,
    PUSH,
    REPOSITORY,
    STAND_INS,
    differences,
    resumable,
    words_of,
)
from scripts.forked import Forked
from tests import forked_command
from tests.stand_ins.hub import Hub, stand_in_hub

FOREIGN = Path(os.environ.get("HF_GPIPE_FOREIGN_SCRIPTS", REPOSITORY.parent / "shared/foreign"))
STEPS = 4
#: The planner, which one run is left to, takes as long as such a training.
DECIDED = ["--schedule", "1f1b", "--recompute", "none", "--partition", "3"]

pytestmark = pytest.mark.skipif(
    not (FOREIGN / "run_translation.py").exists(),
    reason=f"there is no run_translation.py in {FOREIGN}; HF_GPIPE_FOREIGN_SCRIPTS names the folder",
)


def run_all(commands: list[list[str]]) -> int:
    """Run scripts one after another in this process."""
    sys.path.insert(0, str(STAND_INS))
    for words in commands:
        forked_command.run_script(words)
    return 0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of the unchanged scripts, in plain-NAME, and of changed ones that ran alone, in alone-NAME."""
    folder = tmp_path_factory.mktemp("foreign")
    foreign_scripts.prepare(folder)
    commands = [[str(FOREIGN / f"run_{n}.py"), *words_of(n, folder, folder / f"plain-{n}", STEPS)] for n in NAMES]
    commands += [changed(n, folder, folder / f"alone-{n}", is_decided=n != "translation") for n in NAMES]
    process = forked_command.start_function(folder, run_all, commands)
    process.join(240)
    assert process.exitcode == 0, (folder / "run.err").read_text()[-4000:]
    return folder


def changed(name: str, work: Path, output: Path, *options: str, is_decided: bool = True) -> list[str]:
    script = foreign_scripts.ported(FOREIGN / f"run_{name}.py", work)
    decided = [*DECIDED, "3" if name == "clm" else "4"] if is_decided else []
    return [str(script), *words_of(name, work, output, STEPS), *PIPELINE, *decided, *options]


def launch(launcher: str, commands: list[list[str]]) -> int:
    """Be the launcher, in this process, with the processes of the scripts forked from it."""
    importlib.reload(constants)  # the environment may name another Hub than at their import
    hf_api.api.endpoint = constants.ENDPOINT
    words = [*LAUNCHERS[launcher][3:], __file__]
    if launcher == "torchrun":
        return forked_command.torchrun(words, lambda rank: run_all(commands))

    from accelerate.commands import launch as accelerate

    def simple_launcher(args: argparse.Namespace) -> None:
        _, environment = accelerate.prepare_simple_launcher_cmd_env(args)
        os.environ.update(environment)
        sys.exit(Forked(partial(run_all, commands)).wait())

    accelerate.simple_launcher = simple_launcher
    accelerate.launch_command(accelerate.launch_command_parser().parse_args(words))
    return 1  # it has started something else


def run(launcher: str, commands: list[list[str]], work: Path, **variables: str) -> None:
    folder = work / launcher
    process = forked_command.Program(folder, launch, launcher, commands, **variables, HF_HOME=str(work / "cache"))
    _, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]


@pytest.mark.parametrize("name", NAMES)
def test_alone(name: str, work: Path) -> None:
    found = differences(work / f"alone-{name}", work / f"plain-{name}")
    assert found.are_small, found


def test_under_torchrun_and_pushed(work: Path) -> None:
    with stand_in_hub() as hub:
        commands = [changed(name, work, work / f"torchrun-{name}", *PUSH) for name in NAMES]
        run("torchrun", commands, work, HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
        assert sum({"config.json", "README.md", "tokenizer.json"} <= commit for commit in Hub.commits) >= len(NAMES)
    for name in NAMES:
        found = differences(work / f"torchrun-{name}", work / f"plain-{name}")
        assert found.are_small, (name, found)
    card = ModelCard.load(work / "torchrun-translation/README.md")
    assert card.data.language == ["de", "en"]
    assert "generated_from_trainer" in card.data.tags


def test_resumed_under_accelerate(work: Path) -> None:
    commands = []
    for name in NAMES:
        output = work / f"accelerate-{name}"
        checkpoint = resumable(work / f"alone-{name}", STEPS, output)
        commands.append(changed(name, work, output, "--resume_from_checkpoint", str(checkpoint)))
    run("accelerate", commands, work)
    for name in NAMES:
        found = differences(work / f"accelerate-{name}", work / f"plain-{name}")
        assert found.are_small, (name, found)
