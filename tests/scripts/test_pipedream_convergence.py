"""The comparison of losses: its cases are valid recipes, and its table shows the common rate and the best one."""

from __future__ import annotations

import math
from pathlib import Path

import pipedream_convergence as script
import pytest

from hf_gpipe.recipe import load_recipe

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


@pytest.mark.parametrize("case", script.CASES)
def test_each_case_is_a_valid_recipe(case: str) -> None:
    recipe = load_recipe(QUICKSTART, [*script.SMALL, *script.CASES[case]])
    assert recipe.pipeline.schedule == ("1f1b" if case == "1f1b" else case.split(",")[0])
    assert recipe.training.logging_steps * 8 == recipe.training.max_steps, "a quarter and half of the steps are logged"


def test_the_table_has_the_common_and_the_best_rate() -> None:
    held_out = {("1f1b", 0.1): (1.0, 3.0), ("1f1b", 0.2): (1.0, 2.0), ("pipedream", 0.1): (4.0, 4.5)}
    held_out["pipedream", 0.2] = (0.5, math.nan)  # diverged
    results = [
        {"case": case, "rate": rate, "held_out": loss, "losses": {"1": 9.0, "50": 5.0, "100": 4.0, "200": loss}}
        for (case, rate), losses in held_out.items()
        for loss in losses
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in script.report(results, 0.1).splitlines()[2:]]
    assert [[row[0], row[1], row[4], row[5], row[6]] for row in rows] == [
        ["1f1b", "0.1", "2.000 (1.000 to 3.000)", "2.000 (1.000 to 3.000)", ""],
        ["1f1b", "0.2", "1.500 (1.000 to 2.000)", "1.500 (1.000 to 2.000)", "best"],
        ["pipedream", "0.1", "4.250 (4.000 to 4.500)", "4.250 (4.000 to 4.500)", "best"],
    ]
    assert {row[2] for row in rows} == {"5.000 (5.000 to 5.000)"}
