"""The curves of a run: training loss, learning rate and validation loss per character over its updates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_gpipe.checkpoint.directory import step_of

CURVE_FILE, STATE_FILE = "metrics.jsonl", "trainer_state.json"
VALIDATION = "eval_nll_per_character"
_KEYS = ("step", "epoch", "loss", "eval_loss", VALIDATION, "learning_rate", "tokens_per_second", "training_seconds")


class Point(NamedTuple):
    """An evaluation: the updates made, passes over the training pairs, and the validation loss per character."""

    step: int
    passes: float
    loss: float


@dataclass(frozen=True)
class Curve:
    """Everything a run has logged, in the order of its updates."""

    entries: tuple[Mapping[str, Any], ...]

    @property
    def step(self) -> int:
        """Updates made, as far as they were logged."""
        return max((int(entry["step"]) for entry in self.entries), default=0)

    @property
    def points(self) -> list[Point]:
        """The evaluations, those of the final decay too."""
        return [
            Point(int(entry["step"]), float(entry["epoch"]), float(entry[VALIDATION]))
            for entry in self.entries
            if isinstance(entry.get(VALIDATION), int | float) and math.isfinite(entry[VALIDATION])
        ]

    def constant_points(self, begin: int) -> list[Point]:
        """The evaluations before the learning rate fell, after `begin` updates."""
        return [point for point in self.points if point.step <= begin]

    @property
    def best(self) -> Point | None:
        """The evaluation with the least loss."""
        return min(self.points, key=lambda point: point.loss, default=None)

    @property
    def steps_per_second(self) -> float | None:
        """Of the last logged updates; None: there are none."""
        timed = [entry for entry in self.entries if "training_seconds" in entry][-6:]
        seconds = sum(entry["training_seconds"] for entry in timed[1:])
        return (timed[-1]["step"] - timed[0]["step"]) / seconds if seconds else None

    def tokens(self, step: int) -> float:
        """Tokens of sources and targets of the first updates."""
        timed = [entry for entry in self.entries if "training_seconds" in entry and entry["step"] <= step]
        return sum(entry["tokens_per_second"] * entry["training_seconds"] for entry in timed)

    def best_until(self, step: float) -> float | None:
        """The least validation loss up to a step; None: there is no evaluation."""
        return min((point.loss for point in self.points if point.step <= step), default=None)

    def rows(self, name: str, seed: int) -> list[dict[str, Any]]:
        """A row of a table for each entry that has a loss."""
        kept = [entry for entry in self.entries if "loss" in entry or VALIDATION in entry]
        return [{"run": name, "seed": seed} | {key: entry.get(key) for key in _KEYS} for entry in kept]


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the most updates."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return max(checkpoints, key=step_of, default=None)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint: max_steps, log_history, best_model_checkpoint."""
    state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    return state


def read_curve(folder: Path) -> Curve:
    """The curve of the run in a folder; lines that were cut off are left out."""
    path = folder / CURVE_FILE
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "step" in entry:
            entries.append(entry)
    return Curve(tuple(entries))
