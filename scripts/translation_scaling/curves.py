"""The curves of a run: training loss, learning rate and validation loss per character over its updates."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_gpipe.checkpoint.directory import step_of
from translation_scaling.ending import Point

CURVE_FILE, STATE_FILE = "metrics.jsonl", "trainer_state.json"
VALIDATION = "eval_nll_per_character"
_FALLEN = 0.999


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

    def constant_points(self, begin: int | None) -> list[Point]:
        """The evaluations before the learning rate fell; `begin`: the updates before that, None: it has not fallen."""
        return [point for point in self.points if begin is None or point.step <= begin]

    @property
    def best(self) -> Point | None:
        """The evaluation with the least loss."""
        return min(self.points, key=lambda point: point.loss, default=None)

    @property
    def seconds(self) -> float:
        """Of training, without evaluations and checkpoints."""
        return sum(entry.get("training_seconds", 0.0) for entry in self.entries)

    @property
    def steps_per_second(self) -> float | None:
        """Of the last logged updates; None: there are none."""
        timed = [entry for entry in self.entries if "training_seconds" in entry][-6:]
        seconds = sum(entry["training_seconds"] for entry in timed[1:])
        return (timed[-1]["step"] - timed[0]["step"]) / seconds if seconds else None

    def tokens(self, step: int) -> float:
        """Tokens of sources and targets of the first updates."""
        return sum(
            entry["tokens_per_second"] * entry["training_seconds"]
            for entry in self.entries
            if "training_seconds" in entry and entry["step"] <= step
        )

    def best_until(self, step: float) -> float | None:
        """The least validation loss up to a step; None: there is no evaluation."""
        return min((point.loss for point in self.points if point.step <= step), default=None)

    def begin_of_decay(self, end: int) -> int | None:
        """The updates before the learning rate fell, of a training of `end` updates; None: it has not fallen.

        It follows from the cosine of transformers' warmup_stable_decay: of a run whose checkpoints alone were kept,
        nothing else tells it.
        """
        rates = [(int(entry["step"]), float(entry["learning_rate"])) for entry in self.entries if "loss" in entry]
        peak = max((rate for _, rate in rates), default=0.0)
        places = [place for place, (_, rate) in enumerate(rates) if rate >= _FALLEN * peak]
        fallen = [one for one in rates[places[0] :] if one[1] < _FALLEN * peak] if places else []
        if not fallen or not peak:
            return None
        step, rate = fallen[0]
        share = math.acos(2 * rate / peak - 1) / math.pi
        # The logged rate is that of the update before.
        return round((step - 1 - share * end) / (1 - share)) if share < 1 else None


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the most updates."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return max(found, key=step_of, default=None)


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


def restore_curve(folder: Path) -> None:
    """Write the curve anew from the newest checkpoint, if there is no curve or it ends before the checkpoint."""
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None or not (checkpoint / STATE_FILE).exists():
        return
    if read_curve(folder).step >= step_of(checkpoint):
        return
    history = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["log_history"]
    lines = (json.dumps({"step": entry["step"], **entry}) + "\n" for entry in history)
    (folder / CURVE_FILE).write_text("".join(lines), encoding="utf-8")


def max_steps_of(checkpoint: Path) -> int:
    """The updates that the training of a checkpoint was to have."""
    return int(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["max_steps"])


def at_equal_updates(curves: Mapping[str, Curve]) -> tuple[int, dict[str, float | None]]:
    """The most updates that all runs have made, and each one's best validation loss until then."""
    common = min(curve.step for curve in curves.values())
    return common, {name: curve.best_until(common) for name, curve in curves.items()}


def at_equal_compute(
    curves: Mapping[str, Curve], operations_per_token: Mapping[str, float]
) -> tuple[float, dict[str, float | None]]:
    """The most operations that all runs have made, and each one's best validation loss until then.

    Args:
        curves: by name.
        operations_per_token: of a forward and backward, by name.
    """
    spent = {name: curve.tokens(curve.step) * operations_per_token[name] for name, curve in curves.items()}
    common = min(spent.values())
    # A run's updates have about equally many tokens.
    steps = {name: curves[name].step * common / spent[name] if spent[name] else 0 for name in curves}
    return common, {name: curve.best_until(steps[name]) for name, curve in curves.items()}


def curve_rows(name: str, seed: int, curve: Curve) -> Sequence[dict[str, Any]]:
    """A row of a table for each entry that has a loss."""
    keys = ("step", "epoch", "loss", "eval_loss", VALIDATION, "learning_rate", "tokens_per_second", "training_seconds")
    return [
        {"run": name, "seed": seed} | {key: entry.get(key) for key in keys}
        for entry in curve.entries
        if "loss" in entry or VALIDATION in entry
    ]
