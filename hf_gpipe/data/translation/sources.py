"""The parts of a corpus: one per language (its files or its subset), or one for all languages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.files import files_of, paired
from hf_gpipe.data.formats import Row, count_parquet, read_csv, read_jsonl, read_parallel, read_parquet
from hf_gpipe.data.store import identity_of
from hf_gpipe.data.translation.fields import ONE_LANGUAGE, PLACEHOLDER, UNNAMED, PairFields
from hf_gpipe.errors import CheckpointError, DataError, nearest
from hf_gpipe.recipe import DataSection


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


def languages_of_parts(
    kind: str, languages: Sequence[str], fields: PairFields, *, in_names: bool, key: str = "data.path"
) -> list[str | None]:
    """The language of each part to read; None: one part, whose rows have their own languages or none.

    Args:
        kind: the kind of the corpus.
        languages: the requested languages; empty: all.
        fields: how a row is turned into pairs.
        in_names: whether the files or subsets differ by language.
        key: the key that may have "{language}" in it, for messages.

    Raises:
        DataError: languages that are needed but not known, or named twice.
    """
    if len(set(languages)) < len(languages):
        raise DataError(f"languages names one twice: {', '.join(languages)}; name each language once")
    if fields.language_field is not None:
        if in_names:
            raise DataError(
                f"language_field is {fields.language_field!r}, and {key} has {PLACEHOLDER} in it; only one of them can "
                "say which language a row is in"
            )
        return [None]
    if in_names or fields.name_languages:
        if not languages:
            raise DataError(
                f"languages is empty, and a path, subset or field has {PLACEHOLDER} in it; name the languages to read"
            )
        return list(languages)
    if len(languages) == 1 and kind in UNNAMED:
        return list(languages)
    # A target in English has its name; another one without a name would have the tag of no language.
    is_tagged = ONE_LANGUAGE in fields.targets([ONE_LANGUAGE]) and fields.has_tags([ONE_LANGUAGE])
    if languages or is_tagged:
        wants = "target_tag" if fields.target_tag else "languages" if languages else "direction"
        raise DataError(
            f"{wants} needs to know each pair's language; name the field that holds it in language_field, or write "
            f"{PLACEHOLDER} into {key}"
        )
    return [None]


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


def file_parts(data: DataSection, fields: PairFields) -> list[Part]:
    """The parts of a corpus of local files.

    Raises:
        DataError: no such files, files without their translation, or languages that are not known.
    """
    path, target_path = str(data.path), str(data.target_path) if data.kind == "parallel" else ""
    in_names = PLACEHOLDER in path or PLACEHOLDER in target_path
    parts = []
    for language in languages_of_parts(data.kind, data.languages, fields, in_names=in_names):
        own_path = path.replace(PLACEHOLDER, language or "")
        files = files_of(own_path, data.kind)
        targets: list[Path] = []
        if data.kind == "parallel":
            targets = files_of(target_path.replace(PLACEHOLDER, language or ""), data.kind, "data.target_path")
        parts.append(_file_part(data, own_path, language, files, targets))
    return parts


def _file_part(data: DataSection, name: str, language: str | None, files: list[Path], targets: list[Path]) -> Part:
    read: Callable[[Path, int], Iterator[Row]]
    if data.kind == "parallel":
        target_of = paired(files, targets)
        read = lambda path, start: read_parallel(path, start, target_path=target_of[path])  # noqa: E731  one line
    elif data.kind == "csv":
        read = partial(read_csv, delimiter=data.delimiter)
    else:
        read = {"jsonl": read_jsonl, "parquet": read_parquet}[data.kind]
    return Part(
        name,
        language,
        lambda: FileRows(files, read),
        num_rows=sum(map(count_parquet, files)) if data.kind == "parquet" else None,
        identity=lambda: [identity_of(file) for file in (*files, *targets)],
    )


def counts_of(parts: Sequence[Part], languages: Sequence[str], given: Mapping[str, int]) -> dict[str, int]:
    """The number of training rows of each language, where known; `given` numbers come before those of the data.

    Raises DataError if one of several parts does not tell, or a given name is not one of the languages.
    """
    for name in given:
        if name not in languages:
            raise DataError(
                f"counts: {name!r} is none of the languages {', '.join(languages)}{nearest(name, languages)}"
            )
    counts = dict(given)
    for part in parts:
        if part.language is None and languages != [ONE_LANGUAGE]:
            continue  # of rows that say their language themselves, no part knows how many there are of each
        name = part.language or ONE_LANGUAGE
        if part.num_rows is not None:
            counts.setdefault(name, part.num_rows)
        if name not in counts and len(parts) > 1:
            example = ", ".join(f"{language}: 1000" for language in languages[:3])
            raise DataError(
                f"how often {name!r} is drawn depends on how many pairs it has, and {part.name} does not say; give "
                f"the numbers of all languages, as counts: {{{example}, ...}}"
            )
    return {language: counts[language] for language in languages if language in counts}
