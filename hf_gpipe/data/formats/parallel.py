"""Two text files whose lines are translations of each other, as of OPUS and WMT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hf_gpipe.data.formats.text import numbered_lines
from hf_gpipe.errors import DataError

SOURCE, TARGET = "source", "target"


def read(path: Path, start: int = 0, *, target_path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each line with the target's line of the same number, as ("file, line 7", {"source": ..., "target": ...}).

    Raises DataError at the end of the shorter file where the other one has more lines; the message has both numbers.
    """
    # A carriage return inside a line ends none: it would end it on one side only.
    sources, targets = numbered_lines(path, "\n"), numbered_lines(target_path, "\n")
    for number, (source, target) in enumerate(zip_longest(sources, targets), start=1):
        if source is None or target is None:
            more = 1 + sum(1 for _ in (targets if source is None else sources))
            counts = [number - 1, number - 1 + more]
            of_source, of_target = counts if source is None else reversed(counts)
            raise DataError(
                f"{path} has {of_source} lines and {target_path} has {of_target}; the lines of one must be the "
                "translations of the other's, so give files with equally many"
            )
        if number > start:
            yield f"{path}, line {number}", {SOURCE: source[1].rstrip("\r\n"), TARGET: target[1].rstrip("\r\n")}
