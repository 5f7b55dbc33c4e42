"""The fields of a row of a file or a Hub data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hf_gpipe.errors import DataError, listed, nearest
from hf_gpipe.text import shorten


def text_in(row: Mapping[str, Any], field: str, where: str, *, may_be_empty: bool = False) -> Any:
    """The text in a field; None if it is empty and that is allowed. Raises DataError."""
    value = value_in(row, field, where)
    if may_be_empty and (value is None or (isinstance(value, str) and not value.strip())):
        return None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: field {field!r} is {shorten(repr(value))}; it must be text that is not empty")
    check_characters(value, field, where)
    return value


UNLABELLED = -1
"""The label that data sets have in place of labels that they keep secret."""


def class_of(where: str, label: Any, labels: Sequence[str], label_field: str) -> int:
    """The number of a label, which is one of `labels` or such a number. Raises DataError, by the row and the field."""
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    if label == UNLABELLED:
        raise DataError(
            f"{where}: field {label_field!r} is {UNLABELLED}, as of a row without a label; evaluate on a split that "
            "has labels (evaluation.split), or leave such rows out"
        )
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(labels):
        hint = nearest(label, labels) if isinstance(label, str) else ""
        raise DataError(
            f"{where}: field {label_field!r} is {label!r}{hint}; it must be one of data.labels, "
            f"{listed(list(labels))}, or a number from 0 to {len(labels) - 1}"
        )
    return label


def check_characters(text: str, field: str, where: str) -> None:
    """Raise DataError for half of a surrogate pair, which JSON can write but no file or tokenizer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {field!r} has half of a surrogate pair, which is not a character") from error


def value_in(row: Mapping[str, Any], field: str, where: str) -> Any:
    """The value of a field, or of `a.b` the one inside of a. Raises DataError, which names the fields found."""
    if field in row:
        return row[field]
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            names = list(_names(row))
            raise DataError(
                f"{where}: no field {field!r}{nearest(field, names)}; the fields found are {listed(names) or 'none'}: "
                "correct the name of the field, or the row"
            )
        value = value[name]
    return value


def without_nulls(value: Any) -> Any:
    """The value without keys that are null, at any depth: Arrow gives all mappings of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    """The fields, and those one level inside them."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from (f"{name}.{inner}" for inner in value)
        else:
            yield str(name)
