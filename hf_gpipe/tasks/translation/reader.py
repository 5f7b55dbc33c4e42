"""Reads the pairs of parts: of the requested languages, with or without tags, and counts skipped rows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hf_gpipe.data.formats import Row
from hf_gpipe.data.parts import Part
from hf_gpipe.errors import DataError, listed, nearest
from hf_gpipe.tasks.translation.fields import ONE_LANGUAGE, PairFields
from hf_gpipe.tasks.translation.pairs import Pair

logger = logging.getLogger(__name__)


class PairReader:
    """Turns rows into pairs of the requested languages, and records languages and skipped rows."""

    def __init__(self, fields: PairFields, languages: Sequence[str], tags: bool) -> None:
        self.fields, self.tags = fields, tags
        self._asked = dict.fromkeys(languages)
        #: The languages of the rows read so far, requested or not.
        self.languages: set[str] = set()
        #: Rows without text on one side, by the name of their part.
        self.num_empty: Counter[str] = Counter()

    def pairs(self, part: Part, rows: Iterable[Row]) -> Iterator[Pair]:
        """The pairs of rows of a part, in order, of the requested languages."""
        for where, row in rows:
            made = self.fields.pairs(where, row, part.language, tags=self.tags)
            if not made:
                self.num_empty[part.name] += 1
            for pair in made:
                self.languages.add(pair.language)
                if not self._asked or pair.language in self._asked:
                    yield pair

    def check(self, name: str) -> None:
        """Raise DataError if there are no pairs, or none of a requested language."""
        if not self.languages:
            raise DataError(f"{name} has no pairs; it is empty, or has no text in any of its rows")
        for language in self._asked:
            if language not in self.languages:
                raise DataError(
                    f"languages: {name} has no pairs in {language!r}{nearest(language, self.languages)}; it has "
                    f"{', '.join(sorted(self.languages))}"
                )


def tags_of(parts: Sequence[Part], fields: PairFields, languages: Sequence[str]) -> bool:
    """Whether sources have tags."""
    if not languages and fields.language_field is None:
        languages = [part.language or ONE_LANGUAGE for part in parts]
    return fields.has_tags(languages)


def warn_of_few(counts: Mapping[str, Mapping[str, int]], languages: Sequence[str], totals: Mapping[str, int]) -> None:
    """Log the languages that have no pairs in a split where others have some.

    Args:
        counts: for each split, the number of pairs of each language.
        languages: the languages of the corpus.
        totals: the number of pairs of each language, where known.
    """
    for split, seen in counts.items():
        missing = [language for language in languages if not seen.get(language)]
        if missing and any(seen.values()):
            shown = [f"{each} ({totals[each]} in all)" if each in totals else each for each in missing]
            logger.warning("no %s pairs in these languages: %s", split, listed(shown))
