"""Thirds of the languages by how many training pairs each has: high, middle and low resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_gpipe.tasks.translation.pairs import count_languages

BUCKETS = ("high", "middle", "low")


def resource_buckets(training_pairs: Mapping[str, int]) -> dict[str, str]:
    """The bucket of every language of `training_pairs`, the languages with the most pairs first.

    Ties are ordered by language code, so that the same counts always give the same buckets. If the number of languages
    is not a multiple of three, the first buckets are larger. Of two languages one is "high" and the other "low"; a
    single one is "high".
    """
    ordered = sorted(training_pairs, key=lambda language: (-training_pairs[language], language))
    names = BUCKETS if len(ordered) > 2 else ("high", "low")
    return {
        language: names[place * len(names) // max(len(ordered), len(names))] for place, language in enumerate(ordered)
    }


def training_pairs(corpus: Any) -> dict[str, int]:
    """How many training pairs each language of a corpus has, in the order of its languages.

    A streamed corpus may not know it for all languages; those are left out.
    """
    known: Mapping[str, int] | None = getattr(corpus.train, "counts", None)
    if known is None:
        counted = count_languages(corpus.train)
        known = {language: counted[language] for language in {**dict.fromkeys(corpus.languages), **counted}}
    return dict(known)
