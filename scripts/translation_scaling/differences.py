"""Differences between two models, paired over languages, with bootstrap intervals.

The unit that is resampled is the language: an interval says how far the mean would move with other languages of the
same kind. It does not hold the chance of the seed, whose spread stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from translation_scaling.results import Measure, Results

RESAMPLES, LEVEL, SEED = 10_000, 0.95, 0

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
    """Means of resampled `values` (n,), with replacement: (resamples,)."""
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [values[generator.integers(0, len(values), (part, len(values)))].mean(axis=1) for part in _parts(resamples)]
    )


def _parts(resamples: int, size: int = 2500) -> list[int]:
    """A few rows of indices at a time, for they are as many as resamples times languages."""
    return [min(size, resamples - start) for start in range(0, resamples, size)]


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
    return Difference(
        first,
        second,
        measure,
        bucket,
        float(values.mean()),
        percentiles(bootstrap_means(values)) if len(values) >= FEWEST_LANGUAGES else None,
        _per_seed(results, first, second, measure, places),
        len(values),
        int((values * measure.sign > 0).sum()),
    )


@dataclass(frozen=True)
class Contrast:
    """How much larger the first model's gain over the second is in one bucket than in another."""

    gain: float
    interval: Interval | None


def contrast(results: Results, first: str, second: str, measure: Measure, bucket: str, other: str) -> Contrast:
    """The gain in `bucket` minus that in `other`; both are resampled, independently of each other."""
    values = per_language(results, first, second, measure) * measure.sign
    here, there = values[results.places(bucket)], values[results.places(other)]
    means = bootstrap_means(here, seed=SEED) - bootstrap_means(there, seed=SEED + 1)
    is_enough = min(len(here), len(there)) >= FEWEST_LANGUAGES
    return Contrast(float(here.mean() - there.mean()), percentiles(means) if is_enough else None)


def _per_seed(results: Results, first: str, second: str, measure: Measure, places: np.ndarray) -> dict[int, float]:
    scores = [dict(zip(results.seeds(model), results.scores(model, measure), strict=True)) for model in (first, second)]
    common = [seed for seed in scores[0] if seed in scores[1]]
    return {seed: float((scores[0][seed] - scores[1][seed])[places].mean()) for seed in common}
