"""Which pieces of a dataset's rows share a row of at most so many tokens, as TRL packs datasets.

Best-fit decreasing: the longest row that is left goes to the row with the least space that is enough. Rows are packed a
thousand at a time.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from hf_gpipe.errors import check_choice

Piece: TypeAlias = tuple[int, int, int]
"""(row, start, stop) of consecutive tokens of a row."""

STRATEGIES = ("bfd", "bfd_split", "wrapped")
_BLOCK = 1000


def packed_rows(rows: Sequence[int], lengths: Sequence[int], size: int, strategy: str) -> list[list[Piece]]:
    """The pieces of each new row.

    Args:
        rows: the numbers of the rows, in order.
        lengths: tokens of every row, by number.
        size: tokens of a new row, at most.
        strategy: "bfd": longer rows are cut to `size`; "bfd_split": what is cut off is packed too; "wrapped": the rows
            stand one after the other, and are cut where a new row is full.

    Raises:
        UserError: another strategy.
    """
    check_choice("packing_strategy", strategy, STRATEGIES)
    packed: list[list[Piece]] = []
    for first in range(0, len(rows), _BLOCK):
        block = [(row, lengths[row]) for row in rows[first : first + _BLOCK] if lengths[row]]
        if strategy == "wrapped":
            packed += _wrapped(block, size)
            continue
        ends = [(row, min(length, size) if strategy == "bfd" else length) for row, length in block]
        packed += _best_fit(
            [(row, start, min(start + size, end)) for row, end in ends for start in range(0, end, size)], size
        )
    return packed


def _best_fit(pieces: list[Piece], size: int) -> list[list[Piece]]:
    filled: list[list[Piece]] = []
    #: Of rows with space left: the spaces, sorted, and of each the rows, the oldest first.
    spaces: list[int] = []
    with_space: dict[int, deque[list[Piece]]] = {}
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        length = piece[2] - piece[1]
        place = bisect.bisect_left(spaces, length)
        if place < len(spaces):
            space = spaces[place]
            row = with_space[space].popleft()
            if not with_space[space]:
                del spaces[place], with_space[space]
        else:
            space, row = size, []
            filled.append(row)
        row.append(piece)
        if left := space - length:
            if left not in with_space:
                bisect.insort(spaces, left)
                with_space[left] = deque()
            with_space[left].append(row)
    return filled


def _wrapped(block: list[tuple[int, int]], size: int) -> list[list[Piece]]:
    filled: list[list[Piece]] = []
    space = 0
    for row, length in block:
        start = 0
        while start < length:
            if not space:
                filled.append([])
                space = size
            stop = min(length, start + space)
            filled[-1].append((row, start, stop))
            space -= stop - start
            start = stop
    return filled
