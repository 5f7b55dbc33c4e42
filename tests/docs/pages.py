"""The Markdown pages of the repository, and their parts: prose, code and headings."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_FENCE = re.compile(r"^ *(```+|~~~+)\s*(\S*)")
_HEADING = re.compile(r"^(#{1,6}) +(.*?)#*$")


@dataclass(frozen=True)
class Block:
    """A fenced block of code: where it begins, its language, and its text."""

    line: int
    language: str
    text: str
    note: str
    """The line before it, such as a comment that says who runs it."""


@dataclass(frozen=True)
class Page:
    """A page of Markdown."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(REPOSITORY))

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def _parts(self) -> tuple[list[tuple[int, str]], list[Block]]:
        prose: list[tuple[int, str]] = []
        blocks: list[Block] = []
        end, begin, language, inside = "", 0, "", list[str]()
        for number, line in enumerate(self.lines, 1):
            fence = _FENCE.match(line)
            if end:
                if fence and fence[1].startswith(end) and not fence[2]:
                    note = self.lines[begin - 2] if begin > 1 else ""
                    blocks.append(Block(begin, language, "\n".join(inside) + "\n", note))
                    end = ""
                else:
                    inside.append(line)
            elif fence:
                end, begin, language, inside = fence[1], number, fence[2], []
            else:
                prose.append((number, line))
        assert not end, f"{self.name}:{begin}: the block of code does not end"
        return prose, blocks

    @property
    def prose(self) -> list[tuple[int, str]]:
        """Lines with their numbers, without fenced code."""
        return self._parts[0]

    @property
    def blocks(self) -> list[Block]:
        """The fenced blocks of code."""
        return self._parts[1]

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of the headings, as GitHub makes them."""
        found: dict[str, int] = {}
        names = set()
        for _, line in self.prose:
            if heading := _HEADING.match(line):
                name = anchor_of(heading[2])
                count = found.get(name, 0)
                found[name] = count + 1
                names.add(f"{name}-{count}" if count else name)
        return names


def anchor_of(heading: str) -> str:
    """The anchor of a heading: lower case, punctuation gone, spaces as hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def pages() -> Iterator[Page]:
    """Every page that git has, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in sorted(listed.stdout.split()):
        if (REPOSITORY / name).is_file():
            yield Page(REPOSITORY / name)


PAGES = list(pages())
