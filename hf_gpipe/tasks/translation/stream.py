"""A corpus that is read during training: an endless stream of pairs, with languages mixed by temperature.

The shuffle buffer of `datasets` is lost when a run resumes. Here the order is a function of seeds and positions alone,
so that a short state is enough to resume exactly: a language is read in blocks of a fixed number of rows; the pairs of
a block are shuffled by (seed, language, pass, block); the state has the start of the block and how many of its pairs
were yielded.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_gpipe.data.deterministic import split_of, stable_fraction, stable_random
from hf_gpipe.data.formats import Row
from hf_gpipe.data.parts import Part, Rows
from hf_gpipe.data.sampling import language_probabilities
from hf_gpipe.data.splits import Corpus, held_out_of
from hf_gpipe.errors import CheckpointError, DataError
from hf_gpipe.progress import progress
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.fields import ONE_LANGUAGE, PairFields
from hf_gpipe.tasks.translation.pairs import Pair, language_tag, texts_of
from hf_gpipe.tasks.translation.reader import PairReader, tags_of, warn_of_few
from hf_gpipe.tasks.translation.sources import counts_of

#: Held-out pairs of a language in each split, where the recipe does not say how many.
HELD_OUT = 2000
#: Pairs that a tokenizer is trained on, where the recipe does not say how many.
SAMPLE = 100_000


class PairStream:
    """An endless stream of pairs: the n-th pair's language is a function of (seed, n); each has its own order.

    The stream has one position: every iterator continues from it, and `load_state_dict` sets it. A language that ends
    starts over in another order.

    Args:
        readers: each language's pairs.
        probabilities: of each language; they sum to 1.
        counts: training pairs of each language, where they are known: for reports.
        seed: of the choice of languages.
    """

    def __init__(
        self,
        readers: Mapping[str, BlockReader],
        probabilities: Mapping[str, float],
        counts: Mapping[str, int],
        seed: int,
    ) -> None:
        self.probabilities, self.counts = dict(probabilities), dict(counts)
        self._readers, self._seed = dict(readers), seed
        self._languages = list(self._readers)
        self._bounds = list(itertools.accumulate(self.probabilities[language] for language in self._languages))
        self._num_drawn = 0

    def __iter__(self) -> Iterator[Pair]:
        """The next pairs. Raises DataError for a row that is not a pair, or a language without pairs."""
        while True:
            reader = self._readers[self._language_of(self._num_drawn)]
            pair = next(reader)
            # Before the pair is given: whoever has it may ask for the state after it.
            self._num_drawn += 1
            yield pair

    def fresh(self) -> PairStream:
        """A new stream of the same pairs, from the start."""
        readers = {language: reader.fresh() for language, reader in self._readers.items()}
        return PairStream(readers, self.probabilities, self.counts, self._seed)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as JSON values; a few hundred bytes per language."""
        states = {language: reader.state_dict() for language, reader in self._readers.items()}
        return {"drawn": self._num_drawn, "languages": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position. Raises CheckpointError if it is of a stream with other languages."""
        if set(state["languages"]) != set(self._languages):
            raise CheckpointError(
                f"the place in the data is of a stream of {', '.join(state['languages'])}, and this one has "
                f"{', '.join(self._languages)}; restore the languages of the recipe"
            )
        self._num_drawn = state["drawn"]
        for language, reader in self._readers.items():
            reader.load_state_dict(state["languages"][language])

    def _language_of(self, number: int) -> str:
        position = stable_fraction(f"language\x1f{self._seed}\x1f{number}") * self._bounds[-1]
        return self._languages[min(bisect.bisect_right(self._bounds, position), len(self._languages) - 1)]


class BlockReader:
    """The training pairs of one part, over and over, shuffled in blocks; each pass reads its files in another order.

    Args:
        part: what to read.
        reader: makes pairs of rows.
        held_out: the shares of rows whose pairs are left out, for validation and for test.
        rows_of_block: how many rows are held and shuffled at a time.
        seed: of the order.
    """

    def __init__(
        self, part: Part, reader: PairReader, held_out: tuple[float, float], rows_of_block: int, seed: int
    ) -> None:
        self._part, self._reader, self._held_out = part, reader, held_out
        # Not the part's name, which is a path: data that have moved keep their order.
        self._language = part.language or ONE_LANGUAGE
        self._rows_of_block, self._seed = rows_of_block, seed
        self._rows: Rows | None = None
        self._pairs: list[Pair] | None = None
        self._close: Callable[[], object] = lambda: None
        self._go_to(pass_=0, block=0, given=0, rows=None)

    def fresh(self) -> BlockReader:
        """A new reader of the same pairs, from the start."""
        return BlockReader(self._part, self._reader, self._held_out, self._rows_of_block, self._seed)

    def state_dict(self) -> dict[str, Any]:
        """The pass, the block in it, the state of the rows where the block begins (None: of a pass), and how many of
        the block's pairs were given."""
        return {"pass": self._pass, "block": self._block, "given": self._given, "rows": self._block_start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. The block is read again when its next pair is needed."""
        self._go_to(pass_=state["pass"], block=state["block"], given=state["given"], rows=state["rows"])

    def __next__(self) -> Pair:
        while True:
            if self._pairs is None:
                self._pairs = self._read_block()
            if self._given < len(self._pairs):
                self._given += 1
                return self._pairs[self._given - 1]
            self._leave_block()

    def _go_to(self, *, pass_: int, block: int, given: int, rows: dict[str, Any] | None) -> None:
        self._pass, self._block, self._given, self._block_start = pass_, block, given, rows
        self._rows, self._pairs = None, None
        self._close()
        self._open: Iterator[Row] = iter(())
        self._is_last_block, self._gave_any = False, block > 0 or given > 0

    def _read_block(self) -> list[Pair]:
        """The pairs of the block that begins here, in their shuffled order."""
        if self._rows is None:
            self._rows = self._part.train()
            self._rows.set_epoch(stable_random("pass", self._seed, self._language, self._pass).randrange(1, 2**31))
            if self._block_start is not None:
                self._rows.load_state_dict(self._block_start)
            self._open = iter(self._rows)
            # A generator that is still open when the interpreter ends complains of modules that are gone.
            if hasattr(self._open, "close"):
                self._close = weakref.finalize(self, self._open.close)
        rows = list(itertools.islice(self._open, self._rows_of_block))
        self._is_last_block = len(rows) < self._rows_of_block
        pairs = [
            pair
            for pair in self._reader.pairs(self._part, rows)
            if split_of(pair.split_key, *self._held_out) == "train"
        ]
        self._gave_any = self._gave_any or bool(pairs)
        stable_random("block", self._seed, self._language, self._pass, self._block).shuffle(pairs)
        return pairs

    def _leave_block(self) -> None:
        """Go to the next block, or to the next pass."""
        assert self._rows is not None, "the block was read"
        if not self._is_last_block:
            self._block, self._given, self._block_start = self._block + 1, 0, self._rows.state_dict()
            self._pairs = None
        elif self._gave_any:
            self._go_to(pass_=self._pass + 1, block=0, given=0, rows=None)
        else:
            raise DataError(
                f"{self._part.name} has no pairs to train on; it is empty, or all of them are held out or in languages "
                "that are not asked for"
            )


class StreamedCorpus(Corpus[Pair]):
    """A corpus whose training pairs are a `PairStream`."""

    def texts(self, max_items: int | None = None) -> Iterator[str]:
        """Sources and targets of the first training pairs; the stream stays where it is.

        Unless told, 100,000 pairs, or as many as there are where that is known and less.
        """
        count = max_items or min(SAMPLE, sum(self.train.counts.values()) or SAMPLE)
        return itertools.chain.from_iterable(map(texts_of, itertools.islice(self.train.fresh(), count)))


def streamed_corpus(parts: Sequence[Part], fields: PairFields, data: DataSection, order_seed: int) -> StreamedCorpus:
    """Opens the stream, and reads the pairs held out of it.

    Where a part has no split of its own for them, they are those whose split key's hash falls in the fraction: the
    first `max_held_out` of a language (None: 2,000), for which the beginning of the part is read; the stream leaves
    out all of them, kept or not.

    Args:
        parts: what to read.
        fields: how a row becomes pairs.
        data: which of them, and how they are mixed.
        order_seed: of the order and the mixture.

    Raises:
        DataError: rows that are not pairs, a language without any, numbers of pairs that are not known, or a
            temperature for rows that cannot be read language by language.
    """
    if fields.language_field is not None and not data.languages:
        raise DataError("languages is empty; a stream does not tell which languages its rows are in, so name them")
    if fields.language_field is not None and data.temperature != 1:
        raise DataError(
            f"temperature is {data.temperature:g}, and the languages of {data.path} are mixed in its rows "
            "(language_field): a stream cannot choose between them. Give each language files or a subset of its own, "
            "or read the data as a whole, with streaming: false"
        )
    tags = tags_of(parts, fields, data.languages)
    languages = list(data.languages) or [part.language or ONE_LANGUAGE for part in parts]
    splits = _held_out(parts, fields, data, languages, tags)
    known = counts_of(parts, languages, data.counts or {})
    names = [part.language or ONE_LANGUAGE for part in parts]
    probabilities = language_probabilities(known, data.temperature) if len(names) > 1 else {names[0]: 1.0}
    readers = {
        name: BlockReader(
            part,
            PairReader(fields, data.languages, tags),
            held_out_of(part.held_out, data),
            data.shuffle_buffer,
            order_seed,
        )
        for name, part in zip(names, parts, strict=True)
    }
    warn_of_few({split: Counter(pair.language for pair in pairs) for split, pairs in splits.items()}, languages, known)
    targets = [language_tag(target) for target in fields.targets(languages)] if tags else []
    stream = PairStream(readers, probabilities, known, order_seed)
    return StreamedCorpus(stream, splits["validation"], splits["test"], languages, targets)


def _held_out(
    parts: Sequence[Part], fields: PairFields, data: DataSection, languages: Sequence[str], tags: bool
) -> dict[str, list[Pair]]:
    """The validation and test pairs: the first ones of each language in each."""
    limit = data.max_held_out or HELD_OUT
    splits: dict[str, list[Pair]] = {"validation": [], "test": []}
    for part in parts:
        reader = PairReader(fields, data.languages, tags)
        of_part = [part.language or ONE_LANGUAGE] if fields.language_field is None else list(languages)
        for split, open_rows in part.held_out.items():
            pairs = ((split, pair) for pair in reader.pairs(part, open_rows()))
            splits[split] += _first(pairs, [split], of_part, limit)[split]
        fractions = held_out_of(part.held_out, data)
        wanted = [split for split, fraction in zip(("validation", "test"), fractions, strict=True) if fraction > 0]
        if wanted:
            read = progress(reader.pairs(part, part.train()), f"finding held-out pairs of {part.name}", "pairs")
            first = _first(((split_of(pair.split_key, *fractions), pair) for pair in read), wanted, of_part, limit)
            for split in wanted:
                splits[split] += first[split]
    return splits


def _first(
    pairs: Iterator[tuple[str, Pair]], wanted: Sequence[str], languages: Sequence[str], limit: int
) -> dict[str, list[Pair]]:
    """The first `limit` pairs of every language in each of the splits; reads no further than it takes."""
    first: dict[str, list[Pair]] = {split: [] for split in wanted}
    missing = {(split, language): limit for split in wanted for language in languages}
    for split, pair in pairs:
        place = (split, pair.language)
        if missing.get(place, 0) > 0:
            first[split].append(pair)
            missing[place] -= 1
            if not missing[place]:
                del missing[place]
                if not missing:
                    break
    return first
