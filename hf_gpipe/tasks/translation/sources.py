"""The parts of a corpus: one per language (its files or its subset), or one for all languages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from hf_gpipe.data.files import check_data_set, files_of, paired
from hf_gpipe.data.formats import Row, count_parquet, read_csv, read_jsonl, read_parallel, read_parquet
from hf_gpipe.data.parts import PLACEHOLDER, FileRows, Part
from hf_gpipe.data.prepared import identity_of
from hf_gpipe.errors import DataError, nearest
from hf_gpipe.recipe import DataSection
from hf_gpipe.tasks.translation.fields import ONE_LANGUAGE, UNNAMED, PairFields


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


def hub_parts(data: DataSection, fields: PairFields) -> list[Part]:
    """The parts of a data set; its own splits "validation" and "test" are used for each part.

    Args:
        data: its path, subset and revision, and the languages to read; with a mapping of subsets, an empty list means
            all of its languages. Of several names of a subset, the first that the data set has is read, for data sets
            that order the languages of a pair alphabetically ("de-en" and "en-zh"). A stream reads rows remotely;
            otherwise the data set is downloaded first.
        fields: how a row is turned into pairs.

    Raises:
        DataError: the data set, the subset or the training split does not exist; names those that do.
    """
    from hf_gpipe.data.hub import hub_part  # its library takes a second to import

    path, subset, languages = str(data.path), data.subset, data.languages
    if isinstance(subset, Mapping) and not languages:
        languages = list(subset)
    templates = [] if subset is None or isinstance(subset, Mapping) else [subset] if isinstance(subset, str) else subset
    in_names = isinstance(subset, Mapping) or any(PLACEHOLDER in name for name in (path, *templates))
    parts = []
    for language in languages_of_parts(data.kind, languages, fields, in_names=in_names, key="data.subset"):
        own_path = path.replace(PLACEHOLDER, language or "")
        check_data_set(own_path, data.kind)
        parts.append(hub_part(own_path, subset, data.revision, language, streaming=data.streaming))
    return parts
