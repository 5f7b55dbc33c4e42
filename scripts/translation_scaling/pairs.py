"""The test pairs that runs share, and the scores of resampled ones: counts of each pair, their sum, and its score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sacrebleu.metrics.helpers import extract_all_char_ngrams

from translation_scaling.results import CHRF, NLL, Measure, Results, pair_of

_ORDER, _BETA = 6, 2
Row = Mapping[str, Any]


@dataclass(frozen=True)
class TestPairs:
    """The pairs that all runs were tested on.

    Attributes:
        language: of each pair, its place among the languages of the results, (P,).
        sentence: of each pair, the number of its English sentence, (P,): one sentence has pairs in many languages.
        num_sentences: S.
    """

    __test__ = False  # for pytest, no class of tests

    language: np.ndarray
    sentence: np.ndarray
    num_sentences: int

    @classmethod
    def of(cls, results: Results) -> TestPairs | None:
        """None: some run did not write its pairs with their likelihoods, or others than the first one's."""
        names = [[pair_of(row) for row in run.translations] for run in results.runs]
        if not names[0] or any(of_run != names[0] for of_run in names):
            return None
        sentences = {target: number for number, target in enumerate(dict.fromkeys(target for *_, target in names[0]))}
        return cls(
            np.array([results.languages.index(language) for language, *_ in names[0]]),
            np.array([sentences[target] for *_, target in names[0]]),
            len(sentences),
        )


def sums_of(rows: Sequence[Row], measure: Measure) -> np.ndarray:
    """The counts of each pair (P, n), whose sum over pairs gives the measure.

    For the NLL nats and characters; for chrF three counts of n-grams for each of six lengths.
    """
    if measure == NLL:
        return np.array([(row["nll"], row["num_characters"]) for row in rows], dtype=float)
    assert measure == CHRF, "there are two"
    return np.array([_matches(row["translation"], row["target"].strip()) for row in rows], dtype=float)


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


def _matches(translation: str, target: str) -> list[int]:
    """For each order of n-grams those of the translation, of the reference, and of both."""
    counts = []
    for one, other in zip(
        *(extract_all_char_ngrams(text, _ORDER, False) for text in (translation, target)), strict=True
    ):
        counts += [one.total() if other else 0, other.total(), (one & other).total()]
    return counts
