"""The time that runs will take, how far they have come and when they will end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from hf_gpipe.data.formats import read_jsonl
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import DataSection
from translation_scaling import to_end
from translation_scaling.curves import Curve, read_curve
from translation_scaling.execute import is_running
from translation_scaling.runs import Run

#: Target tokens of a pair on average, and those that two cores train on in a second, for the recipes l10n-*.yaml;
#: docs/scaling.md says how this was measured.
TOKENS_PER_PAIR = 8.7
TOKENS_PER_SECOND = {"base": 8000, "deep": 3000, "wide": 3500}


def hours_text(runs: Sequence[Run], share: float = 1.0, listed: set[tuple[str, int]] | None = None) -> str:
    """A line for each run with the hours that it will take on a share of the corpus, and their sum.

    Args:
        runs: in order.
        share: of the pairs.
        listed: the runs that were listed before, to which these are added; they count no second time.
    """
    counts: dict[str, Mapping[str, int]] = {}
    listed = set() if listed is None else listed
    lines, total = [], 0.0
    for number, run in enumerate(runs, 1):
        text = "as above"
        if run.key not in listed:
            hours = _hours(run, counts, share)
            total += hours or 0.0
            text = "unknown" if hours is None else f"{'at least ' * run.to_end}{hours:.1f} hours"
        listed.add(run.key)
        lines.append(f"[{number}/{len(runs)}] {run.title}: {text}")
    return "\n".join([*lines, f"in all at least {total:.1f} hours"])


def _hours(run: Run, counts: dict[str, Mapping[str, int]], share: float) -> float | None:
    """Of a whole run on two cores; None where there is no measure of its model or its data."""
    recipe = run.resolved()
    data, training = recipe.data, recipe.training
    model = next((word for word in TOKENS_PER_SECOND if word in run.recipe.stem.split("-")), None)
    if model is None or training.batch_tokens is None or data.path is None:
        return None
    # Twice the layers take about twice the time.
    speed = TOKENS_PER_SECOND[model] / (2 if "deeper" in run.name.split("-") else 1)
    if training.max_steps is not None:
        return training.max_steps * training.batch_tokens / speed / 3600
    if data.path not in counts:
        counts[data.path] = pairs_of(data)
    mine = counts[data.path]
    num_training = share * sum(mine.get(language, 0) for language in data.languages or mine)
    num_training *= 1 - data.validation_fraction - data.test_fraction
    # A training to its end may end as soon as it has made the fewest passes.
    passes = to_end.FEWEST_PASSES * (1 + to_end.DECAY) if run.to_end else training.num_train_epochs
    return passes * num_training * TOKENS_PER_PAIR / speed / 3600


def pairs_of(data: DataSection) -> Mapping[str, int]:
    """The number of pairs of each language of a corpus: by the summary beside it, or counted. Empty: there is none."""
    path = Path(str(data.path))
    summary = path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + ".json")
    if summary.exists():
        counts: Mapping[str, int] = json.loads(summary.read_text(encoding="utf-8"))["pairs"]
        return counts
    if not path.exists() or data.kind != "jsonl" or data.language_field is None:
        return {}
    return Counter(row[data.language_field] for _, row in read_jsonl(path))


class Status(NamedTuple):
    """How far a run has come.

    Attributes:
        phase: in a few words.
        curve: what it has logged.
        end: the last update, as far as it is known or can be expected; None: neither.
        is_expected: whether the end depends on evaluations to come.
    """

    phase: str
    curve: Curve
    end: int | None = None
    is_expected: bool = False

    @property
    def seconds_left(self) -> float | None:
        """Of training; None: it cannot be told yet."""
        if self.phase in ("finished", "of another recipe"):
            return 0.0
        speed = self.curve.steps_per_second
        return None if self.end is None or not speed else max(0, self.end - self.curve.step) / speed


def status_of(run: Run) -> Status:
    """Read from the folder of a run. Raises UserError if its recipe is wrong."""
    progress, curve = run.progress()[0], read_curve(run.folder)
    if progress != "begun":
        words = {"new": "not begun", "other": "of another recipe", "finished": "finished"}
        return Status(words[progress], curve, curve.step if progress == "finished" else None)
    training, points = run.resolved().training, curve.points
    if not run.to_end:
        passes = max((float(entry["epoch"]) for entry in curve.entries if "epoch" in entry), default=0.0)
        by_passes = round(curve.step * training.num_train_epochs / passes) if passes else None
        return Status("training", curve, training.max_steps if training.max_steps is not None else by_passes)
    assert training.eval_steps is not None
    begin = to_end.begin_of_decay(run.folder)
    if begin is not None:
        return Status("final decay", curve, to_end.end_of_decay(begin, training.eval_steps))
    if not points:
        return Status("constant rate", curve, None, True)
    return Status(
        f"constant rate ({to_end.judge(points)})", curve, to_end.expected_end(points, training.eval_steps), True
    )


def status_text(runs: Sequence[Run], now: Callable[[], datetime] = datetime.now) -> str:
    """A paragraph with one line for each run, in order, and when all will end."""
    lines, left, unknown = [], 0.0, 0
    for run in runs:
        try:
            status = status_of(run)
        except UserError as error:
            lines.append(f"{run.title}: {error}")
            continue
        unknown += status.seconds_left is None
        left += status.seconds_left or 0.0
        lines.append(f"{run.title}: {_words(status, is_running(run), now)}")
    end = f"all that is known will end at {_time(now(), left)}, if one run follows the other"
    return "\n".join([*lines, f"{end}; {unknown} runs have no speed yet" if unknown else end])


def _words(status: Status, is_running: bool, now: Callable[[], datetime]) -> str:
    curve, about, seconds = status.curve, "about " * status.is_expected, status.seconds_left
    words = [status.phase + ", running" * is_running]
    if curve.step:
        words.append(f"update {curve.step}" + ("" if status.end is None else f" of {about}{status.end}"))
    if (best := curve.best) is not None:
        words.append(f"best validation loss per character {best.loss:.4f} at update {best.step}")
    if seconds and curve.step:
        words.append(f"{about}{seconds / 3600:.1f} hours left, until {_time(now(), seconds)}")
    return "; ".join(words)


def _time(now: datetime, seconds: float) -> str:
    return f"{now + timedelta(seconds=seconds):%Y-%m-%d %H:%M}"
