"""GPipe's Table 1, as scripts/table1.py computes it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "table1.py"
SPEC = importlib.util.spec_from_file_location("table1", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
table1 = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(table1)


def test_all_five_parameter_counts_to_the_printed_digits() -> None:
    counts = [(table1.printed(table1.formula(layers)), printed) for _, _, layers, printed, *_ in table1.PAPER]
    assert [ours for ours, _ in counts] == [papers for _, papers in counts] == [
        "282.2M", "785.8M", "5.3B", "21.0B", "83.9B",
    ]  # fmt: skip


def test_the_planners_model_has_the_papers_layers() -> None:
    """Positions more and a bias less, whatever the depth."""
    model = table1.Model()
    for _, _, layers, *_ in table1.PAPER:
        difference = model.costs(1, layers).total.count - table1.formula(layers)
        assert difference == table1.LENGTH * table1.WIDTH - table1.VOCABULARY


def test_the_papers_depths_fit_with_a_pipeline_and_the_naive_ones_less() -> None:
    model = table1.Model()
    assert model.fits("Pipeline-1", 1, 13)
    assert model.fits("Pipeline-8", 8, 103)
    assert not model.fits("Naive-1", 1, 13)
    assert model.most_layers("Pipeline-1", 1) == pytest.approx(17, abs=2)
