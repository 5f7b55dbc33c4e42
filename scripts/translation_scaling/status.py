"""What runs will take, and how far they have come and when they will end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from hf_gpipe.data.formats import read_jsonl
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import DataSection, Recipe
from translation_scaling import ending
from translation_scaling.curves import Curve, read_curve
from translation_scaling.execute import is_running
from translation_scaling.runs import Run
from translation_scaling.to_end import begin_of_decay, is_finished

#: Target tokens of a pair on average, and those that two cores train on in a second, for the recipes l10n-*.yaml;
#: docs/scaling.md says how this was measured.
TOKENS_PER_PAIR = 8.7
TOKENS_PER_SECOND = {"base": 8000, "deep": 3000, "wide": 3500}
#: The passes to the end of a training that may end as soon as it has made the fewest.
FEWEST_PASSES_TO_END = ending.FEWEST_PASSES * (1 + ending.DECAY)


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
        if (run.name, run.seed) in listed:
            lines.append(f"[{number}/{len(runs)}] {run.title}: as above")
            continue
        listed.add((run.name, run.seed))
        recipe = run.resolved()
        hours = _hours(run, recipe, counts, share)
        total += hours or 0.0
        least = "at least " if run.to_end else ""
        text = "unknown" if hours is None else f"{least}{hours:.1f} hours"
        lines.append(f"[{number}/{len(runs)}] {run.title}: {text}")
    return "\n".join([*lines, f"in all at least {total:.1f} hours"])


def _hours(run: Run, recipe: Recipe, counts: dict[str, Mapping[str, int]], share: float) -> float | None:
    """Of a whole run on two cores; None where there is no measure of its model or its data."""
    model = next((word for word in TOKENS_PER_SECOND if word in run.recipe.stem.split("-")), None)
    speed = TOKENS_PER_SECOND[model] if model is not None else 0
    if not speed or recipe.training.batch_tokens is None or recipe.data.path is None:
        return None
    # Twice the layers take about twice the time.
    speed /= 2 if "deeper" in run.name.split("-") else 1
    if recipe.training.max_steps is not None:
        return recipe.training.max_steps * recipe.training.batch_tokens / speed / 3600
    if recipe.data.path not in counts:
        counts[recipe.data.path] = pairs_of(recipe.data)
    mine = counts[recipe.data.path]
    num_pairs = sum(mine.get(language, 0) for language in recipe.data.languages or mine)
    num_training = share * num_pairs * (1 - recipe.data.validation_fraction - recipe.data.test_fraction)
    passes = FEWEST_PASSES_TO_END if run.to_end else recipe.training.num_train_epochs
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


@dataclass(frozen=True)
class Status:
    """How far a run has come.

    Attributes:
        phase: in a few words.
        curve: what it has logged.
        end: the last update, as far as it is known or can be expected; None: neither.
        is_expected: whether the end depends on evaluations to come.
        is_running: whether it is being trained now.
    """

    phase: str
    curve: Curve
    end: int | None
    is_expected: bool
    is_running: bool

    @property
    def seconds_left(self) -> float | None:
        """Of training; None: it cannot be told yet."""
        speed = self.curve.steps_per_second
        return None if self.end is None or not speed else max(0, self.end - self.curve.step) / speed


def status_of(run: Run) -> Status:
    """Read from the folder of a run. Raises UserError if its recipe is wrong."""
    progress, _ = run.progress()
    curve, running = read_curve(run.folder), is_running(run)
    if progress == "new":
        return Status("not begun", curve, None, False, running)
    if progress == "other":
        return Status("of another recipe", curve, None, False, running)
    if progress == "finished":
        return Status("finished", curve, curve.step, False, running)
    recipe = run.resolved()
    if not run.to_end:
        return Status("training", curve, _fixed_end(recipe, curve), False, running)
    every = recipe.training.eval_steps
    assert every is not None
    begin = begin_of_decay(run.folder, curve)
    if begin is not None and not is_finished(run.folder):
        return Status("final decay", curve, ending.end_of_decay(begin, every), False, running)
    points = curve.points
    if not points:
        return Status("constant rate", curve, None, True, running)
    return Status(f"constant rate ({ending.judge(points)})", curve, ending.expected_end(points, every), True, running)


def _fixed_end(recipe: Recipe, curve: Curve) -> int | None:
    if recipe.training.max_steps is not None:
        return recipe.training.max_steps
    passes = max((float(entry["epoch"]) for entry in curve.entries if "epoch" in entry), default=0.0)
    return round(curve.step * recipe.training.num_train_epochs / passes) if passes else None


def status_text(runs: Sequence[Run], now: Callable[[], datetime] = datetime.now) -> str:
    """A paragraph with one line for each run, in order, and when all will end."""
    lines, left, unknown = [], 0.0, 0
    for run in runs:
        try:
            status = status_of(run)
        except UserError as error:
            lines.append(f"{run.title}: {error}")
            continue
        is_over = status.phase in ("finished", "of another recipe")
        seconds = 0.0 if is_over else status.seconds_left
        unknown += seconds is None
        left += seconds or 0.0
        lines.append(f"{run.title}: {_words(status, None if is_over else seconds, now)}")
    end = f"all that is known will end at {_time(now(), left)}, if one run follows the other"
    lines.append(f"{end}; {unknown} runs have no speed yet" if unknown else end)
    return "\n".join(lines)


def _words(status: Status, seconds: float | None, now: Callable[[], datetime]) -> str:
    words = [status.phase + (", running" if status.is_running else "")]
    if status.curve.step:
        about = "about " if status.is_expected else ""
        end = "" if status.end is None else f" of {about}{status.end}"
        words.append(f"update {status.curve.step}{end}")
    if (best := status.curve.best) is not None:
        words.append(f"best validation loss per character {best.loss:.4f} at update {best.step}")
    if seconds is not None and status.curve.step:
        words.append(f"{'about ' * status.is_expected}{seconds / 3600:.1f} hours left, until {_time(now(), seconds)}")
    return "; ".join(words)


def _time(now: datetime, seconds: float) -> str:
    return f"{now + timedelta(seconds=seconds):%Y-%m-%d %H:%M}"
