"""A parallel corpus read from a local file: one JSON object a line, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.pairs import Corpus, Pair, language_tag, split_pairs, tagged
from hf_gpipe.errors import DataError, nearest

# What `language` says of the pairs of a file that names no languages.
ONE_LANGUAGE = "all"
SIDES = ("source", "target")
_LONGEST_SHOWN = 60


def jsonl_corpus(
    *,
    path: str | Path,
    source_field: str = "source",
    target_field: str = "target",
    language_field: str | None = None,
    languages: Sequence[str] = (),
    split_by: str = "source",
    target_tag: bool = False,
    max_examples: int | None = None,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
    seed: int = 0,
) -> Corpus:
    """Reads the pairs of `path` (gzipped when its name ends in ".gz") and splits them.

    `language_field` names the field with the code of the side that is not English; without one, all pairs count as
    one language called "all". `languages`, where given, keeps only those. `target_tag` puts "<2xx>" with that code in
    front of the source. Pairs are split by the hash of their `split_by` side: choose the side whose sentences recur,
    so that none of them is in two splits. `max_examples` keeps that many pairs, chosen by the seed, in file order.

    Raises DataError for a file that is missing, unreadable or empty, and for the first line that is not a JSON object
    with non-empty strings in these fields; the message names the line, the field and the fields found.
    """
    if split_by not in SIDES:
        raise DataError(f"split_by is {split_by!r}{nearest(split_by, SIDES)}; choose 'source' or 'target'")
    if language_field is None and (target_tag or languages):
        wants = "target_tag" if target_tag else "languages"
        raise DataError(f"{wants} needs to know each pair's language; name the field that holds it in language_field")
    if max_examples is not None and max_examples < 1:
        raise DataError(f"max_examples is {max_examples}; it must be at least 1, or null for the whole file")

    pairs: list[Pair] = []
    for where, record in _records(Path(path)):
        source = _text(record, source_field, where)
        target = _text(record, target_field, where)
        language = ONE_LANGUAGE if language_field is None else _text(record, language_field, where)
        split_key = source if split_by == "source" else target
        pairs.append(Pair(tagged(source, language) if target_tag else source, target, language, split_key))

    found = sorted({pair.language for pair in pairs})
    if not found:
        raise DataError(f"{path} has no pairs; write one JSON object a line")
    for language in languages:
        if language not in found:
            raise DataError(
                f"languages: {path} has no pairs in {language!r}{nearest(language, found)}; it has {', '.join(found)}"
            )
    if languages:
        pairs = [pair for pair in pairs if pair.language in languages]
    if max_examples is not None and max_examples < len(pairs):
        chosen = stable_random("max_examples", seed).sample(range(len(pairs)), max_examples)
        pairs = [pairs[index] for index in sorted(chosen)]
    kept = {pair.language for pair in pairs}
    return split_pairs(
        pairs,
        languages=[language for language in languages or found if language in kept],
        validation_fraction=validation_fraction,
        test_fraction=test_fraction,
        target_tags=[language_tag(language) for language in languages or found] if target_tag else [],
    )


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line that is not blank, as ("file, line 7", the object on it)."""
    line_number = 0
    try:
        with _open(path) as lines:
            for line_number, line in enumerate(lines, start=1):
                if line.strip():
                    where = f"{path}, line {line_number}"
                    yield where, _record(line, where)
    except FileNotFoundError as error:
        raise DataError(f"data file {path} does not exist (looked in {Path.cwd()}); correct `path`") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, after line {line_number}: not UTF-8 ({error.reason}); convert the file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data file {path} cannot be read: {error}") from error


def _open(path: Path) -> TextIO:
    # utf-8-sig: a byte order mark at the start is no part of the first line.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one object a line") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets by the thousand
        raise DataError(f"{where}: JSON that cannot be read ({error}); write one object a line") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__} where an object such as {{...}} is needed")
    return record


def _text(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise DataError(
            f"{where}: no field {field!r}{nearest(field, record)}; the fields found are {', '.join(record) or 'none'}"
        )
    value = record[field]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: field {field!r} is {_short(value)}; it must be text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} has half of a surrogate pair, which is no character") from error
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
