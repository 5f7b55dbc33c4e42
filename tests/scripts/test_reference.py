"""The pages of docs/reference say what the code does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import reference
import transformers

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}\n" not in CONSTRAINTS.read_text(),
    reason="the pages list the arguments of the release in constraints.txt",
)
def test_the_pages_say_what_the_code_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 0, capsys.readouterr().out


def test_every_key_and_device_is_on_its_page() -> None:
    recipes, devices = reference.recipes_page(), reference.devices_page()
    assert "**`pipeline.num_stages`**" in recipes
    assert "**`data.kind`**" in recipes
    assert all(f"| `{name}` |" in devices for name in (*reference.DEVICES, *reference.LINKS))
