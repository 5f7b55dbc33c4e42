"""Pages that people write and in which scripts write some parts: each stands between <!-- NAME --> and its end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def block(text: str) -> str:
    """A part that is a paragraph, a table or code of its own; other parts stand inside of a line."""
    return f"\n\n{text}\n\n"


def filled(text: str, parts: Mapping[str, str]) -> str:
    """The text of a page with other parts. Raises ValueError where the page has no place for one."""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, found, rest = text.partition(begin)
        _, has_end, tail = rest.partition(end)
        if not (found and has_end):
            raise ValueError(f"the page has no place for {name}: write {begin} and {end} where it shall stand")
        text = f"{head}{begin}{part}{end}{tail}"
    return text


def write(path: Path, parts: Mapping[str, str], *, only_check: bool = False) -> bool:
    """Write the parts of a page; whether they were there already. With `only_check` nothing is written."""
    text = path.read_text(encoding="utf-8")
    new = filled(text, parts)
    if new != text and not only_check:
        path.write_text(new, encoding="utf-8")
    return new == text
