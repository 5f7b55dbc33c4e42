"""The table of all results: a line for each fault and kind of launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

_COLUMNS = ("count", "median s", "longest s", "told", "hangs", "losses", "silent", "bit-equal", "wrong")


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """The table, as Markdown. "told": of those whose run had to say why it ended; "bit-equal": of all that ended well,
    at once or resumed."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    every = [one for one in results if one["met"]]
    for one in every:
        groups.setdefault((one["fault"], one["launch"]), []).append(one)
    lines = [f"| fault | launch | {' | '.join(_COLUMNS)} |", f"|---|---|{'--:|' * len(_COLUMNS)}"]
    lines += [
        f"| {fault} | {launch} | {' | '.join(_cells(groups[fault, launch]))} |" for fault, launch in sorted(groups)
    ]
    if every:
        lines.append(f"| all | all | {' | '.join(_cells(every))} |")
    return "\n".join(lines)


def _cells(ones: list[Mapping[str, Any]]) -> list[str]:
    seconds = [one["seconds"] for one in ones]
    must_tell = [one for one in ones if one["must_tell"]]
    return [
        str(len(ones)),
        f"{median(seconds):.1f}",
        f"{max(seconds):.1f}",
        f"{sum(bool(one['told']) for one in must_tell)} of {len(must_tell)}",
        *(str(sum(one[name] for one in ones)) for name in ("hang", "loss", "silent")),
        f"{sum(one['bit_equal'] for one in ones)} of {len(ones)}",
        str(sum(bool(one["problems"]) for one in ones)),
    ]
