"""The parts of a corpus: rows of files or of a data set, of a language or of all, readable from any place on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.formats import Row
from hf_gpipe.errors import CheckpointError

#: Placeholder for the language in a field, a path or the name of a subset.
PLACEHOLDER = "{language}"


class Rows(Protocol):
    """Rows with a state to resume from; one object is read through once."""

    def __iter__(self) -> Iterator[Row]:
        """The rows, starting at the loaded state."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the files or shards; epoch 0 keeps the original order."""

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row, as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of the same epoch."""


@dataclass(frozen=True)
class Part:
    """Rows of a corpus.

    Attributes:
        name: its name in messages.
        language: the language of all its rows; None: each row has its own, or the corpus has one unnamed language.
        train: opens the rows to train on; pairs are held out from them if there is no split for that.
        held_out: opens the rows of each of the data set's own splits "validation" and "test".
        num_rows: the number of rows of `train`; None: not known before reading.
        identity: JSON values that identify the content without reading all of it, for the key of the cache.
    """

    name: str
    language: str | None
    train: Callable[[], Rows]
    held_out: Mapping[str, Callable[[], Rows]] = field(default_factory=dict)
    num_rows: int | None = None
    identity: Callable[[], Any] = lambda: None


@dataclass
class FileRows:
    """The rows of some files, one after another; resumes from a `state_dict`.

    Args:
        files: the files in the order of epoch 0; later epochs have other orders.
        read: (file, rows to skip) -> rows.
    """

    files: list[Path]
    read: Callable[[Path, int], Iterator[Row]]
    _epoch: int = 0
    _position: dict[str, int] = field(default_factory=lambda: {"file": 0, "row": 0})

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the files."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """The position of the row after the last one that was read."""
        return {**self._position, "files": len(self.files)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a state of the same epoch. Raises CheckpointError if the number of files was different then."""
        check_count(state.get("files"), len(self.files), "files", str(self.files[0].parent))
        self._position = {"file": state["file"], "row": state["row"]}

    def __iter__(self) -> Iterator[Row]:
        order = list(self.files)
        if self._epoch:
            stable_random("files", self._epoch).shuffle(order)
        position = self._position
        while position["file"] < len(order):
            for row in self.read(order[position["file"]], position["row"]):
                position["row"] += 1
                yield row
            position.update(file=position["file"] + 1, row=0)


def check_count(before: int | None, now: int, what: str, where: str) -> None:
    """Raise CheckpointError if the number of files or shards has changed: the position would mean other rows."""
    if before != now:
        raise CheckpointError(
            f"the place in the data was saved when {where} had {before} {what}, and now it has {now}; give the run the "
            "data that it began with"
        )
