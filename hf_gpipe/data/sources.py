"""Where rows come from: the parts of a corpus, which are a language's files or subset each, or all languages in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.fields import ONE_LANGUAGE, PLACEHOLDER, UNNAMED, PairFields
from hf_gpipe.data.files import files_of, paired
from hf_gpipe.data.formats import Row, count_parquet, read_csv, read_jsonl, read_parallel, read_parquet
from hf_gpipe.data.store import identity_of
from hf_gpipe.errors import CheckpointError, DataError, nearest
from hf_gpipe.recipe import DataSection


class Rows(Protocol):
    """Rows that can be left and gone on with; one object is read through once."""

    def __iter__(self) -> Iterator[Row]:
        """The rows, from the state loaded on."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the files or shards; 0 is their own."""

    def state_dict(self) -> dict[str, Any]:
        """Where the next row stands, in a form that JSON can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the epoch must be the same."""


@dataclass(frozen=True)
class Part:
    """Rows of a corpus.

    Attributes:
        name: what messages call it.
        language: of all its rows; None: they say it themselves, or the corpus has one language without a name.
        train: opens the rows to train on, and to hold out from where there is no split for it.
        validation: opens the rows of the data set's own validation split; None: it has none.
        test: the same of its test split.
        num_rows: of `train`; None: only reading tells.
        identity: of the content, without reading all of it, as JSON values: a cache is asked by it.
    """

    name: str
    language: str | None
    train: Callable[[], Rows]
    validation: Callable[[], Rows] | None = None
    test: Callable[[], Rows] | None = None
    num_rows: int | None = None
    identity: Callable[[], Any] = lambda: None


def languages_of_parts(
    kind: str, languages: Sequence[str], fields: PairFields, *, in_names: bool, key: str = "data.path"
) -> list[str | None]:
    """The language of each part to read; None: one part, whose rows say their languages, or have none.

    Args:
        kind: of the corpus.
        languages: those asked for; none: all there are.
        fields: of a row.
        in_names: whether the files or subsets differ by language.
        key: the key that may hold "{language}", for messages.

    Raises:
        DataError: languages that are needed and not known, or named twice.
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
    """The training rows of each language, where they are known; `given` ones before those that the data tell.

    Raises DataError where one of several parts does not say, or a name is given that is none of the languages.
    """
    for name in given:
        if name not in languages:
            raise DataError(
                f"counts: {name!r} is none of the languages {', '.join(languages)}{nearest(name, languages)}"
            )
    found = dict(given)
    for part in parts:
        if part.language is None and languages != [ONE_LANGUAGE]:
            continue  # of rows that say their language themselves, no part knows how many there are of each
        name = part.language or ONE_LANGUAGE
        if part.num_rows is not None:
            found.setdefault(name, part.num_rows)
        if name not in found and len(parts) > 1:
            example = ", ".join(f"{language}: 1000" for language in languages[:3])
            raise DataError(
                f"how often {name!r} is drawn depends on how many pairs it has, and {part.name} does not say; give "
                f"the numbers of all languages, as counts: {{{example}, ...}}"
            )
    return {language: found[language] for language in languages if language in found}
