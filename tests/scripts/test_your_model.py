"""The page of plans for published models: it is that of its cells, and a cell is what the planner says."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest
import torch
import your_model
from transformers import AutoConfig, AutoModelForCausalLM

#: Billions of parameters, from the models' own reports.
PARAMETERS = {"1.5b": 1.54, "3b": 3.09, "7b": 7.61, "14b": 14.7, "32b": 32.5, "70b": 70.6}


def test_the_page_is_that_of_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["your_model.py", "--check"])
    assert your_model.main() == 0
    grid = len(your_model.SIZES) * len(your_model.METHODS) * len(your_model.COUNTS) * len(your_model.CARDS_GB)
    assert len(your_model.read_lines(your_model.CELLS)) == grid
    longest = grid // len(your_model.CARDS_GB) * len(your_model.LONGEST_GB)
    assert len(your_model.read_lines(your_model.LONGEST)) == longest


@pytest.mark.parametrize("size", PARAMETERS)
def test_configurations_have_the_published_size(size: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(your_model.CELLS.parent / size))
    assert model.num_parameters() / 1e9 == pytest.approx(PARAMETERS[size], rel=0.01)


def test_a_cell_is_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(your_model.DOCS.parent)
    planned = [asdict(cell) for cell in your_model.cells_of("1.5b", "lora", counts=[1], cards=[12, 16])]
    texts = [{name: "" if value is None else str(value) for name, value in cell.items()} for cell in planned]
    assert all(cell in your_model.read_lines(your_model.CELLS) for cell in texts), texts


def test_the_longest_rows_are_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that fits one card with short rows alone, and two cards with longer ones."""
    monkeypatch.chdir(your_model.DOCS.parent)
    monkeypatch.setattr(your_model, "LENGTHS", (2048, 4096))
    monkeypatch.setattr(your_model, "LONGEST_GB", (24,))
    written = {
        (line["cards"], line["gb"]): line
        for line in your_model.read_lines(your_model.LONGEST)
        if line["size"] == "14b" and line["method"] == "lora"
    }
    for found in your_model.longest_of("14b", "lora", counts=[1, 2]):
        line = written[str(found.cards), str(found.gb)]
        assert (found.whole, found.chunks) == tuple(min(int(line[name]), 4096) for name in ("whole", "chunks"))


def test_a_larger_card_and_more_cards_are_never_worse() -> None:
    """Of cards with the same rates."""
    seconds = {
        (cell["size"], cell["method"], int(cell["cards"]), int(cell["gb"])): float(cell["step_seconds"] or "inf")
        for cell in your_model.read_lines(your_model.CELLS)
    }
    for (size, method, cards, gb), value in seconds.items():
        if gb < 48:
            larger = min(more for more in your_model.CARDS_GB if more > gb)
            assert seconds[size, method, cards, larger] <= value
        if cards < 8:
            assert seconds[size, method, 2 * cards, gb] <= value
