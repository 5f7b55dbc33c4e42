"""The examples of a stream of rows: an iterable dataset, which encodes a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from hf_gpipe.errors import DataError

_BLOCK_ROWS = 1000


class Block(list[Any]):
    """Consecutive rows of a stream. Their examples stay in memory, and only of the first block warnings are given."""

    is_first = True

    def with_rows(self, rows: Iterable[Any]) -> Block:
        """A block of other rows in the place of this one."""
        block = Block(rows)
        block.is_first = self.is_first
        return block


def has_state(rows: Any) -> bool:
    """Whether an iterable can return its place, and go on from there."""
    return all(callable(getattr(rows, name, None)) for name in ("state_dict", "load_state_dict"))


def is_of_datasets(rows: Any) -> bool:
    """Whether rows are an object of the library `datasets`."""
    return type(rows).__module__.partition(".")[0] == "datasets"


def encoded_stream(rows: Iterable[Any], encode: Callable[[Block], Any]) -> EncodedStream:
    """The examples of a stream, which can resume where the stream can."""
    return (ResumableStream if has_state(rows) else EncodedStream)(rows, encode, _BLOCK_ROWS)


class EncodedStream(IterableDataset[Any]):
    """An iterable of the examples of rows.

    Args:
        rows: an iterable of rows, which begins anew in each iteration; `set_epoch` is handed on to it.
        encode: a block of rows -> its examples by index, of which there may be fewer or more than rows.
        block_rows: the rows of a block.

    Attributes:
        longest: the most ids and labels of an example, for the planner; None: they are not known.
    """

    longest: tuple[int, int] | None = None

    def __init__(self, rows: Iterable[Any], encode: Callable[[Block], Any], block_rows: int) -> None:
        self._rows, self._encode, self._block_rows = rows, encode, block_rows
        self._is_first = True

    def set_epoch(self, epoch: int) -> None:
        """Tell the rows the epoch, which may draw their order from it."""
        if callable(tell := getattr(self._rows, "set_epoch", None)):
            tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self._rows)
        while block := self._next(rows):
            yield from self._examples(block)

    def _next(self, rows: Iterator[Any]) -> Block:
        return Block(islice(rows, self._block_rows))

    def _examples(self, block: Block) -> Any:
        block.is_first, self._is_first = self._is_first, False
        return self._encode(block)


class ResumableStream(EncodedStream):
    """The examples of a stream with a state.

    Every iteration begins where the stream stood when this object was made, the one after `load_state_dict` where that
    state was taken. The state is the stream's at the start of a block with the number of examples that have been given
    out of it, so that going on is exact whatever was read ahead.
    """

    def __init__(self, rows: Any, encode: Callable[[Block], Any], block_rows: int) -> None:
        super().__init__(rows, encode, block_rows)
        # A stream of the library `datasets` has a state once it is read, and begins anew without one.
        self._begin: dict[str, Any] = {"stream": None if is_of_datasets(rows) else rows.state_dict(), "rows": 0}
        self._loaded: dict[str, Any] | None = None
        self._block, self._num_given = self._begin["stream"], 0

    def state_dict(self) -> dict[str, Any]:
        """The position of the next example of the last iteration, as JSON values."""
        if self._loaded is not None:
            return self._loaded
        return {"stream": self._block, "rows": self._num_given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at a state. Raises DataError if the state is not one of such a stream."""
        if not isinstance(state, dict) or state.keys() != self._begin.keys():
            raise DataError("the state to resume from is not a state of a stream of rows; resume with the same data")
        self._loaded = state

    def __iter__(self) -> Iterator[Any]:
        begin, self._loaded = self._loaded or self._begin, None
        stream: Any = self._rows
        stream.load_state_dict(begin["stream"])
        self._block, self._num_given = begin["stream"], begin["rows"]
        rows = iter(stream)
        while block := self._next(rows):
            examples = self._examples(block)
            following = stream.state_dict()
            if self._num_given >= len(examples):
                self._block, self._num_given = following, 0
            for number in range(self._num_given, len(examples)):
                # Before the example is given out: what is asked then is where the next one stands.
                is_last = number + 1 == len(examples)
                self._block, self._num_given = (following, 0) if is_last else (self._block, number + 1)
                yield examples[number]
