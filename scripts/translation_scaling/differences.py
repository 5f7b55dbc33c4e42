"""Differences between two models, paired over languages, with bootstrap intervals.

Languages are resampled, and where the runs have written their test pairs the English sentences too, each with its pairs
in all languages: an interval says how far the mean would move with other languages and sentences of the same kind. It
does not hold the chance of the seed, whose spread stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from translation_scaling.pairs import TestPairs, score, sums_of
from translation_scaling.results import MEASURES, Measure, Results

RESAMPLES, LEVEL, SEED = 10_000, 0.95, 0

_PART = 2500  # resamples at a time, for they hold a number for each pair

FEWEST_LANGUAGES = 5
"""Resampling fewer says nothing about others."""


@dataclass(frozen=True)
class Interval:
    """Ends of a bootstrap interval."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def bootstrap_means(values: np.ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> np.ndarray:
    """Means of resampled `values`, with replacement: (resamples,).

    Args:
        values: (n,), or (resamples, n) where they differ between resamples.
    """
    generator = np.random.default_rng(seed)
    rows = np.broadcast_to(values, (resamples, values.shape[-1]))
    means = [
        np.take_along_axis(part, generator.integers(0, part.shape[1], part.shape), axis=1).mean(axis=1)
        for part in np.split(rows, range(_PART, resamples, _PART))
    ]
    return np.concatenate(means)


def of_resampled_sentences(results: Results, first: str, second: str, measure: Measure) -> np.ndarray:
    """First minus second for each language (RESAMPLES, L), of the means over seeds, with sentences resampled.

    (L,), the same in all resamples, where the runs' pairs are not known.
    """
    pairs = TestPairs.of(results)
    if pairs is None:
        return per_language(results, first, second, measure)
    generator = np.random.default_rng(SEED + 2)
    chances = np.full(pairs.num_sentences, 1 / pairs.num_sentences)
    sums = [[sums_of(run.translations, measure) for run in results.of_model(one)] for one in (first, second)]
    parts = []
    for start in range(0, RESAMPLES, _PART):
        drawn = generator.multinomial(pairs.num_sentences, chances, min(_PART, RESAMPLES - start))
        weights = drawn[:, pairs.sentence].astype(float)
        of_models = [np.mean([_scores(weights, one, pairs, measure) for one in of_model], axis=0) for of_model in sums]
        parts.append(of_models[0] - of_models[1])
    return np.concatenate(parts)


def _scores(weights: np.ndarray, sums: np.ndarray, pairs: TestPairs, measure: Measure) -> np.ndarray:
    """Of each language (resamples, L), from the weights of pairs (resamples, P) and their counts (P, n)."""
    places = [np.flatnonzero(pairs.language == number) for number in range(int(pairs.language.max()) + 1)]
    return np.stack([score(weights[:, place] @ sums[place], measure) for place in places], axis=1)


def percentiles(means: np.ndarray, level: float = LEVEL) -> Interval:
    """The interval that holds `level` of the resampled means (Efron's percentile interval)."""
    tail = 50 * (1 - level)
    low, high = np.percentile(means, [tail, 100 - tail])
    return Interval(float(low), float(high))


@dataclass(frozen=True)
class Difference:
    """The first model's score minus the second's, over the languages of one bucket or of all.

    Attributes:
        mean: over languages of the difference of the means over seeds.
        interval: bootstrap, 95 %; None: there are too few languages.
        per_seed: the mean for each seed that both models have.
        num_languages: of the bucket.
        num_better: languages in which the first model is the better one.
    """

    first: str
    second: str
    measure: Measure
    bucket: str | None
    mean: float
    interval: Interval | None
    per_seed: dict[int, float]
    num_languages: int
    num_better: int

    def row(self) -> dict[str, Any]:
        """Of a table."""
        ends = (None, None) if self.interval is None else (self.interval.low, self.interval.high)
        return {
            **{"first": self.first, "second": self.second, "measure": self.measure.key, "bucket": self.bucket},
            **{"mean": self.mean, "low": ends[0], "high": ends[1]},
            **{"num_languages": self.num_languages, "num_better": self.num_better},
        }

    @property
    def gain(self) -> float:
        """The mean with the sign that is positive where the first model is better."""
        return self.mean * self.measure.sign


def per_language(results: Results, first: str, second: str, measure: Measure) -> np.ndarray:
    """First minus second for each language, (L,), of the means over seeds."""
    difference: np.ndarray = results.scores(first, measure).mean(axis=0) - results.scores(second, measure).mean(axis=0)
    return difference


def compare(results: Results, first: str, second: str, measure: Measure, bucket: str | None = None) -> Difference:
    """Two models on the languages of a bucket; None: on all."""
    places = results.places(bucket)
    values = per_language(results, first, second, measure)[places]
    is_enough = len(values) >= FEWEST_LANGUAGES
    return Difference(
        first,
        second,
        measure,
        bucket,
        float(values.mean()),
        percentiles(bootstrap_means(_resampled(results, first, second, measure)[..., places])) if is_enough else None,
        _per_seed(results, first, second, measure, places),
        len(values),
        int((values * measure.sign > 0).sum()),
    )


def compare_all(results: Results, pairs: Sequence[tuple[str, str]]) -> list[Difference]:
    """Each pair of models by each measure, on each bucket and on all languages."""
    return [
        compare(results, first, second, measure, bucket)
        for first, second in pairs
        for measure in MEASURES
        for bucket in (*results.bucket_names, None)
    ]


@dataclass(frozen=True)
class Contrast:
    """How much larger the first model's gain over the second is in one bucket than in another."""

    gain: float
    interval: Interval | None


def contrast(results: Results, first: str, second: str, measure: Measure, bucket: str, other: str) -> Contrast:
    """The gain in `bucket` minus that in `other`; languages are resampled apart, sentences for both together."""
    values = per_language(results, first, second, measure) * measure.sign
    here, there = values[results.places(bucket)], values[results.places(other)]
    resampled = _resampled(results, first, second, measure) * measure.sign
    means = bootstrap_means(resampled[..., results.places(bucket)], seed=SEED) - bootstrap_means(
        resampled[..., results.places(other)], seed=SEED + 1
    )
    is_enough = min(len(here), len(there)) >= FEWEST_LANGUAGES
    return Contrast(float(here.mean() - there.mean()), percentiles(means) if is_enough else None)


def _resampled(results: Results, first: str, second: str, measure: Measure) -> np.ndarray:
    """`of_resampled_sentences`, computed once."""
    known = results.resampled
    key = (first, second, measure.key)
    if key not in known:
        known[key] = of_resampled_sentences(results, first, second, measure)
    return known[key]


def _per_seed(results: Results, first: str, second: str, measure: Measure, places: np.ndarray) -> dict[int, float]:
    scores = [dict(zip(results.seeds(model), results.scores(model, measure), strict=True)) for model in (first, second)]
    common = [seed for seed in scores[0] if seed in scores[1]]
    return {seed: float((scores[0][seed] - scores[1][seed])[places].mean()) for seed in common}
