"""Which of the recipes stands for which of the paper's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Roles(NamedTuple):
    """Which model stands for which of the paper's: its 400M, and its two of 1.3B. None: there is none."""

    base: str | None
    deep: str | None
    wide: str | None

    @classmethod
    def of(cls, models: Sequence[str]) -> Roles:
        """The recipes whose names end in base, deep and wide, each where it is alone."""
        ends = {
            role: [name for name in models if name.replace("_", "-").split("-")[-1] == role] for role in cls._fields
        }
        return cls(**{role: names[0] if len(names) == 1 else None for role, names in ends.items()})

    @property
    def large(self) -> tuple[str, ...]:
        return tuple(name for name in (self.deep, self.wide) if name is not None)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The pairs of models to compare: the large ones with the base, and with each other."""
        pairs = [(name, self.base) for name in self.large if self.base is not None]
        return (*pairs, *([(self.deep, self.wide)] if self.deep is not None and self.wide is not None else []))
