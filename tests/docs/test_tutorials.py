"""The blocks of a tutorial run in their order and print what the page says; its commands start processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests import forked_command
from tests.docs.pages import PAGES, REPOSITORY, Block, Page

STEP, WITH_TRL, PRINTS = "<!-- step -->", "<!-- step with trl -->", "<!-- prints -->"
TUTORIALS = [page for page in PAGES if page.name.startswith("docs/tutorials/")]


#: In place of torchrun: it asks the test for one in a forked process, waits for that, and prints what it printed.
TORCHRUN = """#!/bin/sh
asked=$(mktemp -d "$(dirname "$0")/asked.XXXXXX")
printf '%s\\n' "$PWD" "$@" > "$asked/words.part"
mv "$asked/words.part" "$asked/words"
while [ ! -e "$asked/code" ]; do sleep 0.05; done
cat "$asked/run.out"
cat "$asked/run.err" >&2
exit "$(cat "$asked/code")"
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the search path of commands."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "torchrun").write_text(TORCHRUN)
    (folder / "torchrun").chmod(0o755)
    return folder


def torchrun(folder: str, *words: str) -> int:
    """torchrun in this process and in a folder."""
    os.chdir(folder)
    return forked_command.torchrun(words)


def run_bash(text: str, programs: Path) -> str:
    """Run a block of bash, fork the launchers that it asks for, and return what it prints."""
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    script, environment = f"set -eo pipefail\n{text}", {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    launchers: dict[Path, BaseProcess] = {}
    with (programs / "out").open("w+") as out, (programs / "err").open("w+") as err:
        bash = subprocess.Popen(["bash", "-c", script], env=environment, stdout=out, stderr=err)
        while bash.poll() is None:
            for asked in programs.glob("asked.*/words"):
                words = asked.read_text().splitlines()
                launchers[asked.parent] = forked_command.start_function(asked.parent, torchrun, *words)
                asked.unlink()
            for folder in [folder for folder, launcher in launchers.items() if launcher.exitcode is not None]:
                (folder / "code.part").write_text(str(launchers.pop(folder).exitcode))
                (folder / "code.part").rename(folder / "code")
            time.sleep(0.02)
    assert bash.returncode == 0, (programs / "err").read_text()[-3000:]
    return (programs / "out").read_text()


def printed_by(block: Block, names: dict[str, Any], programs: Path) -> str:
    """Run a block of Python in `names`, or a block of bash, and return what it prints."""
    if block.language == "bash":
        return run_bash(block.text, programs)
    assert block.language == "python"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(block.text, f"block in line {block.line}", "exec"), names)
    return stdout.getvalue()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_runs(page: Page, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples", "LICENSE"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    has_trl = importlib.util.find_spec("trl") is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    for block in page.blocks:
        if block.note == STEP or (block.note == WITH_TRL and has_trl):
            printed = printed_by(block, names, programs)
        elif block.note == WITH_TRL:
            printed = None
        elif block.note == PRINTS and printed is not None:
            wanted = block.text.strip().splitlines()
            assert printed.strip().splitlines()[-len(wanted) :] == wanted, f"{page.name}:{block.line}"
