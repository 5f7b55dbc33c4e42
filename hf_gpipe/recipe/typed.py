"""Does a value fit a type annotation? Strictly: nothing is converted but a whole number to a float.

Understands int, float, bool, str, None, Any, Literal, list, dict, unions, and Annotated with the constraints below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin

_WORDS: dict[Any, str] = {
    NoneType: "null",
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}
_LONGEST_SHOWN = 60


class Constraint(Protocol):
    """What Annotated[type, constraint] demands beyond the type."""

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is within the constraint."""

    def describe(self, base: str) -> str:
        """The words for what is allowed, given the words for the type alone."""


@dataclass(frozen=True)
class Range:
    """A number between bounds; None is no bound."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def allows(self, value: float) -> bool:
        """Whether `value` is within every bound."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def describe(self, base: str) -> str:
        """For example "a number of at least 0 and below 1"."""
        bounds = {
            "of at least": self.at_least,
            "above": self.above,
            "at most": self.at_most,
            "below": self.below,
        }
        return f"{base} " + " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)


@dataclass(frozen=True)
class NotEmpty:
    """A string or list with something in it."""

    def allows(self, value: str | list[Any]) -> bool:
        """Whether there is anything in `value`; spaces alone are nothing."""
        return bool(value.strip() if isinstance(value, str) else value)

    def describe(self, base: str) -> str:
        """For example "a string that is not empty"."""
        return f"{base} that is not empty"


@dataclass(frozen=True)
class Length:
    """A string of so many characters."""

    characters: int

    def allows(self, value: str) -> bool:
        """Whether `value` is as long."""
        return len(value) == self.characters

    def describe(self, base: str) -> str:
        """For example "a string of 1 character"."""
        return f"{base} of {self.characters} character{'s' * (self.characters != 1)}"


@dataclass(frozen=True)
class OneOf:
    """A name out of a collection that another module owns; Literal is for names that stand in the annotation.

    `or_suffix`: the path of a file that ends in this does as well; empty: none does.
    """

    names: tuple[str, ...]
    or_suffix: str = ""

    def allows(self, value: str) -> bool:
        """Whether `value` is one of the names, or a path with that end."""
        return value in self.names or (bool(self.or_suffix) and value.endswith(self.or_suffix))

    def describe(self, base: str) -> str:
        """The names, whatever the base type."""
        files = [f"the path of a file that ends in {self.or_suffix}"] if self.or_suffix else []
        return _either([*(repr(name) for name in self.names), *files])


class MismatchError(Exception):
    """A value that does not fit its annotation; `convert` raises it for a caller that knows the key.

    `within` says where below the value given, for example "[2]".
    """

    def __init__(self, found: Any, expected: Any, within: str = "") -> None:
        super().__init__(f"found {show(found)}, expected {describe(expected)}")
        self.found = found
        self.expected = expected
        self.within = within


def convert(value: Any, expected: Any) -> Any:
    """`value` itself, or as a float where a float is expected and an int was given.

    Raises:
        MismatchError: the value is of another type or outside its constraint. A bool is no number.
    """
    origin = get_origin(expected)
    if origin is Annotated:
        base, *constraints = get_args(expected)
        try:
            converted = convert(value, base)
        except MismatchError as error:
            raise error if error.within else MismatchError(value, expected) from error
        if not all(constraint.allows(converted) for constraint in constraints):
            raise MismatchError(value, expected)
        return converted
    if origin in (Union, UnionType):
        return _first_that_fits(value, expected)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in get_args(expected)):
            return value
        raise MismatchError(value, expected)
    if origin is list and isinstance(value, list):
        return [_entry(entry, get_args(expected)[0], index) for index, entry in enumerate(value)]
    if origin is dict and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return value
    if expected is float:
        return _float(value)
    if expected is Any or type(value) is expected:
        return value
    raise MismatchError(value, expected)


def describe(expected: Any) -> str:
    """What an annotation allows, in words: "a whole number of at least 1 or null"."""
    origin = get_origin(expected)
    if origin is Annotated:
        base, *constraints = get_args(expected)
        words = describe(base)
        for constraint in constraints:
            words = constraint.describe(words)
        return words
    if origin in (Union, UnionType):
        null_first = sorted(get_args(expected), key=lambda alternative: alternative is not NoneType)
        return _either(describe(alternative) for alternative in null_first)
    if origin is Literal:
        return _either(repr(choice) for choice in get_args(expected))
    if origin is list:
        return f"a list, each entry {describe(get_args(expected)[0])}"
    if origin is dict:
        return "a mapping with strings for keys"
    return "true or false" if expected is bool else _WORDS[expected]


def choices(expected: Any) -> list[str]:
    """The names that an annotation allows, to find the nearest to a misspelt one; empty where any string will do."""
    origin = get_origin(expected)
    if origin in (Union, UnionType):
        return [choice for alternative in get_args(expected) for choice in choices(alternative)]
    if origin is Literal:
        return [choice for choice in get_args(expected) if isinstance(choice, str)]
    if origin is Annotated:
        return [
            name for constraint in get_args(expected)[1:] if isinstance(constraint, OneOf) for name in constraint.names
        ]
    return []


def show(value: Any) -> str:
    """A value and its type as a message names them: "'two' (a string)"."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    text = shorten(repr(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f"{text} (not a finite number)"
    return f"{text} ({_WORDS[type(value)]})"


def shorten(text: str) -> str:
    """The start of a text that is too long for a message."""
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _first_that_fits(value: Any, expected: Any) -> Any:
    for alternative in get_args(expected):
        try:
            return convert(value, alternative)
        except MismatchError:
            continue
    raise MismatchError(value, expected)


def _entry(value: Any, expected: Any, index: int) -> Any:
    try:
        return convert(value, expected)
    except MismatchError as error:
        raise MismatchError(error.found, error.expected, f"[{index}]{error.within}") from error


def _float(value: Any) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MismatchError(value, float)
    return number


def _either(alternatives: Iterable[str]) -> str:
    *most, last = alternatives
    return f"{', '.join(most)} or {last}" if most else last
