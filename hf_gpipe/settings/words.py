"""Describes which values are allowed, in the words of a message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {"null": "null", "boolean": "true or false", "integer": "a whole number", "number": "a number"}
_BOUNDS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def describe(schema: Mapping[str, Any]) -> str:
    """Describe the values that a JSON schema allows: "a whole number of at least 1 or null"."""
    *most, last = _alternatives(schema)
    return f"{', '.join(most)} or {last}" if most else last


def _alternatives(schema: Mapping[str, Any]) -> list[str]:
    if "anyOf" in schema:
        names, words = choices(schema), []
        for alternative in sorted(schema["anyOf"], key=lambda alternative: alternative.get("type") == "null"):
            is_list_of_names = names and names == choices(alternative.get("items", {}))
            words += ["a list of these"] if is_list_of_names else _alternatives(alternative)
        return words
    return [repr(name) for name in choices(schema)] or [_one(schema)]


def _one(schema: Mapping[str, Any]) -> str:
    match schema.get("type"):
        case "array":
            return f"a list, each entry {describe(schema['items'])}"
        case "object":
            return "a mapping with strings for keys"
        case "string" if "maxLength" in schema:
            return f"a string of {schema['maxLength']} character{'s' * (schema['maxLength'] != 1)}"
        case "string" if str(schema.get("pattern", "")).endswith("$"):
            suffix = schema["pattern"][1:-1]
            of_what = "the path of a file" if suffix.startswith(".") else "a text"
            return f"{of_what} that ends in {suffix.strip()}"
        case "string":
            return "a non-empty string" if "pattern" in schema else "a string"
        case str(name):
            bounds = " and".join(f" {words} {_plain(schema[key])}" for key, words in _BOUNDS.items() if key in schema)
            return _TYPES[name] + bounds
    return "any value"


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def choices(schema: Mapping[str, Any]) -> list[str]:
    """The names that a JSON schema allows, for hints at misspelt ones; empty if any string is allowed."""
    if "anyOf" in schema:
        return [name for alternative in schema["anyOf"] for name in choices(alternative)]
    return [schema["const"]] if "const" in schema else schema.get("enum", [])
