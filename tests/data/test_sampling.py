"""Sampling by temperature: the formula, fair dealing of a language's rows, and the same rows wherever it is asked."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_gpipe.data.sampling import draws_of, epoch_rows, language_probabilities
from hf_gpipe.errors import DataError

NAMES = st.sampled_from([f"l{number}" for number in range(12)])
COUNTS = st.dictionaries(NAMES, st.integers(1, 10**6), min_size=1)
ROWS = st.lists(NAMES, min_size=1, max_size=120)
TEMPERATURES = st.floats(1, 100)


@settings(max_examples=60, deadline=None)
@given(COUNTS, TEMPERATURES)
def test_probabilities_follow_the_formula(counts: dict[str, int], temperature: float) -> None:
    probabilities = language_probabilities(counts, temperature)
    assert list(probabilities) == list(counts)
    assert sum(probabilities.values()) == pytest.approx(1)
    first = next(iter(counts))
    for language, probability in probabilities.items():
        ratio = (counts[language] / counts[first]) ** (1 / temperature)
        assert probability / probabilities[first] == pytest.approx(ratio)


def test_the_ends_of_the_dial() -> None:
    counts = {"de": 900, "fr": 90, "is": 10}
    assert language_probabilities(counts, 1) == pytest.approx({"de": 0.9, "fr": 0.09, "is": 0.01})
    assert language_probabilities(counts, 1e9) == pytest.approx(dict.fromkeys(counts, 1 / 3))
    assert language_probabilities({"de": 8, "fr": 1}, 3) == pytest.approx({"de": 2 / 3, "fr": 1 / 3})


@pytest.mark.parametrize(
    ("counts", "temperature", "message"),
    [
        ({"de": 1}, 0.5, "temperature is 0.5"),
        ({"de": 1}, float("nan"), "temperature is nan"),
        ({"de": 1, "fr": 0}, 5, "'fr' has no pairs"),
        ({}, 5, "there is no language"),
    ],
)
def test_what_has_no_probabilities(counts: dict[str, int], temperature: float, message: str) -> None:
    with pytest.raises(DataError, match=message):
        language_probabilities(counts, temperature)


@settings(max_examples=60, deadline=None)
@given(COUNTS, TEMPERATURES)
def test_draws_are_the_rounded_shares(counts: dict[str, int], temperature: float) -> None:
    draws, total = draws_of(counts, temperature), sum(counts.values())
    assert sum(draws.values()) == total
    assert min(draws.values()) >= 1
    shares = {language: total * p for language, p in language_probabilities(counts, temperature).items()}
    # A language whose share is below 1 is given a draw of the largest.
    given_away = sum(share < 1 for share in shares.values())
    for language, share in shares.items():
        assert abs(draws[language] - share) <= 1 + given_away


@settings(max_examples=60, deadline=None)
@given(ROWS, TEMPERATURES, st.integers(0, 3))
def test_no_row_comes_again_before_all_of_its_language_have(
    languages: list[str], temperature: float, seed: int
) -> None:
    seen: Counter[int] = Counter()
    for epoch in range(4):
        drawn = epoch_rows(languages, temperature, seed, epoch)
        assert len(drawn) == len(languages)
        seen.update(drawn)
        for language in set(languages):
            times = [seen[row] for row, other in enumerate(languages) if other == language]
            assert max(times) - min(times) <= 1


@settings(max_examples=50, deadline=None)
@given(ROWS, st.integers(0, 3), st.integers(0, 3))
def test_at_temperature_one_an_epoch_is_every_row_in_order(languages: list[str], seed: int, epoch: int) -> None:
    assert epoch_rows(languages, 1.0, seed, epoch) == list(range(len(languages)))


def test_small_languages_come_more_often_and_large_ones_show_other_rows() -> None:
    languages = ["de"] * 900 + ["is"] * 100
    epochs = [epoch_rows(languages, 5, 0, epoch) for epoch in range(2)]
    large = [{row for row in drawn if languages[row] == "de"} for drawn in epochs]
    assert len(large[0]) == draws_of({"de": 900, "is": 100}, 5)["de"] == 608
    assert large[0] | large[1] == set(range(900))
    assert epochs[0] != epoch_rows(languages, 5, 1, 0)
