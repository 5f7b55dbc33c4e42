"""The size of a mini-batch, in rows or in tokens."""

from __future__ import annotations

from typing import NamedTuple


class BatchSize(NamedTuple):
    """The size of a mini-batch: its rows, or in their place about so many target tokens."""

    rows: int
    tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.rows} rows" if self.tokens is None else f"about {self.tokens} target tokens"

    @property
    def known_rows(self) -> int | None:
        """The number of rows; None: it varies."""
        return self.rows if self.tokens is None else None

    def rows_of(self, target_tokens: int) -> int:
        """The number of rows where all have so many target tokens."""
        return self.rows if self.tokens is None else -(-self.tokens // target_tokens)
