"""A corpus that is read while it is trained on: the stream of its training pairs, and the pairs held out of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hf_gpipe.data.fields import ONE_LANGUAGE, PairFields
from hf_gpipe.data.memory import PairReader, check_limits, held_out_of, tags_of, warn_of_few
from hf_gpipe.data.pairs import Pair, check_fractions, language_tag, split_of
from hf_gpipe.data.parts import Part, counts_of
from hf_gpipe.data.sampling import language_probabilities
from hf_gpipe.data.stream import BlockReader, PairStream
from hf_gpipe.errors import DataError

#: Held-out pairs of a language in each split, where the recipe does not say how many.
HELD_OUT = 2000
#: Pairs that a tokenizer is trained on, where the recipe does not say how many.
SAMPLE = 100_000


@dataclass(frozen=True)
class StreamedCorpus:
    """As `Corpus`, whose training pairs come from a stream without an end."""

    train: PairStream
    validation: list[Pair]
    test: list[Pair]
    languages: list[str]
    target_tags: list[str]

    def texts(self, max_pairs: int | None = None) -> list[str]:
        """Sources and targets of the first training pairs; the stream stays where it is.

        Unless told, 100,000 pairs, or as many as there are where that is known and less.
        """
        count = max_pairs or min(SAMPLE, sum(self.train.counts.values()) or SAMPLE)
        return [text for pair in self.train.sample(count) for text in (pair.source, pair.target)]


def streamed_corpus(
    parts: Sequence[Part],
    fields: PairFields,
    *,
    name: str,
    languages: Sequence[str] = (),
    temperature: float = 1.0,
    counts: Mapping[str, int] | None = None,
    shuffle_buffer: int = 1000,
    max_held_out: int | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
    seed: int = 0,
) -> StreamedCorpus:
    """Opens the stream, and reads the pairs held out of it.

    Where a part has no split of its own for them, they are those whose split key's hash falls in the fraction: the
    first `max_held_out` of a language (None: 2,000), for which the beginning of the part is read; the stream leaves
    out all of them, kept or not.

    Args:
        parts: what to read.
        fields: how a row becomes pairs.
        name: what messages call the corpus.
        languages: the languages to keep.
        temperature: of the mixture over parts.
        counts: how many training pairs a language has, where the data do not say or should not.
        shuffle_buffer: rows of a block.
        max_held_out: the most pairs of a language in validation and in test.
        validation_fraction: share of the training rows, for a part that has no split of its own.
        test_fraction: the same of the test split.
        seed: of the order and the mixture.

    Raises:
        DataError: rows that are no pairs, a language without any, numbers of pairs that are not known, or a
            temperature for rows that cannot be read language by language.
    """
    check_fractions(validation_fraction, test_fraction)
    check_limits(None, max_held_out)
    if fields.language_field is not None and not languages:
        raise DataError("languages is empty; a stream does not tell which languages its rows are in, so name them")
    if fields.language_field is not None and temperature != 1:
        raise DataError(
            f"temperature is {temperature}, and the languages of {name} are mixed in its rows (language_field): a "
            "stream cannot choose between them. Give each language files or a subset of its own, or read the data as "
            "a whole, with streaming: false"
        )
    tags = tags_of(parts, fields, languages)
    of_corpus = list(languages) or [part.language or ONE_LANGUAGE for part in parts]
    splits = _held_out(parts, fields, of_corpus, tags, max_held_out or HELD_OUT, validation_fraction, test_fraction)
    known = counts_of(parts, of_corpus, counts or {})
    names = [part.language or ONE_LANGUAGE for part in parts]
    probabilities = language_probabilities(known, temperature) if len(names) > 1 else {names[0]: 1.0}
    shares = {
        language: BlockReader(
            part,
            PairReader(fields, languages, tags),
            held_out_of(part, validation_fraction, test_fraction),
            shuffle_buffer,
            seed,
        )
        for language, part in zip(names, parts, strict=True)
    }
    warn_of_few(splits, of_corpus, known)
    targets = [language_tag(target) for target in fields.targets(of_corpus)] if tags else []
    stream = PairStream(shares, probabilities, known, seed)
    return StreamedCorpus(stream, splits["validation"], splits["test"], of_corpus, targets)


def _held_out(
    parts: Sequence[Part],
    fields: PairFields,
    languages: Sequence[str],
    tags: bool,
    limit: int,
    validation_fraction: float,
    test_fraction: float,
) -> dict[str, list[Pair]]:
    """The validation and test pairs: the first `limit` of each language in each."""
    splits: dict[str, list[Pair]] = {"validation": [], "test": []}
    for part in parts:
        reader = PairReader(fields, languages, tags)
        of_part = [part.language or ONE_LANGUAGE] if fields.language_field is None else list(languages)
        for split, open_rows in (("validation", part.validation), ("test", part.test)):
            if open_rows is not None:
                splits[split] += _first(
                    ((split, pair) for pair in reader.pairs(part, open_rows)), [split], of_part, limit
                )[split]
        fractions = held_out_of(part, validation_fraction, test_fraction)
        wanted = [split for split, fraction in zip(("validation", "test"), fractions, strict=True) if fraction > 0]
        if wanted:
            found = _first(
                ((split_of(pair.split_key, *fractions), pair) for pair in reader.pairs(part, part.train)),
                wanted,
                of_part,
                limit,
            )
            for split in wanted:
                splits[split] += found[split]
    return splits


def _first(
    pairs: Iterator[tuple[str, Pair]], wanted: Sequence[str], languages: Sequence[str], limit: int
) -> dict[str, list[Pair]]:
    """The first `limit` pairs of every language in each of the splits; reads no further than it takes."""
    found: dict[str, list[Pair]] = {split: [] for split in wanted}
    missing = {(split, language): limit for split in wanted for language in languages}
    for split, pair in pairs:
        place = (split, pair.language)
        if missing.get(place, 0) > 0:
            found[split].append(pair)
            missing[place] -= 1
            if not missing[place]:
                del missing[place]
                if not missing:
                    break
    return found
