"""The blocks of a tutorial run in their order and print what the page says; its commands start processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked_command
from tests.docs.pages import PAGES, REPOSITORY, Block, Page

STEP, WITH_TRL, PRINTS = "<!-- step -->", "<!-- step with trl -->", "<!-- prints -->"
TUTORIALS = [page for page in PAGES if page.name.startswith("docs/tutorials/")]


@pytest.fixture(scope="module")
def search_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """For commands, of which torchrun is forked."""
    with forked_command.torchrun_in_path(tmp_path_factory.mktemp("programs")) as path:
        yield path


def run_bash(text: str, path: str) -> str:
    """Run a block of bash with this search path for commands, and return what it prints."""
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    command = ["bash", "-c", f"set -eo pipefail\n{text}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def printed_by(block: Block, names: dict[str, Any], path: str) -> str:
    """Run a block of Python in `names`, or a block of bash, and return what it prints."""
    if block.language == "bash":
        return run_bash(block.text, path)
    assert block.language == "python"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        exec(compile(block.text, f"block in line {block.line}", "exec"), names)
    return stdout.getvalue()


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_runs(page: Page, search_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples", "LICENSE"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(REPOSITORY))
    has_trl = importlib.util.find_spec("trl") is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    for block in page.blocks:
        if block.note == STEP or (block.note == WITH_TRL and has_trl):
            printed = printed_by(block, names, search_path)
        elif block.note == WITH_TRL:
            printed = None
        elif block.note == PRINTS and printed is not None:
            wanted = block.text.strip().splitlines()
            assert printed.strip().splitlines()[-len(wanted) :] == wanted, f"{page.name}:{block.line}"
