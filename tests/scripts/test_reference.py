"""The pages of docs/reference say what the code does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import reference
import transformers
from pages import filled

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}\n" not in CONSTRAINTS.read_text(),
    reason="the pages list the arguments of the release in constraints.txt",
)
def test_the_pages_say_what_the_code_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 0, capsys.readouterr().out


def test_every_key_and_device_is_on_its_page() -> None:
    recipes = reference.recipe_keys()
    assert "**`pipeline.num_stages`**" in recipes
    assert "**`data.kind`**" in recipes
    lists = reference.devices() + reference.links()
    assert all(f"| `{name}` |" in lists for name in (*reference.DEVICES, *reference.LINKS))


def test_a_page_without_a_place_for_a_part_is_an_error() -> None:
    assert filled("a <!-- x -->b<!-- end of x --> c", {"x": "d"}) == "a <!-- x -->d<!-- end of x --> c"
    with pytest.raises(ValueError, match="no place for x"):
        filled("a <!-- x --> c", {"x": "d"})
