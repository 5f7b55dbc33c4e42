"""Local files as rows: which files a path means, and reading them from any row on."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.formats import delimited, jsonl, parallel, parquet
from hf_gpipe.errors import CheckpointError, DataError

Row = tuple[str, Mapping[str, Any]]
"""What messages call a row, and its values by name."""

#: How names of files end, for each kind of local corpus.
SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz"),
    "csv": (".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    "parquet": (".parquet",),
    "parallel": (),
    "text": (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet"),
}


def files_of(path: str, kind: str, key: str = "data.path") -> list[Path]:
    """The files that `path` names: itself, those that fit its wildcards, or all of the kind in a directory, sorted.

    Raises DataError where there are none.
    """
    try:
        expanded = Path(path).expanduser()
        found, is_directory = _found(expanded, kind), expanded.is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise DataError(f"{key}: there is no file {path!r} ({error}); correct the path") from error
    if is_directory and (held_out := held_out_beside_others(found)):
        raise DataError(
            f"{key}: {path} has files that look held out, as {held_out[0].name}, beside others, as "
            f"{next(file for file in found if file not in held_out).name}, and all would be trained on; name those to "
            f"train on, as {Path(path) / 'train*'}"
        )
    if not found:
        if is_directory:
            why = "which of its files is meant is not known"
            if SUFFIXES[kind]:
                why = f"it has no files with names in {', '.join(SUFFIXES[kind])}"
            raise DataError(f"{key}: the directory {path} cannot be read, for {why}; name the file")
        if glob.has_magic(path):
            raise DataError(f"{key}: no file fits {path} (looked in {Path.cwd()}); correct the path")
        why = "is no regular file" if Path(path).exists() else "does not exist"
        raise DataError(
            f"{key}: there is no file {path} ({Path(path).name} {why}; looked in {Path.cwd()}); correct the path"
        )
    return found


def held_out_beside_others(files: Sequence[Path]) -> list[Path]:
    """The files of splits that are not for training, by the beginning of their names, where there are others too."""
    held_out = [file for file in files if re.match(r"(validation|valid|val|dev|test)(?![a-zA-Z])", file.name)]
    return held_out if len(held_out) < len(files) else []


def _found(path: Path, kind: str) -> list[Path]:
    if path.is_dir():
        # Without endings of its own a kind's files cannot be told from others.
        return sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(SUFFIXES[kind]))
    if path.is_file():
        return [path]
    return sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_file())


@dataclass
class FileRows:
    """The rows of some files, one after another; goes on where `state_dict` was taken.

    Args:
        files: in the order of epoch 0; other epochs have others.
        read: (file, rows to pass over) -> rows.
    """

    files: list[Path]
    read: Callable[[Path, int], Iterator[Row]]
    _epoch: int = 0
    _position: dict[str, int] = field(default_factory=lambda: {"file": 0, "row": 0})

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the files."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        """Where the row after the last one read stands."""
        return {**self._position, "files": len(self.files)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state of the same epoch. Raises CheckpointError where there were more files or fewer then."""
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
    """Raise CheckpointError where a place is one among another number of files or shards: it would mean other rows."""
    if before != now:
        raise CheckpointError(
            f"the place in the data was saved when {where} had {before} {what}, and now it has {now}; give the run the "
            "data that it began with"
        )


def reader_of(kind: str, delimiter: str | None, targets: Mapping[Path, Path]) -> Callable[[Path, int], Iterator[Row]]:
    """The format's reader; `targets` has the target's file for each of the source, for the kind "parallel"."""
    if kind == "parallel":
        return lambda path, start: parallel.read(path, start, target_path=targets[path])
    if kind == "csv":
        return partial(delimited.read, delimiter=delimiter)
    return {"jsonl": jsonl.read, "parquet": parquet.read}[kind]


def paired(sources: list[Path], targets: list[Path]) -> dict[Path, Path]:
    """The target's file for each of the source's, in their sorted order. Raises DataError for unequal numbers."""
    if len(sources) != len(targets):
        raise DataError(
            f"data.path names {len(sources)} files and data.target_path {len(targets)}; each needs its translation"
        )
    return dict(zip(sources, targets, strict=True))


def num_rows(kind: str, files: list[Path]) -> int | None:
    """How many rows the files have, where that is known without reading them."""
    return sum(map(parquet.count, files)) if kind == "parquet" else None
