"""Finds the files that a path of a recipe names."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_gpipe.data.parts import PLACEHOLDER
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.recipe import DataSection
from hf_gpipe.recipe.data import PATHS
from hf_gpipe.settings.kinds import ROW_KINDS, ROW_LENGTH_KINDS, files_like
from hf_gpipe.sources import is_here

#: So much of a file's beginning and end is compared between machines.
_END_BYTES = 1 << 16
#: Suffixes of files, for each kind of local corpus.
SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz"),
    "csv": (".csv", ".csv.gz", ".tsv", ".tsv.gz"),
    "parquet": (".parquet",),
    "parallel": (),
    **dict.fromkeys(ROW_LENGTH_KINDS, (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")),
    "text": (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet"),
    "images": (".parquet",),
}


def suffixes_of(kind: str) -> tuple[str, ...]:
    """The suffixes of the files that a kind of data reads."""
    return SUFFIXES[files_like(kind)]


def files_of(path: str, kind: str, key: str = "data.path") -> list[Path]:
    """The files that `path` names, sorted: itself, those that match its wildcards, or all of the kind in a directory.

    Raises DataError if there are none.
    """
    try:
        files, is_directory = _found(Path(path), kind), Path(path).is_dir()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise DataError(f"{key}: there is no file {path!r} ({error}); correct the path") from error
    if is_directory and (held_out := held_out_beside_others(files)):
        raise DataError(
            f"{key}: {path} has files that look held out, as {held_out[0].name}, beside others, as "
            f"{next(file for file in files if file not in held_out).name}, and all would be trained on; name those to "
            f"train on, as {Path(path) / 'train*'}"
        )
    if not files:
        if is_directory:
            why = "it is not known which of its files to read"
            if suffixes_of(kind):
                why = f"it has no files with names in {', '.join(suffixes_of(kind))}"
            raise DataError(f"{key}: the directory {path} cannot be read: {why}; name the file")
        if glob.has_magic(path):
            raise DataError(f"{key}: no file matches {path} (looked in {Path.cwd()}); correct the path")
        why = "is not a regular file" if Path(path).exists() else "does not exist"
        raise DataError(
            f"{key}: there is no file {path} ({Path(path).name} {why}; looked in {Path.cwd()}); correct the path"
        )
    return files


def held_out_beside_others(files: Sequence[Path]) -> list[Path]:
    """The files whose names begin like a validation or test split, if there are other files too."""
    held_out = [file for file in files if re.match(r"(validation|valid|val|dev|test)(?![a-zA-Z])", file.name)]
    return held_out if len(held_out) < len(files) else []


def is_local(path: str, kind: str) -> bool:
    """Whether `path` means files of this machine that have rows of a kind, there or not; otherwise it is a data set.

    Raises DataError where it can be neither.
    """
    if glob.has_magic(path) or path.endswith(suffixes_of(kind)):
        return True
    if not _is_here(path):
        return False
    files = _found(place := Path(path), kind)
    # A directory with splits has the form of a data set, unless its documents are paragraphs, of which `datasets` knows
    # nothing.
    has_splits = bool(held_out_beside_others(files)) and not any(".txt" in file.name for file in files)
    return place.is_file() or (bool(files) and not has_splits)


def check_data_set(path: str, kind: str) -> None:
    """Raise DataError where `path` is neither a directory nor an id on the Hub, which `datasets` would take it for."""
    if _is_here(path) and not Path(path).is_dir():
        kinds = ", or name the kind of its rows, such as data.kind=chat or, for pairs, data.kind=jsonl"
        raise DataError(
            f"data.path: {path} is a file, and data.kind is {kind}; give {PATHS[files_like(kind)]}"
            f"{kinds if kind == 'hub' else ''}"
        )


def _is_here(path: str) -> bool:
    try:
        return is_here(path)
    except UserError as error:
        raise DataError(f"data.path: {error}") from None


def _found(path: Path, kind: str) -> list[Path]:
    if path.is_dir():
        # Without a suffix the files of a kind cannot be told from others.
        return sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(suffixes_of(kind)))
    if path.is_file():
        return [path]
    return sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_file())


def paired(sources: list[Path], targets: list[Path]) -> dict[Path, Path]:
    """The target file of each source file, in sorted order. Raises DataError if the numbers differ."""
    if len(sources) != len(targets):
        raise DataError(
            f"data.path names {len(sources)} files and data.target_path {len(targets)}; each needs its translation"
        )
    return dict(zip(sources, targets, strict=True))


def check_files(data: DataSection) -> None:
    """Raise DataError where the path of a corpus leads nowhere; nothing is read, and the Hub is not asked."""
    if data.chat_template is not None:
        read_template(data.chat_template)
    if data.kind == "cldr":
        return
    for key, name in _paths(data):
        if data.kind == "hub":
            check_data_set(name, data.kind)
        elif data.kind in ROW_KINDS or is_local(name, data.kind):
            try:
                files_of(name, data.kind, key)
            except DataError as error:
                if data.made_by is None:
                    raise
                raise DataError(f"{error}, or make the file: {data.made_by}") from error


def _paths(data: DataSection) -> Iterator[tuple[str, str]]:
    """The paths of a corpus of files, each with its key; one with a place for a language once for each."""
    target_path = data.target_path if data.kind == "parallel" else None
    for key, name in (("data.path", data.path), ("data.target_path", target_path)):
        if name is not None:
            for language in data.languages if PLACEHOLDER in name else [""]:
                yield key, name.replace(PLACEHOLDER, language)


def digest_of_files(data: DataSection) -> str:
    """A hash of the names and sizes of a corpus's files, and of the beginning and end of each; empty if there are none.

    It reads little, so that two machines can compare their copies of a large corpus.
    """
    digest, is_empty = hashlib.blake2b(digest_size=8), True
    for key, name in _paths(data) if files_like(data.kind) in SUFFIXES else ():
        try:
            files = files_of(name, data.kind, key)
        except DataError:
            continue
        for path in files:
            is_empty = False
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                digest.update(f"{path.name} {size}".encode())
                for place in (0, max(0, size - _END_BYTES)):
                    file.seek(place)
                    digest.update(file.read(_END_BYTES))
    return "" if is_empty else digest.hexdigest()


def read_template(path: str) -> str:
    """The chat template in a file. Raises DataError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.chat_template: {path} cannot be read ({error}; looked in {Path.cwd()}); give a file with a Jinja "
            "template"
        ) from error
