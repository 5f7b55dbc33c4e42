"""The size of a mini-batch, in rows or in tokens, and of a step."""

from __future__ import annotations

from typing import NamedTuple


class BatchSize(NamedTuple):
    """The size of a mini-batch: its rows, or in their place about so many target tokens; and how many make a step."""

    rows: int
    tokens: int | None = None
    accumulation: int = 1

    def __str__(self) -> str:
        return f"{self.rows} rows" if self.tokens is None else f"about {self.tokens} target tokens"

    @property
    def known_rows(self) -> int | None:
        """The number of rows; None: it varies."""
        return self.rows if self.tokens is None else None

    @property
    def rows_of_step(self) -> int | None:
        """The number of rows of a step; None: it varies."""
        return self.rows * self.accumulation if self.tokens is None else None

    def rows_of(self, target_tokens: int) -> int:
        """The number of rows where all have so many target tokens."""
        return self.rows if self.tokens is None else -(-self.tokens // target_tokens)
