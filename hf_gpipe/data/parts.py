"""The parts of a corpus that are read one by one: the files or the subset of a language, or all languages in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hf_gpipe.data.fields import ONE_LANGUAGE, PLACEHOLDER, PairFields
from hf_gpipe.data.files import FileRows, Row, files_of, num_rows, paired, reader_of
from hf_gpipe.data.formats import parallel
from hf_gpipe.errors import DataError, nearest

#: Kinds whose rows have no field that could say the language: one language may be named for all of them.
_UNNAMED = ("parallel", "hub")


Subset = str | Sequence[str] | Mapping[str, str] | None
"""The subset of a data set of the Hub: as `hf_gpipe.data.hub.hub_parts` says."""


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
    """

    name: str
    language: str | None
    train: Callable[[], Rows]
    validation: Callable[[], Rows] | None = None
    test: Callable[[], Rows] | None = None
    num_rows: int | None = None


def languages_of_parts(
    kind: str, *, languages: Sequence[str], fields: PairFields, in_names: bool, key: str = "data.path"
) -> list[str | None]:
    """The language of each part to read; None: one part, whose language its rows say or no one does.

    Args:
        kind: of the corpus.
        languages: those asked for; none: all there are.
        fields: of a row.
        in_names: whether the files or subsets differ by language.
        key: the key that may hold "{language}", for messages.

    Raises:
        DataError: languages that are needed and not known, or said twice.
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
    if len(languages) == 1 and kind in _UNNAMED:
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


def local_parts(
    kind: str,
    *,
    path: str,
    target_path: str | None = None,
    delimiter: str | None = None,
    languages: Sequence[str],
    fields: PairFields,
) -> list[Part]:
    """The parts of a corpus of local files.

    Args:
        kind: "jsonl", "csv", "parquet" or "parallel".
        path: a file, a directory or wildcards; "{language}" in it stands for each language.
        target_path: the same of the target's files, for "parallel".
        delimiter: between the values of a row, for "csv".
        languages: those asked for.
        fields: of a row.

    Raises:
        DataError: no such files, files without their translation, or languages that are not known.
    """
    in_names = PLACEHOLDER in path or PLACEHOLDER in (target_path or "")
    parts = []
    for language in languages_of_parts(kind, languages=languages, fields=fields, in_names=in_names):
        own_path, own_target = (name and name.replace(PLACEHOLDER, language or "") for name in (path, target_path))
        files = files_of(str(own_path), kind)
        targets: dict[Path, Path] = {}
        if kind == "parallel":
            targets = paired(files, files_of(str(own_target), kind, "data.target_path"))
        parts.append(_part(kind, str(own_path), language, files, reader_of(kind, delimiter, targets)))
    return parts


def _part(
    kind: str, name: str, language: str | None, files: list[Path], read: Callable[[Path, int], Iterator[Row]]
) -> Part:
    return Part(name, language, lambda: FileRows(files, read), num_rows=num_rows(kind, files))


def fields_of(kind: str, *, source_field: str, target_field: str, **others: Any) -> PairFields:
    """The fields of a row of that kind; line-aligned files have "source" and "target" and no others."""
    if kind == "parallel":
        source_field, target_field = parallel.SOURCE, parallel.TARGET
        others["language_field"] = None
    if others.get("skip_empty") is None:
        # Makers of parallel text keep the place of a sentence that has no translation.
        others["skip_empty"] = kind in _UNNAMED
    return PairFields(source_field=source_field, target_field=target_field, **others)


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
