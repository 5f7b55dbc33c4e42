"""The examples of an epoch when small languages are sampled more often: sampling by temperature.

A language with n_l of all N pairs is sampled with probability p_l ~ (n_l / N) ** (1 / T): T = 1 keeps its share, a
large T brings all languages near the same share (Arivazhagan et al., 2019, section 4.2; that paper's models use T = 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.errors import DataError


def language_probabilities(counts: Mapping[str, int], temperature: float) -> dict[str, float]:
    """The probability of each language, in the order of `counts`.

    Args:
        counts: the training pairs of each language.
        temperature: T, at least 1.

    Raises:
        DataError: no language, a language without pairs, or a temperature below 1.
    """
    if not temperature >= 1:
        raise DataError(f"temperature is {temperature}; it must be at least 1, which keeps the languages' own shares")
    empty = [language for language, count in counts.items() if count < 1]
    if empty or not counts:
        raise DataError(f"sampling: {f'language {empty[0]!r} has no pairs' if empty else 'there is no language'}")
    total = sum(counts.values())
    weights = {language: (count / total) ** (1 / temperature) for language, count in counts.items()}
    sum_of_weights = sum(weights.values())
    return {language: weight / sum_of_weights for language, weight in weights.items()}


def draws_of(counts: Mapping[str, int], temperature: float) -> dict[str, int]:
    """The number of pairs of each language in an epoch of N = sum(counts) draws: N p_l, rounded.

    Rounded by largest remainders, so that the sum is N; a language that would get none takes one from the largest.
    Raises DataError as `language_probabilities` does.
    """
    total = sum(counts.values())
    shares = {language: total * p for language, p in language_probabilities(counts, temperature).items()}
    draws = {language: max(1, int(share)) for language, share in shares.items()}
    by_remainder = sorted(shares, key=lambda language: int(shares[language]) - shares[language])
    # Rounding down leaves fewer draws than there are languages.
    for language in by_remainder[: max(0, total - sum(draws.values()))]:
        draws[language] += 1
    while sum(draws.values()) > total:
        draws[max(draws, key=draws.__getitem__)] -= 1
    return draws


def epoch_rows(languages_of_rows: Sequence[str], temperature: float, seed: int, epoch: int) -> list[int]:
    """The examples of an epoch: as many draws as there are examples, divided between the languages by temperature.

    A language draws from an endless sequence of permutations of its examples, each with its own seed, and an epoch
    continues where the last one stopped: no example is repeated before all of its language were drawn, and a language
    with fewer draws than examples has other ones in each epoch. At T = 1 an epoch is every example once, in order.

    Args:
        languages_of_rows: the language of each example.
        temperature: T, at least 1.
        seed: seed of the permutations.
        epoch: counted from 0.

    Returns:
        Indices of examples, language after language; the caller orders them within mini-batches.

    Raises:
        DataError: no examples, or a temperature below 1.
    """
    if temperature == 1:
        return list(range(len(languages_of_rows)))
    rows_of: dict[str, list[int]] = {}
    for row, language in enumerate(languages_of_rows):
        rows_of.setdefault(language, []).append(row)
    draws = draws_of({language: len(rows) for language, rows in rows_of.items()}, temperature)
    drawn: list[int] = []
    for language, rows in rows_of.items():
        start, end = epoch * draws[language], (epoch + 1) * draws[language]
        for number in range(start // len(rows), -(-end // len(rows))):
            permuted = rows.copy()
            stable_random("sampling", seed, language, number).shuffle(permuted)
            first = number * len(rows)
            drawn += permuted[max(0, start - first) : end - first]
    return drawn
