"""The metrics of finished runs, as tables in CSV files and as arrays (seeds, languages)."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from hf_gpipe.data.buckets import BUCKETS
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import Recipe, load_recipe
from translation_scaling.execute import starts, wall_seconds
from translation_scaling.runs import METRICS_FILE, RECIPE_FILE

RESULTS_FILE, RUNS_FILE, TRANSLATIONS_FILE = "results.csv", "runs.csv", "translations.jsonl"


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
_OF_COST = (
    *("num_parameters", "num_steps", "training_seconds", "tokens_per_second", "seconds_per_step", "step_seconds"),
    *("bubble", "num_stages", "num_processes", "num_micro_batches", "schedule", "recompute", "device"),
    *("resumed_from_step", "wall_seconds"),
)


@dataclass(frozen=True)
class Finished:
    """A run that has ended, as its folder tells it, or a table of such runs.

    Attributes:
        translations: a row for each test pair, with the likelihood of its reference, in the order of `pair_of`; empty:
            they are not known.
    """

    model: str
    seed: int
    folder: Path
    metrics: dict[str, Any]
    translations: Sequence[Mapping[str, Any]] = ()

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
        seed = int(folder.name.removeprefix("seed-"))
        return cls(folder.parent.name, seed, folder, metrics, _translations(folder / TRANSLATIONS_FILE))

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.folder / RECIPE_FILE)

    @property
    def cost(self) -> dict[str, Any]:
        cost: dict[str, Any] = self.metrics["cost"]
        return cost

    @property
    def is_finite(self) -> bool:
        """Whether every score that models are compared by is a number; after a training that diverged none may be."""
        return all(
            (value := _with_margin(scores)[measure.key]) is not None and isfinite(value)
            for scores in self.per_language.values()
            for measure in MEASURES
        )

    @property
    def peak_bytes(self) -> int | None:
        """Of the process that had the most."""
        return max(self.cost.get("peak_bytes") or [0]) or None

    @property
    def predicted_bytes(self) -> int | None:
        """The same by the planner, for the longest mini-batch."""
        return max(self.cost.get("predicted", {}).get("peak_bytes") or [0]) or None

    @property
    def all_wall_seconds(self) -> float:
        """Of all starts of the command, imports included, where the script started it."""
        return wall_seconds(self.folder) or float(self.cost["wall_seconds"])

    @property
    def per_language(self) -> dict[str, dict[str, Any]]:
        """The scores of each language."""
        scores: dict[str, dict[str, Any]] = self.metrics["per_language"]
        return scores

    def only(self, languages: Collection[str]) -> Finished:
        """The run with some of its languages alone."""
        return self.with_scores(
            {language: scores for language, scores in self.per_language.items() if language in languages},
            [row for row in self.translations if row["language"] in languages],
        )

    def with_scores(
        self,
        per_language: dict[str, dict[str, Any]],
        translations: Sequence[Mapping[str, Any]],
        model: str | None = None,
    ) -> Finished:
        """The run with other scores and translations, and with another name if one is given."""
        metrics = {**self.metrics, "per_language": per_language}
        return replace(self, model=model or self.model, metrics=metrics, translations=translations)

    def rows(self) -> list[dict[str, Any]]:
        """One row per language."""
        return [
            {"recipe": self.model, "seed": self.seed, "language": language}
            | {name: _with_margin(scores).get(name) for name in _OF_LANGUAGE}
            for language, scores in self.per_language.items()
        ]

    def cost_row(self) -> dict[str, Any]:
        predicted = self.cost.get("predicted", {})
        return (
            {"recipe": self.model, "seed": self.seed}
            | {name: self.cost.get(name) for name in _OF_COST}
            | {"peak_bytes": self.peak_bytes, "predicted_peak_bytes": self.predicted_bytes}
            | {f"predicted_{name}": predicted.get(name) for name in ("step_seconds", "bubble")}
            | {"num_starts": len(starts(self.folder)) or None, "wall_seconds_of_all_starts": self.all_wall_seconds}
        )


def _translations(path: Path) -> list[dict[str, Any]]:
    """Of a run's file; empty where it has no likelihoods."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return sorted(rows, key=pair_of) if all("nll" in row for row in rows) else []


def pair_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The language, the source and the target of a translation, by which runs' translations are matched."""
    return row["language"], row["source"], row["target"]


def _with_margin(scores: dict[str, Any]) -> dict[str, Any]:
    return {**scores, "chrf_minus_copy": scores["chrf"] - scores["chrf_copy"]}


def finished_runs(output: Path, models: Sequence[str] | None, seeds: Sequence[int] | None) -> list[Finished]:
    """The finished runs of an output folder: of these models and seeds, None: of all. Ordered by model, then seed."""
    folders = [path.parent for path in output.glob(f"*/seed-*/{METRICS_FILE}")]
    found = [
        Finished.read(folder)
        for folder in folders
        if folder.name.removeprefix("seed-").isdigit()
        and (models is None or folder.parent.name in models)
        and (seeds is None or int(folder.name.removeprefix("seed-")) in seeds)
    ]
    order = sorted({run.model for run in found}) if models is None else list(models)
    return sorted(found, key=lambda run: (order.index(run.model), run.seed))


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


class Results:
    """The scores of all models on the same languages, the language with the most training pairs first.

    Attributes:
        runs: those that are compared.
        diverged: those whose scores are not all numbers; nothing is computed from them.
        all_runs: both.
        models: names of what is compared, in the order of the runs.
        languages: codes.
        training_pairs: (L,).
        buckets: of each language.
        resampled: differences of resampled sentences that were computed already.

    Raises:
        DataError: there is no run, or none whose scores are numbers, or the runs are not of one corpus.
    """

    def __init__(self, runs: Sequence[Finished]) -> None:
        if not runs:
            raise DataError("no run is finished, so there is nothing to report")
        self.resampled: dict[tuple[str, str, str], np.ndarray] = {}
        self.all_runs = list(runs)
        self.diverged = [run for run in runs if not run.is_finite]
        self.runs = runs = [run for run in runs if run.is_finite]
        if not runs:
            raise DataError(
                f"no run has scores that are numbers, as {self.diverged[0].folder}; their trainings diverged, so there "
                "is nothing to report; lower training.learning_rate"
            )
        self.models = tuple(dict.fromkeys(run.model for run in runs))
        first = runs[0].per_language
        for run in runs[1:]:
            self._check_same_corpus(runs[0], run)
        self.languages = sorted(first, key=lambda language: (-first[language]["training_pairs"], language))
        self.training_pairs = np.array([first[language]["training_pairs"] for language in self.languages])
        self.buckets = np.array([first[language]["bucket"] for language in self.languages])

    @cached_property
    def bucket_names(self) -> tuple[str, ...]:
        """Those that have languages."""
        return tuple(bucket for bucket in BUCKETS if (self.buckets == bucket).any())

    def of_model(self, model: str) -> list[Finished]:
        return [run for run in self.runs if run.model == model]

    def seeds(self, model: str) -> tuple[int, ...]:
        return tuple(run.seed for run in self.of_model(model))

    def scores(self, model: str, measure: Measure) -> np.ndarray:
        """(seeds, languages)."""
        return np.array(
            [
                [_with_margin(run.per_language[language])[measure.key] for language in self.languages]
                for run in self.of_model(model)
            ]
        )

    def places(self, bucket: str | None) -> np.ndarray:
        """Which languages are in a bucket, (L,) of bool; None: all are."""
        return np.full(len(self.languages), True) if bucket is None else self.buckets == bucket

    @staticmethod
    def _check_same_corpus(one: Finished, other: Finished) -> None:
        facts = [
            {
                language: (scores["training_pairs"], scores["num_pairs"], scores["bucket"])
                for language, scores in of_run.items()
            }
            for of_run in (one.per_language, other.per_language)
        ]
        if facts[0] != facts[1]:
            raise DataError(
                f"{one.folder} and {other.folder} were not trained and tested on the same pairs, so they cannot be "
                "compared; give all runs the same data section, and run again what differs"
            )
