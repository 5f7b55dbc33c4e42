"""Pairs without an end: languages mixed by temperature, each shuffled in blocks.

The library's own shuffle buffer is lost when a run resumes. Here the order is a function of seeds and places alone, so
that a short state is enough to go on exactly: a language is read in blocks of so many rows; the pairs of a block are
shuffled by (seed, language, pass, block); the state has where the block began and how many of its pairs were given.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_gpipe.data.deterministic import stable_fraction, stable_random
from hf_gpipe.data.fields import ONE_LANGUAGE
from hf_gpipe.data.files import Row
from hf_gpipe.data.memory import PairReader
from hf_gpipe.data.pairs import Pair, split_of
from hf_gpipe.data.parts import Part, Rows
from hf_gpipe.errors import CheckpointError, DataError


class PairStream:
    """Pairs without an end: the n-th pair's language is a function of (seed, n), and each language goes on by itself.

    There is one place in the stream: iterating goes on from it, whoever asks, and `load_state_dict` moves it. A
    language that ends starts over in another order.

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
        """The pairs from here on. Raises DataError for a row that is no pair, or a language without any."""
        while True:
            reader = self._readers[self._language_of(self._num_drawn)]
            pair = next(reader)
            # Before the pair is given: whoever has it may ask for the state after it.
            self._num_drawn += 1
            yield pair

    def fresh(self) -> PairStream:
        """Another stream of the same pairs, from the first one on."""
        readers = {language: reader.fresh() for language, reader in self._readers.items()}
        return PairStream(readers, self.probabilities, self.counts, self._seed)

    def sample(self, count: int) -> list[Pair]:
        """The first pairs of the stream, whatever its place is, which stays."""
        return list(itertools.islice(self.fresh(), count))

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream, in a form that JSON can hold; a few hundred bytes a language."""
        states = {language: reader.state_dict() for language, reader in self._readers.items()}
        return {"drawn": self._num_drawn, "languages": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place. Raises CheckpointError for that of a stream with other languages."""
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
        """A reader of the same pairs from the first one on."""
        return BlockReader(self._part, self._reader, self._held_out, self._rows_of_block, self._seed)

    def state_dict(self) -> dict[str, Any]:
        """The pass, the block in it, the state of the rows where the block begins (None: of a pass), and how many of
        the block's pairs were given."""
        return {"pass": self._pass, "block": self._block, "given": self._given, "rows": self._block_start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go there. The block is read again when its next pair is asked for."""
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
            for pair in self._reader.pairs_of_rows(self._part, rows)
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
