"""The cells of the notebook of the examples run in their order, at the size of a trial run."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

from tests import forked_command
from tests.docs.pages import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "three_strategies.ipynb"
CELLS = [one for one in json.loads(NOTEBOOK.read_text())["cells"] if one["cell_type"] == "code"]


def run_script(words: list[str], folder: Path) -> int:
    """As `python words...` does in `folder`."""
    os.chdir(folder)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def torchrun(folder: Path, command: str, number: int) -> None:
    """Run `torchrun --nproc-per-node K script arguments...` in forked processes."""
    launcher, option, count, *words = shlex.split(command)
    assert (launcher, option) == ("torchrun", "--nproc-per-node")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": port, "TRANSFORMERS_VERBOSITY": "error"}
    processes = []
    for rank in map(str, range(int(count))):
        (folder / f"{number}-{rank}").mkdir()
        variables = shared | {"RANK": rank, "LOCAL_RANK": rank}
        own = folder / f"{number}-{rank}"
        processes.append(forked_command.start_function(own, run_script, words, folder, variables=variables))
    for rank, process in enumerate(processes):
        process.join(200)
        assert process.exitcode == 0, (folder / f"{number}-{rank}" / "run.err").read_text()[-3000:]


def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINY", "1")
    mpl.use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    for cell in CELLS:
        text = "".join(cell["source"])
        if text.startswith("%%writefile "):
            first, _, rest = text.partition("\n")
            (tmp_path / first.removeprefix("%%writefile ")).write_text(rest)
            continue
        lines = text.splitlines()
        for line in lines:
            if line.startswith("!"):
                torchrun(tmp_path, line.removeprefix("!"), number)
                number += 1
        exec(compile("\n".join(one for one in lines if one[:1] not in "!%"), "cell", "exec"), names)
    counts = names["counts"]
    assert set(names["found"]["resnet", 2]) == {(how, m) for how in ("none", "stage") for m in counts}
    for model in ("resnet", "transformer"):
        assert list(names["ablation"](model).index) == list(names["memory"](model).index) == counts
        naive, best = (names["found"][model, 2]["none", m]["timeline"] for m in (1, 8))
        actions = [[span for span in one.spans if span.action.micro_batch is not None] for one in (naive, best)]
        assert [len(own) for own in actions] == [4, 32]
