"""The blocks of a tutorial run in their order, and print what the page says."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import PAGES, REPOSITORY, Page

STEP, WITH_TRL, PRINTS = "<!-- step -->", "<!-- step with trl -->", "<!-- prints -->"
TUTORIALS = [page for page in PAGES if page.name.startswith("docs/tutorials/")]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_runs(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    has_trl = importlib.util.find_spec("trl") is not None
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    for block in page.blocks:
        if block.note in (STEP, WITH_TRL):
            assert block.language == "python"
            printed = None
            if block.note == STEP or has_trl:
                with contextlib.redirect_stdout(io.StringIO()) as stdout:
                    exec(compile(block.text, f"{page.name}:{block.line}", "exec"), names)
                printed = stdout.getvalue()
        elif block.note == PRINTS and printed is not None:
            assert printed.splitlines()[-1] == block.text.strip(), f"{page.name}:{block.line}"
