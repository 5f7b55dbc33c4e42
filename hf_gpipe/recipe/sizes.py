"""Sizes of memory as a user writes them: a number and a unit, such as 80GiB."""

from __future__ import annotations

import re

from hf_gpipe.errors import UserError

UNITS = {
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)},
}
"""Bytes of each unit: kB, MB, GB and TB count in thousands, KiB, MiB, GiB and TiB in 1024s."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*")
_BY_LOWER_CASE = {unit.lower(): size for unit, size in UNITS.items()}


def read_bytes(text: str, name: str) -> int:
    """Return the number of bytes of a size; the case of the unit does not matter.

    Args:
        text: for example "80GiB" or "1.5 TB".
        name: of the key or option, for the message.

    Raises:
        UserError: no number, no unit, an unknown unit, or less than one byte.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(f"{name} is {text!r}, which is not a size; write a number and a unit, such as 80GiB.")
    number, unit = match.groups()
    if not unit:
        raise UserError(f"{name} is {text!r}, without a unit; write for example {number}GiB.")
    if unit.lower() not in _BY_LOWER_CASE:
        raise UserError(f"{name} is {text!r}; the unit {unit!r} is not one of {', '.join(UNITS)}.")
    size = int(float(number) * _BY_LOWER_CASE[unit.lower()])
    if size < 1:
        raise UserError(f"{name} is {text!r}; it must be at least one byte.")
    return size
