"""Results of a part as named texts: how they are kept in files, and how two of them are compared."""

from __future__ import annotations

import difflib
import lzma
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "frozen"
#: Every entry begins with a line of this and its name.
_HEAD = "### "
#: A number of a text.
_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
#: So many lines of a difference are shown.
_MOST_LINES = 12

Entries = dict[str, str]
"""The text of each entry, by its name."""


class Tolerance(NamedTuple):
    """How far a number of an entry may be off.

    Attributes:
        relative: as a share of the larger number.
        absolute: in the unit of the number.
    """

    relative: float = 0.0
    absolute: float = 0.0


EXACT = Tolerance()
IN_FLOAT64 = Tolerance(1e-8, 1e-10)
"""Of sums in another order. With `freeze.ENVIRONMENT`, and a mathematical library without the newer instructions, runs
differ by at most 1e-13. With all instructions of a processor it would be up to 5e-5 after four steps, because masks,
positions, norms and softmax of many models are of float32 in float64 models too."""
IN_FLOAT32 = Tolerance(1e-4, 1e-6)
"""Of float32, of weights in 8 or 4 bits, and of float32 adapters."""
IN_HALF = Tolerance(2e-2, 1e-3)
"""Of bfloat16 and float16, where a rounding that goes the other way is up to 4e-3 of a value."""
ToleranceOf = Callable[[str], Tolerance]
"""The tolerance of an entry, by its name."""


def exact(name: str) -> Tolerance:
    """No number may be off."""
    return EXACT


def write(path: Path, entries: Mapping[str, str]) -> None:
    """Write entries, sorted by their names; a path that ends in .xz is compressed.

    Raises:
        ValueError: a line of an entry begins as the name of an entry does.
    """
    text = "".join(f"{_HEAD}{name}\n{text.rstrip()}\n" for name, text in sorted(entries.items()))
    if f"\n{text}".count(f"\n{_HEAD}") != len(entries):
        raise ValueError(f"{path.name}: a line of an entry, or its name, has {_HEAD!r} or a line break")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else data)


def read(path: Path) -> Entries:
    """Read the entries of a file; there are none if there is no file."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    entries: Entries = {}
    for entry in f"\n{text}".split(f"\n{_HEAD}")[1:]:
        name, _, body = entry.partition("\n")
        entries[name] = body.rstrip()
    return entries


def differences(before: Mapping[str, str], now: Mapping[str, str], tolerance_of: ToleranceOf = exact) -> Iterator[str]:
    """Yield a text for each entry that differs, with the lines before and now."""
    for name in sorted({*before, *now}):
        if name not in now:
            yield f"{name}: gone; it was\n{_shown(before[name])}"
        elif name not in before:
            yield f"{name}: new; it is\n{_shown(now[name])}"
        elif not _is_same(before[name], now[name].rstrip(), tolerance_of(name)):
            yield f"{name}: differs\n{_difference(before[name], now[name], tolerance_of(name))}"


def _is_same(before: str, now: str, tolerance: Tolerance) -> bool:
    if before == now:
        return True
    if tolerance == EXACT or _NUMBER.split(before) != _NUMBER.split(now):
        return False
    pairs = zip(_NUMBER.findall(before), _NUMBER.findall(now), strict=True)
    return all(one == other or _is_close(one, other, tolerance) for one, other in pairs)


def _is_close(one: str, other: str, tolerance: Tolerance) -> bool:
    """Whether two numbers, as texts, are within a tolerance. Whole numbers, such as bytes and token ids, are exact."""
    if one.lstrip("-").isdigit() and other.lstrip("-").isdigit():
        return False
    first, second = float(one), float(other)
    return abs(first - second) <= max(tolerance.relative * max(abs(first), abs(second)), tolerance.absolute)


def _difference(before: str, now: str, tolerance: Tolerance) -> str:
    """The lines that differ by more than the tolerance, those before with a minus and those now with a plus."""
    one, other = before.splitlines(), now.splitlines()
    if len(one) == len(other):
        pairs = zip(one, other, strict=True)
        lines = [line for old, new in pairs if not _is_same(old, new, tolerance) for line in (f"- {old}", f"+ {new}")]
    else:
        compared = difflib.unified_diff(one, other, "before", "now", lineterm="", n=1)
        lines = [line for line in compared if not line.startswith("@@")]
    return _shown("\n".join(lines))


def _shown(text: str) -> str:
    lines = [line if len(line) <= 400 else f"{line[:400]} ..." for line in text.splitlines()]
    left = len(lines) - _MOST_LINES
    return "\n".join(
        f"    {line}" for line in [*lines[:_MOST_LINES], *([f"... {left} more lines"] if left > 0 else [])]
    )
