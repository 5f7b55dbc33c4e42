"""The blocks of a tutorial run in their order and print what the page says; its commands start processes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, REPOSITORY, Block, Page
from tests.forked_command import without_collector

STEP, WITH_TRL, PRINTS = "<!-- step -->", "<!-- step with trl -->", "<!-- prints -->"
TUTORIALS = [page for page in PAGES if page.name.startswith("docs/tutorials/")]


#: In place of torchrun: its processes are forked from it, once it has imported what they import.
TORCHRUN = f"""#!{sys.executable}
import sys
import hf_gpipe.pipeline.pipeline
from tests.forked_command import torchrun
sys.exit(torchrun(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the search path of commands."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "torchrun").write_text(TORCHRUN)
    (folder / "torchrun").chmod(0o755)
    return folder


def printed_by(block: Block, names: dict[str, Any], programs: Path) -> str:
    """Run a block of Python in `names`, or a block of bash, and return what it prints."""
    if block.language == "bash":
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = without_collector({**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)})
        script = f"set -eo pipefail\n{block.text}"
        ran = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=280)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return ran.stdout
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
