"""Differences between two models, paired over languages, with bootstrap intervals.

Languages are resampled, and where the runs have written their test pairs the English sentences too, each with its pairs
in all languages: an interval says how far the mean would move with other languages and sentences of the same kind. It
does not hold the chance of the seed, whose spread stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sacrebleu.metrics.helpers import extract_all_char_ngrams

from translation_scaling.results import MEASURES, NLL, Measure, Results, pair_of

RESAMPLES, LEVEL, SEED = 10_000, 0.95, 0
LOW_HIGH = "low - high"
"""In place of a bucket: how much larger the difference is on low-resource languages than on high-resource ones."""

FEWEST_LANGUAGES = 5
"""Resampling fewer says nothing about others."""

_PART = 2500  # resamples at a time, for they hold a number for each pair
_ORDER, _BETA = 6, 2  # of chrF2


class Interval(NamedTuple):
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


def percentiles(means: np.ndarray, level: float = LEVEL) -> Interval:
    """The interval that holds `level` of the resampled means (Efron's percentile interval)."""
    tail = 50 * (1 - level)
    low, high = np.percentile(means, [tail, 100 - tail])
    return Interval(float(low), float(high))


# ---------------------------------------------------------------------- resampled sentences


class TestPairs(NamedTuple):
    """The pairs that all runs were tested on.

    Attributes:
        language: of each pair, its place among the languages of the results, (P,).
        sentence: of each pair, the number of its English sentence, (P,): one sentence has pairs in many languages.
        num_sentences: S.
    """

    language: np.ndarray
    sentence: np.ndarray
    num_sentences: int

    @classmethod
    def of(cls, results: Results) -> TestPairs | None:
        """None: some run did not write its pairs with their likelihoods, or others than the first one's."""
        names = [[pair_of(row) for row in results.translations.get(key, ())] for key in results.keys]
        if not names[0] or any(of_run != names[0] for of_run in names):
            return None
        sentences, distinct = pd.factorize(np.array([target for *_, target in names[0]], object))
        return cls(np.array([results.languages.index(language) for language, *_ in names[0]]), sentences, len(distinct))


TestPairs.__test__ = False  # type: ignore[attr-defined]  # for pytest, no class of tests


def sums_of(rows: Sequence[Mapping[str, Any]], measure: Measure) -> np.ndarray:
    """The counts of each pair (P, n), whose sum over pairs gives the measure.

    For the NLL nats and characters; for chrF three counts of n-grams for each of six lengths.
    """
    if measure == NLL:
        return np.array([(row["nll"], row["num_characters"]) for row in rows], dtype=float)
    return np.array([_matches(row["translation"], row["target"].strip()) for row in rows], dtype=float)


def _matches(translation: str, target: str) -> list[int]:
    """For each order of n-grams those of the translation, of the reference, and of both."""
    pairs = zip(*(extract_all_char_ngrams(text, _ORDER, False) for text in (translation, target)), strict=True)
    return [
        count for own, other in pairs for count in (own.total() if other else 0, other.total(), (own & other).total())
    ]


def score(sums: np.ndarray, measure: Measure) -> np.ndarray:
    """The measure of sums (..., n) over pairs: (...). Of chrF without the copy's, which differences do not have."""
    if measure == NLL:
        per_character: np.ndarray = sums[..., 0] / np.maximum(sums[..., 1], 1)
        return per_character
    hypothesis, reference, match = np.moveaxis(sums.reshape(*sums.shape[:-1], _ORDER, 3), -1, 0)
    # chrF2 as sacrebleu has it: orders that one of the two texts is too short for are left out.
    counts = (hypothesis > 0) & (reference > 0)
    orders = np.maximum(counts.sum(axis=-1), 1)
    precision = np.where(counts, match / np.maximum(hypothesis, 1), 0).sum(axis=-1) / orders
    recall = np.where(counts, match / np.maximum(reference, 1), 0).sum(axis=-1) / orders
    denominator = _BETA**2 * precision + recall
    chrf: np.ndarray = 100 * (1 + _BETA**2) * precision * recall / np.where(denominator > 0, denominator, 1)
    return chrf


def _resampled(results: Results, first: str, second: str, measure: Measure) -> np.ndarray:
    """First minus second for each language (RESAMPLES, L), of the means over seeds, with sentences resampled.

    (L,), the same in all resamples, where the runs' pairs are not known. Computed once.
    """
    key = (first, second, measure.key)
    if key in results.resampled:
        return results.resampled[key]
    pairs = TestPairs.of(results)
    if pairs is None:
        return results.resampled.setdefault(key, per_language(results, first, second, measure))
    generator = np.random.default_rng(SEED + 2)
    chances = np.full(pairs.num_sentences, 1 / pairs.num_sentences)
    places = [np.flatnonzero(pairs.language == number) for number in range(int(pairs.language.max()) + 1)]
    sums = [
        [sums_of(results.translations[model, seed], measure) for seed in results.seeds(model)]
        for model in (first, second)
    ]
    parts = []
    for start in range(0, RESAMPLES, _PART):
        drawn = generator.multinomial(pairs.num_sentences, chances, min(_PART, RESAMPLES - start))
        weights = drawn[:, pairs.sentence].astype(float)
        of_first, of_second = (
            np.mean(
                [np.stack([score(weights[:, at] @ own[at], measure) for at in places], axis=1) for own in of_model],
                axis=0,
            )
            for of_model in sums
        )
        parts.append(of_first - of_second)
    return results.resampled.setdefault(key, np.concatenate(parts))


# ---------------------------------------------------------------------- differences


@dataclass(frozen=True)
class Difference:
    """The first model's score minus the second's, over the languages of one bucket or of all.

    Attributes:
        mean: over languages of the difference of the means over seeds.
        interval: bootstrap, 95 %; None: there are too few languages.
        per_seed: the mean for each seed that both models have.
        num_languages: of the bucket.
        num_better: languages in which the first model is the better one; None: of a contrast of buckets.
    """

    first: str
    second: str
    measure: Measure
    bucket: str | None
    mean: float
    interval: Interval | None
    per_seed: dict[int, float]
    num_languages: int
    num_better: int | None

    def row(self) -> dict[str, Any]:
        """Of a table."""
        low, high = self.interval or (None, None)
        return {
            **{"first": self.first, "second": self.second, "measure": self.measure.key, "bucket": self.bucket},
            **{"mean": self.mean, "low": low, "high": high},
            **{"num_languages": self.num_languages, "num_better": self.num_better},
        }

    @classmethod
    def of_row(cls, row: Any) -> Difference:
        """Of a table's row; it has no seeds."""
        measure = next(measure for measure in MEASURES if measure.key == row.measure)
        bucket, interval = (None if pd.isna(row.bucket) else row.bucket), Interval(row.low, row.high)
        counts = row.num_languages, row.num_better
        return cls(
            row.first, row.second, measure, bucket, row.mean, None if pd.isna(row.low) else interval, {}, *counts
        )

    @property
    def outcome(self) -> str:
        """The reading of the interval: where it includes 0 no difference, which is not that there is none."""
        if self.interval is None:
            return f"{self.num_languages} languages are too few for an interval"
        if not self.interval.excludes_zero:
            return f"no difference between {self.first} and {self.second} is shown"
        is_better = self.mean * self.measure.sign > 0
        if self.bucket == LOW_HIGH:
            return f"{self.first} gains {'more' if is_better else 'less'} on low-resource languages"
        return f"{self.first} is {'better' if is_better else 'worse'} than {self.second}"

    @property
    def seeds_agree(self) -> str:
        """In how many seeds the sign is that of the mean; empty: there are too few seeds to tell."""
        same = sum((value > 0) - (value < 0) == (self.mean > 0) - (self.mean < 0) for value in self.per_seed.values())
        return f"{same} of {len(self.per_seed)}" if len(self.per_seed) > 1 else ""


def per_language(results: Results, first: str, second: str, measure: Measure) -> np.ndarray:
    """First minus second for each language, (L,), of the means over seeds."""
    difference: np.ndarray = results.scores(first, measure).mean(axis=0) - results.scores(second, measure).mean(axis=0)
    return difference


def compare(results: Results, first: str, second: str, measure: Measure, bucket: str | None = None) -> Difference:
    """Two models on the languages of a bucket; None: on all."""
    places = results.places(bucket)
    values = per_language(results, first, second, measure)[places]
    interval = None
    if len(values) >= FEWEST_LANGUAGES:
        interval = percentiles(bootstrap_means(_resampled(results, first, second, measure)[..., places]))
    of_first, of_second = (
        dict(zip(results.seeds(model), results.scores(model, measure), strict=True)) for model in (first, second)
    )
    per_seed = {
        seed: float((of_first[seed] - of_second[seed])[places].mean()) for seed in of_first if seed in of_second
    }
    num_better = int((values * measure.sign > 0).sum())
    return Difference(first, second, measure, bucket, float(values.mean()), interval, per_seed, len(values), num_better)


def compare_all(results: Results, pairs: Sequence[tuple[str, str]]) -> list[Difference]:
    """Each pair of models by each measure, on each bucket and on all languages."""
    return [
        compare(results, first, second, measure, bucket)
        for first, second in pairs
        for measure in MEASURES
        for bucket in (*results.bucket_names, None)
    ]


def contrast(results: Results, first: str, second: str, measure: Measure) -> Difference | None:
    """The difference on low-resource languages minus that on high-resource ones; None: there are not both.

    Languages are resampled apart, sentences for both together.
    """
    low, high = results.places("low"), results.places("high")
    if not low.any() or not high.any():
        return None
    values = per_language(results, first, second, measure)
    interval = None
    if min(low.sum(), high.sum()) >= FEWEST_LANGUAGES:
        resampled = _resampled(results, first, second, measure)
        means = bootstrap_means(resampled[..., low], seed=SEED) - bootstrap_means(resampled[..., high], seed=SEED + 1)
        interval = percentiles(means)
    mean = float(values[low].mean() - values[high].mean())
    return Difference(first, second, measure, LOW_HIGH, mean, interval, {}, int(low.sum() + high.sum()), None)
