"""How the runs learnt: validation losses at equal updates, tokens and operations, and whether they are at their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
from bench.report import table

from hf_gpipe.data import build_corpus
from hf_gpipe.errors import UserError
from hf_gpipe.from_recipe.model import model_config
from hf_gpipe.recipe import Recipe
from translation_scaling.curves import Curve, read_curve
from translation_scaling.results import Finished
from translation_scaling.sizes import body_parameters, total_parameters
from translation_scaling.to_end import Verdict, begin_of_decay, judge

CURVES_PICTURE = "curves.png"

_EXPLANATION = """\
The validation loss of each run in nats a character: its best, and its best until the most updates, tokens (of sources
and targets) and operations that all runs have made. Operations are 6 for each parameter that a token meets, forward
and backward; half of the tokens are taken to meet the encoder, half the decoder and the softmax, and attention's
products are left out. A run is compared by its best loss, so what it learns by heart later does not count. How much it
has learnt by heart until then is seen in the losses a token, in training and in validation."""


class Size(NamedTuple):
    """Parameters of a recipe's model, counted on the meta device.

    Attributes:
        total: all; a tied one counts once.
        body: those of the matrices of attention and feed-forward layers.
        table: those of one embedding table.
    """

    total: int
    body: int
    table: int

    @classmethod
    def of(cls, recipe: Recipe) -> Size:
        """With the vocabulary that the recipe's tokenizer will have."""
        model = recipe.model
        if model.path is None and "vocab_size" not in model.config:
            model = model.replace(config={**model.config, "vocab_size": recipe.tokenizer.vocab_size})
        config = model_config(recipe.replace(model=model), None)
        width = int(getattr(config, "d_model", None) or config.hidden_size)
        return cls(total_parameters(config), body_parameters(config), int(config.vocab_size) * width)


@dataclass(frozen=True)
class Learning:
    """A run with its curve.

    Attributes:
        name: of the run.
        curve: everything it has logged.
        operations_per_token: of a forward and backward.
        verdict: whether it was at its end when its learning rate began to fall; None: it was not trained to its end.
    """

    name: str
    curve: Curve
    operations_per_token: float
    verdict: Verdict | None = None

    @classmethod
    def of(cls, run: Finished) -> Learning:
        """Read from the folder of a run."""
        size, curve = Size.of(run.recipe), read_curve(run.folder)
        begin = begin_of_decay(run.folder)
        verdict = None if begin is None else judge(curve.constant_points(begin))
        return cls(f"{run.model}, seed {run.seed}", curve, 3.0 * (size.body + size.table), verdict)

    def rows(self) -> list[dict[str, Any]]:
        """A row of a table for each entry that has a loss."""
        model, _, seed = self.name.rpartition(", seed ")
        own = {"operations_per_token": self.operations_per_token}
        return [row | own for row in self.curve.rows(model, int(seed))]

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> list[Learning]:
        """All runs of a table with such rows; a curve's entry has what was logged at its update alone."""
        runs = []
        for (name, seed), own in table.groupby(["run", "seed"], sort=False):
            entries = tuple(
                {key: value for key, value in row.items() if pd.notna(value)} for row in own.to_dict("records")
            )
            runs.append(cls(f"{name}, seed {seed}", Curve(entries), own["operations_per_token"].iloc[0]))
        return runs


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


def learning(runs: Sequence[Learning], recipe: Recipe) -> str:
    """The section of the report about runs that have validation losses; the recipe says what they were trained on."""
    curves = {run.name: run.curve for run in runs}
    updates, at_updates = at_equal_updates(curves)
    tokens, at_tokens = at_equal_compute(curves, dict.fromkeys(curves, 1.0))
    operations, at_operations = at_equal_compute(curves, {run.name: run.operations_per_token for run in runs})
    header = [
        *("run", "updates", "passes", "best loss", "at update", "loss a token: training", "validation"),
        *(f"at {updates:,} updates", f"at {tokens / 1e6:.2f}M tokens", f"at {operations:.2g} operations"),
    ]
    rows = []
    for run in runs:
        best = run.curve.best
        assert best is not None
        losses = (_last(run.curve.entries, key, best.step) for key in ("loss", "eval_loss"))
        equal = (of_run[run.name] for of_run in (at_updates, at_tokens, at_operations))
        rows.append(
            [
                *(run.name, f"{run.curve.step:,}", f"{run.curve.points[-1].passes:.1f}", f"{best.loss:.4f}"),
                *(f"{best.step:,}", *("-" if loss is None else f"{loss:.4f}" for loss in (*losses, *equal))),
            ]
        )
    ends = [f"- {run.name}: {run.verdict}." for run in runs if run.verdict is not None]
    lines = [_EXPLANATION + _distinct(recipe), "", table(header, rows), "", f"![Curves]({CURVES_PICTURE})"]
    return "\n".join([*lines, *(["", "When the learning rate began to fall:", "", *ends] if ends else [])])


def _distinct(recipe: Recipe) -> str:
    """A sentence about the training targets, which recur in many languages; empty where the corpus is not there."""
    if recipe.data.streaming:
        return ""
    try:
        pairs = build_corpus(recipe.data).train
    except UserError:
        return ""
    targets = {pair.target for pair in pairs}
    characters = sum(map(len, targets))
    return f" The {len(pairs):,} training pairs have {len(targets):,} distinct targets, of {characters:,} characters."


def _last(entries: Sequence[Mapping[str, float]], key: str, step: int) -> float | None:
    """The last value that was logged up to a step."""
    return next((entry[key] for entry in reversed(entries) if key in entry and entry["step"] <= step), None)
