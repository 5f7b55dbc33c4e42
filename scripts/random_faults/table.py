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
    every = [result for result in results if result["met"]]
    for result in every:
        groups.setdefault((result["fault"], result["launch"]), []).append(result)
    lines = [f"| fault | launch | {' | '.join(_COLUMNS)} |", f"|---|---|{'--:|' * len(_COLUMNS)}"]
    lines += [
        f"| {fault} | {launch} | {' | '.join(_cells(groups[fault, launch]))} |" for fault, launch in sorted(groups)
    ]
    if every:
        lines.append(f"| all | all | {' | '.join(_cells(every))} |")
    return "\n".join(lines)


def _cells(results: list[Mapping[str, Any]]) -> list[str]:
    seconds = [result["seconds"] for result in results]
    must_tell = [result for result in results if result["must_tell"]]
    return [
        str(len(results)),
        f"{median(seconds):.1f}",
        f"{max(seconds):.1f}",
        f"{sum(bool(result['told']) for result in must_tell)} of {len(must_tell)}",
        *(str(sum(result[name] for result in results)) for name in ("hang", "loss", "silent")),
        f"{sum(result['bit_equal'] for result in results)} of {len(results)}",
        str(sum(bool(result["problems"]) for result in results)),
    ]
