"""The metrics of finished runs, as tables in CSV files and as arrays (seeds, languages)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hf_gpipe.errors import DataError
from hf_gpipe.recipe import Recipe, load_recipe
from hf_gpipe.tasks.translation.buckets import BUCKETS
from translation_scaling.runs import METRICS_FILE, RECIPE_FILE, starts, wall_seconds

RESULTS_FILE, RUNS_FILE, BASELINES_FILE = "results.csv", "runs.csv", "baselines.csv"
BASELINE = "one language alone"
Key = tuple[str, int]
"""Model and seed of a run."""


@dataclass(frozen=True)
class Measure:
    """A column of the results that models are compared by."""

    key: str
    title: str
    higher_is_better: bool
    digits: int

    @property
    def direction(self) -> str:
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def sign(self) -> int:
        """The sign that turns a difference of scores into a gain: 1 or -1."""
        return 1 if self.higher_is_better else -1


NLL = Measure("nll_per_character", "NLL per target character (nats)", False, 4)
CHRF = Measure("chrf_minus_copy", "chrF minus that of a copy of the source", True, 2)
MEASURES = (NLL, CHRF)

_OF_LANGUAGE = (
    *("bucket", "training_pairs", "num_pairs", "nll", "nll_per_character", "chrf", "chrf_copy", "chrf_minus_copy"),
    *("exact_match", "exact_match_copy", "bleu", "bleu_copy"),
)
#: What the scores of a language depend on besides the model.
_OF_CORPUS = ["training_pairs", "num_pairs", "bucket"]
_OF_COST = (
    *("num_parameters", "num_steps", "training_seconds", "tokens_per_second", "seconds_per_step", "step_seconds"),
    *("bubble", "num_stages", "num_processes", "num_micro_batches", "schedule", "recompute", "device"),
    *("resumed_from_step", "wall_seconds"),
)


@dataclass(frozen=True)
class Finished:
    """A run that has ended, as its folder tells it."""

    model: str
    seed: int
    folder: Path
    metrics: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Finished:
        """Raises DataError where the metrics are none that this script writes about."""
        path = folder / METRICS_FILE
        try:
            metrics = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is not JSON: {error}; delete it and run again") from error
        for key in ("per_language", "nll_per_character", "cost"):
            if key not in metrics:
                raise DataError(f"{path} has no {key}: no translation, or of another version; delete it and run again")
        for language, scores in metrics["per_language"].items():
            if scores["training_pairs"] is None:
                raise DataError(
                    f"{path} does not say how many training pairs {language} has, which decides its place and its "
                    "bucket; give them by data.counts and run again"
                )
        return cls(folder.parent.name, int(folder.name.removeprefix("seed-")), folder, metrics)

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.folder / RECIPE_FILE)

    @property
    def cost(self) -> dict[str, Any]:
        cost: dict[str, Any] = self.metrics["cost"]
        return cost

    @property
    def predicted(self) -> dict[str, Any]:
        """The same by the planner, memory for the longest mini-batch."""
        predicted: dict[str, Any] = self.cost.get("predicted", {})
        return predicted

    @property
    def all_wall_seconds(self) -> float:
        """Of all starts of the command, imports included, where the script started it."""
        return wall_seconds(self.folder) or float(self.cost["wall_seconds"])

    def rows(self) -> list[dict[str, Any]]:
        """One row per language."""
        return [
            {"recipe": self.model, "seed": self.seed, "language": language}
            | {
                name: (scores | {"chrf_minus_copy": scores["chrf"] - scores["chrf_copy"]}).get(name)
                for name in _OF_LANGUAGE
            }
            for language, scores in self.metrics["per_language"].items()
        ]

    def cost_row(self) -> dict[str, Any]:
        return (
            {"recipe": self.model, "seed": self.seed}
            | {name: self.cost.get(name) for name in _OF_COST}
            | {"peak_bytes": largest(self.cost), "predicted_peak_bytes": largest(self.predicted)}
            | {f"predicted_{name}": self.predicted.get(name) for name in ("step_seconds", "bubble")}
            | {"num_starts": len(starts(self.folder)) or None, "wall_seconds_of_all_starts": self.all_wall_seconds}
        )

    def translations(self) -> list[dict[str, Any]]:
        """A row for each test pair, with the likelihood of its reference; empty where these are not known."""
        path = self.folder / "translations.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        return sorted(rows, key=pair_of) if all("nll" in row for row in rows) else []


def largest(cost: Mapping[str, Any]) -> int | None:
    """The peak of the process that had the most."""
    return max(cost.get("peak_bytes") or [0]) or None


def pair_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The language, the source and the target of a translation, by which runs' translations are matched."""
    return row["language"], row["source"], row["target"]


def finished_runs(output: Path, models: Sequence[str] | None, seeds: Sequence[int] | None) -> list[Finished]:
    """The finished runs of an output folder: of these models and seeds, None: of all. Ordered by model, then seed."""
    folders = [path.parent for path in output.glob(f"*/seed-*/{METRICS_FILE}") if path.parent.name[5:].isdigit()]
    finished = [
        Finished.read(folder)
        for folder in folders
        if (models is None or folder.parent.name in models) and (seeds is None or int(folder.name[5:]) in seeds)
    ]
    order = sorted({run.model for run in finished}) if models is None else list(models)
    return sorted(finished, key=lambda run: (order.index(run.model), run.seed))


def write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One table; the first row names the columns. Without rows there is no table."""
    rows = list(rows)
    if not rows:
        path.unlink(missing_ok=True)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> pd.DataFrame:
    """A table that `write_csv` wrote, to the last digit. Raises DataError if there is none."""
    if not path.exists():
        raise DataError(f"there is no {path}; give the folder of a report, with its tables")
    # There are languages with the codes nan and na.
    return pd.read_csv(path, float_precision="round_trip", keep_default_na=False, na_values=[""])


@dataclass(frozen=True)
class Results:
    """The scores of all models on the same languages, the language with the most training pairs first.

    Attributes:
        rows: those of the runs that are compared: a row a language, as in results.csv.
        translations: of the runs whose test pairs are known.
        diverged: the runs whose scores are not all numbers; nothing is computed from them.
        resampled: differences of resampled sentences that were computed already.
    """

    rows: pd.DataFrame
    translations: Mapping[Key, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    diverged: Sequence[Key] = ()
    resampled: dict[tuple[str, str, str], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of_runs(cls, runs: Sequence[Finished]) -> Results:
        """Raises DataError as the next one."""
        rows = pd.DataFrame([row for run in runs for row in run.rows()])
        return cls.of(rows, {(run.model, run.seed): run.translations() for run in runs})

    @classmethod
    def of(cls, rows: pd.DataFrame, translations: Mapping[Key, Sequence[Mapping[str, Any]]] | None = None) -> Results:
        """Raises DataError: there is no run, or none whose scores are numbers, or the runs are not of one corpus."""
        if not len(rows):
            raise DataError("no run is finished, so there is nothing to report")
        scores = rows[[measure.key for measure in MEASURES]].astype(float)
        keys = pd.Series(list(zip(rows["recipe"], rows["seed"], strict=True)), rows.index)
        diverged = list(dict.fromkeys(keys[~np.isfinite(scores).all(axis=1)]))
        kept = rows[~keys.isin(diverged)]
        if not len(kept):
            raise DataError(
                f"no run has scores that are numbers, as {diverged[0][0]}, seed {diverged[0][1]}; their trainings "
                "diverged, so there is nothing to report; lower training.learning_rate"
            )
        corpora = [
            (f"{model}, seed {seed}", own.set_index("language")[_OF_CORPUS].sort_index())
            for (model, seed), own in kept.groupby(["recipe", "seed"], sort=False)
        ]
        for name, corpus in corpora[1:]:
            if not corpus.equals(corpora[0][1]):
                raise DataError(
                    f"{corpora[0][0]} and {name} were not trained and tested on the same pairs, so they cannot be "
                    "compared; give all runs the same data section, and run again what differs"
                )
        return cls(kept, translations or {}, diverged)

    @cached_property
    def keys(self) -> list[Key]:
        """Of the runs that are compared."""
        pairs = zip(self.rows["recipe"], self.rows["seed"], strict=True)
        return list(dict.fromkeys((str(model), int(seed)) for model, seed in pairs))

    @cached_property
    def models(self) -> tuple[str, ...]:
        """In the order of the runs."""
        return tuple(dict.fromkeys(model for model, _ in self.keys))

    @cached_property
    def _corpus(self) -> pd.DataFrame:
        model, seed = self.keys[0]
        own = self.rows[(self.rows["recipe"] == model) & (self.rows["seed"] == seed)]
        return own.sort_values(["training_pairs", "language"], ascending=[False, True])

    @cached_property
    def languages(self) -> list[str]:
        return list(self._corpus["language"])

    @cached_property
    def training_pairs(self) -> np.ndarray:
        """(L,)."""
        return self._corpus["training_pairs"].to_numpy(int)

    @cached_property
    def buckets(self) -> np.ndarray:
        """Of each language, (L,)."""
        return self._corpus["bucket"].to_numpy(object)

    @cached_property
    def bucket_names(self) -> tuple[str, ...]:
        """Those that have languages."""
        return tuple(bucket for bucket in BUCKETS if (self.buckets == bucket).any())

    def seeds(self, model: str) -> tuple[int, ...]:
        return tuple(seed for name, seed in self.keys if name == model)

    def scores(self, model: str, measure: Measure) -> np.ndarray:
        """(seeds, languages)."""
        own = self.rows[self.rows["recipe"] == model].set_index(["seed", "language"])[measure.key].unstack()
        return np.ascontiguousarray(own.loc[list(self.seeds(model)), self.languages].to_numpy(float))

    def places(self, bucket: str | None) -> np.ndarray:
        """Which languages are in a bucket, (L,) of bool; None: all are."""
        return np.full(len(self.languages), True) if bucket is None else self.buckets == bucket


def with_baselines(
    results: Results, alone: pd.DataFrame, translations: Mapping[Key, Sequence[Mapping[str, Any]]] | None = None
) -> Results | None:
    """The runs on those languages that have a baseline, and the baselines together as one more model.

    Args:
        results: of the runs on many languages.
        alone: rows of runs on one language each.
        translations: of these.

    Returns:
        None: no language has a baseline of finite scores in each seed.

    Raises:
        DataError: a baseline was not trained and tested on the pairs that the others have of its language.
    """
    if not len(alone):
        return None
    is_single = alone.groupby(["recipe", "seed"])["language"].transform("size") == 1
    is_finite = np.isfinite(alone[[measure.key for measure in MEASURES]].astype(float)).all(axis=1)
    single = alone[is_single & is_finite & alone["language"].isin(results.languages)]
    seeds = [set(own["language"]) for _, own in single.groupby("seed")]
    common = set.intersection(*seeds) if seeds else set()
    if not common or len(results.languages) == 1:
        return None
    single = single[single["language"].isin(common)]
    # Alone each language is the one with the most pairs, so its bucket is that among all.
    of_all = dict(zip(results.languages, results.buckets, strict=True))
    together = single.assign(recipe=BASELINE, bucket=[of_all[language] for language in single["language"]])
    known: dict[Key, list[Mapping[str, Any]]] = {
        key: [row for row in results.translations.get(key, ()) if row["language"] in common] for key in results.keys
    }
    for seed, own in single.groupby("seed"):
        parts = [(translations or {}).get((model, int(seed)), []) for model in own["recipe"]]
        known[BASELINE, int(seed)] = sorted((row for part in parts for row in part), key=pair_of) if all(parts) else []
    kept = results.rows[results.rows["language"].isin(common)]
    return Results.of(pd.concat([kept, together], ignore_index=True), known)
