"""The planner's predictions for recipes that are too large to run here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_gpipe.recipe import load_recipe


@dataclass(frozen=True)
class Predicted:
    """A recipe's plan.

    Attributes:
        plan: what `python -m hf_gpipe.plan --json` printed; None: it raised an error.
        error: why.
        accumulation: mini-batches of a step.
    """

    name: str
    plan: dict[str, Any] | None
    error: str
    accumulation: int

    @property
    def tokens_per_second(self) -> float:
        """Of sources and targets, if every row were as long as the recipe allows."""
        assert self.plan is not None
        shape = self.plan["micro_batch"]
        tokens = self.plan["rows"] * (shape["source_tokens"] + shape["target_tokens"]) * self.accumulation
        return float(tokens / self.plan["step_seconds"])

    @property
    def heaviest(self) -> dict[str, Any]:
        """The process that needs the most memory."""
        assert self.plan is not None
        found: dict[str, Any] = max(self.plan["processes"], key=lambda process: process["memory_bytes"]["total"])
        return found


def predict(recipe: Path, words: Sequence[str]) -> Predicted:
    """Ask the planner's command, in a process of its own; with --search in its words, for the fastest plan.

    Raises RecipeError where the recipe is wrong.
    """
    accumulation = load_recipe(recipe).training.gradient_accumulation_steps
    command = [sys.executable, "-m", "hf_gpipe.plan", str(recipe), *words, "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    # 1: it does not fit, which the plan says too.
    if result.returncode not in (0, 1) or not result.stdout.strip():
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return Predicted(recipe.stem, None, lines[-1] if lines else f"exit code {result.returncode}", accumulation)
    found = json.loads(result.stdout)
    if "--search" in words:
        found = found["fastest"][0] if found["fastest"] else found["leanest"]
    return Predicted(recipe.stem, found, "", accumulation)
