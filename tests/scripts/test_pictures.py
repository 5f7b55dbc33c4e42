"""The pictures of the documentation are drawn."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest

from scripts import pictures


@pytest.mark.parametrize("name", ["model", "step", "memory", "gpipe"])
def test_a_picture_is_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures.REPOSITORY)
    # A plan of seven billion parameters takes seconds.
    monkeypatch.setattr(pictures, "command", lambda *_: ["recipes/causal/pretrain.yaml"])
    pictures.PICTURES[name](tmp_path / "drawn.png")
    drawn, kept = (matplotlib.image.imread(path) for path in (tmp_path / "drawn.png", pictures.FOLDER / f"{name}.png"))
    assert drawn.shape == kept.shape
    assert drawn.std() > 0.1


def test_each_picture_stands_in_a_page_beside_its_command() -> None:
    pages = [page.read_text() for page in (pictures.REPOSITORY / "docs").glob("*.md")]
    for name in pictures.PICTURES:
        assert (pictures.FOLDER / f"{name}.png").is_file()
        assert any(f"images/{name}.png" in page and f"scripts/pictures.py {name}" in page for page in pages), name
