"""A corpus in memory, of the rows of its parts: languages chosen, pairs drawn, splits made."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from hf_gpipe.data.deterministic import stable_fraction
from hf_gpipe.data.fields import ONE_LANGUAGE, PairFields
from hf_gpipe.data.files import Row
from hf_gpipe.data.pairs import SPLITS, Corpus, Pair, check_fractions, language_tag, split_of
from hf_gpipe.data.parts import Part, Rows
from hf_gpipe.errors import DataError, listed, nearest

logger = logging.getLogger(__name__)


def corpus_in_memory(
    parts: Sequence[Part],
    fields: PairFields,
    *,
    name: str,
    languages: Sequence[str] = (),
    max_examples: int | None = None,
    max_held_out: int | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
    seed: int = 0,
) -> Corpus:
    """Reads all parts.

    Validation and test pairs are those of a part's own splits, as they are; a part without such a split gives a share
    of its training rows, chosen by the hash of their split key.

    Args:
        parts: what to read.
        fields: how a row becomes pairs.
        name: what messages call the corpus.
        languages: the languages to keep, in this order; none: all, sorted.
        max_examples: how many pairs to draw by the seed from all those to train on or split; they keep their order.
        max_held_out: the most pairs of a language in validation and in test, the first ones; None: all.
        validation_fraction: share of the training rows, for a part that has no split of its own.
        test_fraction: the same of the test split.
        seed: of the draw.

    Raises:
        DataError: rows that are no pairs, a language without any, or nothing to train on.
    """
    check_fractions(validation_fraction, test_fraction)
    check_limits(max_examples, max_held_out)
    read = PairReader(fields, languages, tags_of(parts, fields, languages))
    every = ((place, pair) for place, part in enumerate(parts) for pair in read.pairs(part, part.train))
    found: list[list[Pair]] = [[] for _ in parts]
    for place, pair in every if max_examples is None else _drawn(every, max_examples, seed):
        found[place].append(pair)
    read.check(name)
    splits: dict[str, list[Pair]] = {split: [] for split in SPLITS}
    kept: Counter[tuple[str, str]] = Counter()

    def add(split: str, pair: Pair) -> None:
        if split == "train" or max_held_out is None or kept[split, pair.language] < max_held_out:
            splits[split].append(pair)
            kept[split, pair.language] += 1

    for part, of_part in zip(parts, found, strict=True):
        fractions = held_out_of(part, validation_fraction, test_fraction)
        for pair in of_part:
            add(split_of(pair.split_key, *fractions), pair)
        for split, open_rows in (("validation", part.validation), ("test", part.test)):
            for pair in read.pairs(part, open_rows) if open_rows else ():
                add(split, pair)
    if not splits["train"]:
        raise DataError(
            f"the corpus has no training pairs ({len(splits['validation'])} for validation, {len(splits['test'])} for "
            "test); ask for more examples or smaller validation_fraction and test_fraction"
        )
    seen = {pair.language for pair in chain(*splits.values())}
    of_corpus = [language for language in read.languages if language in seen]
    read.warn_of_empty_rows()
    warn_of_few(splits, of_corpus, Counter(pair.language for pair in chain(*splits.values())))
    tags = [language_tag(target) for target in fields.targets(read.languages)] if read.tags else []
    return Corpus(splits["train"], splits["validation"], splits["test"], of_corpus, tags)


class PairReader:
    """Rows to pairs of the languages asked for; knows what it has seen."""

    def __init__(self, fields: PairFields, languages: Sequence[str], tags: bool) -> None:
        self.fields, self.tags = fields, tags
        self._asked = list(languages)
        self._found: Counter[str] = Counter()
        self._num_empty: Counter[str] = Counter()

    def pairs(self, part: Part, open_rows: Callable[[], Rows]) -> Iterator[Pair]:
        """The pairs of a part's rows, in their order, without those of languages that nobody asked for."""
        return self.pairs_of_rows(part, open_rows())

    def pairs_of_rows(self, part: Part, rows: Iterable[Row]) -> Iterator[Pair]:
        """The same of some of its rows."""
        for where, row in rows:
            made = self.fields.pairs(where, row, part.language, tags=self.tags)
            self._num_empty[part.name] += not made
            for pair in made:
                self._found[pair.language] += 1
                if not self._asked or pair.language in self._asked:
                    yield pair

    @property
    def languages(self) -> list[str]:
        """Those asked for, or all that were found, sorted."""
        return self._asked or sorted(self._found)

    def check(self, name: str) -> None:
        """Raise DataError where there are no pairs, or none of a language."""
        if not self._found:
            raise DataError(f"{name} has no pairs; it is empty, or has no text in any of its rows")
        for language in self._asked:
            if language not in self._found:
                raise DataError(
                    f"languages: {name} has no pairs in {language!r}{nearest(language, self._found)}; it has "
                    f"{', '.join(sorted(self._found))}"
                )

    def warn_of_empty_rows(self) -> None:
        """Log how many rows were left out."""
        for name, number in self._num_empty.items():
            if number:
                logger.warning("%s: %d rows without text on one side were left out", name, number)


def tags_of(parts: Sequence[Part], fields: PairFields, languages: Sequence[str]) -> bool:
    """Whether sources carry tags."""
    if not languages and fields.language_field is None:
        languages = [part.language or ONE_LANGUAGE for part in parts]
    return fields.has_tags(languages)


def held_out_of(part: Part, validation_fraction: float, test_fraction: float) -> tuple[float, float]:
    """The shares of a part's training rows that are kept for validation and test: none where it has a split for it."""
    return (0.0 if part.validation else validation_fraction, 0.0 if part.test else test_fraction)


def check_limits(max_examples: int | None, max_held_out: int | None) -> None:
    """Raise DataError for limits below 1."""
    for key, limit in (("max_examples", max_examples), ("max_held_out", max_held_out)):
        if limit is not None and limit < 1:
            raise DataError(f"{key} is {limit}; it must be at least 1, or null for all there are")


def warn_of_few(splits: dict[str, list[Pair]], languages: Sequence[str], totals: Mapping[str, int]) -> None:
    """Log the languages that have no pairs in a split where others have some, with their `totals` where known."""
    for split, pairs in splits.items():
        seen = {pair.language for pair in pairs}
        missing = [language for language in languages if language not in seen]
        if missing and seen:
            shown = [f"{each} ({totals[each]} in all)" if each in totals else each for each in missing]
            logger.warning("no %s pairs in these languages: %s", split, listed(shown))


def _drawn(pairs: Iterator[tuple[int, Pair]], count: int, seed: int) -> list[tuple[int, Pair]]:
    """`count` of the pairs, or all, in their order; only these are held in memory.

    A pair is drawn by its place alone: those whose places have the lowest hashes.
    """
    keyed = ((stable_fraction(f"max_examples\x1f{seed}\x1f{place}"), place, pair) for place, pair in enumerate(pairs))
    chosen = heapq.nsmallest(count, keyed, key=lambda entry: entry[:2])
    return [pair for _, _, pair in sorted(chosen, key=lambda entry: entry[1])]
