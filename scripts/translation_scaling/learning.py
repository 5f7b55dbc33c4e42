"""How the runs learnt: validation losses at equal updates, tokens and operations, and whether they are at their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import table

from hf_gpipe.data import build_corpus
from hf_gpipe.errors import UserError
from hf_gpipe.recipe import Recipe
from translation_scaling import ending
from translation_scaling.curves import Curve, at_equal_compute, at_equal_updates, curve_rows, read_curve
from translation_scaling.results import Finished
from translation_scaling.sizes import size_of_recipe
from translation_scaling.to_end import begin_of_decay

CURVES_PICTURE = "curves.png"

_EXPLANATION = """\
The validation loss of each run in nats a character: its best, and its best until the most updates, tokens (of sources
and targets) and operations that all runs have made. Operations are 6 for each parameter that a token meets, forward
and backward; half of the tokens are taken to meet the encoder, half the decoder and the softmax, and attention's
products are left out. A run is compared by its best loss, so what it learns by heart later does not count. How much it
has learnt by heart until then is seen in the losses a token, in training and in validation."""

_DISTINCT = " The {pairs:,} training pairs have {sentences:,} distinct targets, of {characters:,} characters."


@dataclass(frozen=True)
class Learning:
    """A finished run with its curve.

    Attributes:
        run: what its folder says.
        curve: everything it has logged.
        operations_per_token: of a forward and backward.
    """

    run: Finished
    curve: Curve
    operations_per_token: float

    @classmethod
    def of(cls, run: Finished) -> Learning:
        """Read from the folder of a run."""
        size = size_of_recipe(run.model, run.recipe)
        return cls(run, read_curve(run.folder), 3.0 * (size.body + size.table))

    @property
    def name(self) -> str:
        return f"{self.run.model}, seed {self.run.seed}"

    def rows(self) -> list[dict[str, Any]]:
        """A row of a table for each entry that has a loss."""
        own = {"operations_per_token": self.operations_per_token}
        return [row | own for row in curve_rows(self.run.model, self.run.seed, self.curve)]

    @property
    def verdict(self) -> ending.Verdict | None:
        """Whether it was at its end when its learning rate began to fall; None: it was not trained to its end."""
        begin = begin_of_decay(self.run.folder, self.curve)
        return None if begin is None else ending.judge(self.curve.constant_points(begin))


def learning(runs: Sequence[Learning]) -> str:
    """The section of the report about runs that have validation losses."""
    curves = {one.name: one.curve for one in runs}
    updates, at_updates = at_equal_updates(curves)
    tokens, at_tokens = at_equal_compute(curves, dict.fromkeys(curves, 1.0))
    operations, at_operations = at_equal_compute(curves, {one.name: one.operations_per_token for one in runs})
    header = [
        *("run", "updates", "passes", "best loss", "at update", "loss a token: training", "validation"),
        *(f"at {updates:,} updates", f"at {tokens / 1e6:.2f}M tokens", f"at {operations:.2g} operations"),
    ]
    rows = [
        [
            *(one.name, f"{one.curve.step:,}", f"{one.curve.points[-1].passes:.1f}"),
            *_best(one.curve),
            *(_loss(of_run[one.name]) for of_run in (at_updates, at_tokens, at_operations)),
        ]
        for one in runs
    ]
    ends = [f"- {one.name}: {verdict}." for one in runs if (verdict := one.verdict) is not None]
    lines = [_EXPLANATION + _distinct(runs[0].run.recipe), "", table(header, rows), "", f"![Curves]({CURVES_PICTURE})"]
    if ends:
        lines += ["", "When the learning rate began to fall:", "", *ends]
    return "\n".join(lines)


def _distinct(recipe: Recipe) -> str:
    """A sentence about the training targets, which recur in many languages; empty where the corpus is not there."""
    if recipe.data.streaming:
        return ""
    try:
        pairs = build_corpus(recipe.data).train
    except UserError:
        return ""
    targets = {pair.target for pair in pairs}
    return _DISTINCT.format(pairs=len(pairs), sentences=len(targets), characters=sum(map(len, targets)))


def _best(curve: Curve) -> list[str]:
    best = curve.best
    assert best is not None
    return [
        *(f"{best.loss:.4f}", f"{best.step:,}"),
        _loss(_last(curve.entries, "loss", best.step)),
        _loss(_last(curve.entries, "eval_loss", best.step)),
    ]


def _last(entries: Sequence[Mapping[str, float]], key: str, step: int) -> float | None:
    """The last value that was logged up to a step."""
    return next((entry[key] for entry in reversed(entries) if key in entry and entry["step"] <= step), None)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
