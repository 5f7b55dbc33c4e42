"""Sizes of memory as a user writes them: a number and a unit, such as 80GiB."""

from __future__ import annotations

import re

from hf_gpipe.errors import UserError

UNITS = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
"""Bytes of each unit: kB, MB, GB and TB count in thousands, KiB, MiB, GiB and TiB in 1024s."""

_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z/]*)\s*")
_BY_LOWER_CASE = {unit.lower(): size for unit, size in UNITS.items()}


def number_and_unit(text: str, name: str, what: str, example: str) -> tuple[float, str]:
    """A number above 0 and its unit, such as those of "1.5 TB"; messages say that `name` must be `what`, as `example`.

    Raises:
        UserError: no number, a number that is not above 0, or no unit.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None:
        raise UserError(f"{name} is {text!r}, which is not {what}; write a number and a unit, such as {example}.")
    number, unit = match.groups()
    if not unit:
        raise UserError(
            f"{name} is {text!r}, without a unit; write for example {number}{example.lstrip('0123456789')}."
        )
    if float(number) <= 0:
        raise UserError(f"{name} is {text!r}; it must be above 0.")
    return float(number), unit


def read_bytes(text: str, name: str) -> int:
    """The number of bytes of a size; the case of the unit does not matter.

    Raises:
        UserError: as `number_and_unit`, or an unknown unit, or less than one byte.
    """
    number, unit = number_and_unit(text, name, "a size", "80GiB")
    if unit.lower() not in _BY_LOWER_CASE:
        raise UserError(f"{name} is {text!r}; the unit {unit!r} is not one of {', '.join(UNITS)}.")
    size = int(number * _BY_LOWER_CASE[unit.lower()])
    if size < 1:
        raise UserError(f"{name} is {text!r}; it must be at least one byte.")
    return size
