"""A plan that a page shows is the one that its command prints, and says which mini-batch it is of."""

from __future__ import annotations

import contextlib
import io
import shlex
from functools import cache

import pytest

from hf_gpipe.commands.plan import main
from tests.docs.pages import PAGES, REPOSITORY, Block, Page

PLAN = "hf-gpipe plan "


def commands(page: Page) -> list[Block]:
    return [block for block in page.blocks if block.language == "bash" and block.text.startswith(PLAN)]


def shown(page: Page) -> list[tuple[str, Block]]:
    """The plans of a page, each with the last command before it."""
    plans = [block for block in page.blocks if block.text.startswith("verdict ")]
    return [(max(commands(page), key=lambda c: (c.line < plan.line, c.line)).text, plan) for plan in plans]


@cache
def printed(command: str) -> str:
    """Return what the command prints."""
    (line,) = command.replace("\\\n", "").strip().splitlines()
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        assert main(shlex.split(line, comments=True)[2:]) in (0, 1)
    return stdout.getvalue()


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "100")


def test_the_first_command_of_the_readme_needs_no_licence_and_no_download() -> None:
    """It asked the Hub for a model that only those can read who have accepted its licence."""
    (first, *_) = commands(next(page for page in PAGES if page.name == "README.md"))
    assert printed(first.text).startswith("verdict     fits: ")


@pytest.mark.parametrize("page", [page for page in PAGES if shown(page)], ids=lambda page: page.name)
def test_a_plan_on_a_page(page: Page) -> None:
    """A tutorial gave the seconds of a step of short rows, and left out that they were short."""
    for command, plan in shown(page):
        first = command.strip().split("\n\n")[0].splitlines()
        own = "\n".join(first[: next(i for i, line in enumerate(first) if not line.endswith("\\")) + 1])
        text = printed(own)
        assert "for a mini-batch of " in plan.text, f"{page.name}:{plan.line}"
        for paragraph in plan.text.strip().split("\n\n"):
            assert paragraph in text, f"{page.name}:{plan.line}"
