"""Parse the option `recompute` into its parts for the schedule's table and for the stages' models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.schedule.recompute import Limits

RECOMPUTE_MODES = ("none", "block", "stage", "host")


@dataclass(frozen=True)
class Recompute:
    """Recomputation of each stage.

    Attributes:
        entries: the value of the option, one entry for each stage.
        of_table: the argument of `hf_gpipe.schedule.build`. Only the recomputation of a whole stage is an action.
        block_stages: stages whose blocks are recomputed inside B, by transformers' own checkpointing.
    """

    entries: tuple[str | int, ...]
    of_table: str | Limits
    block_stages: frozenset[int]

    @classmethod
    def parse(cls, value: str | Sequence[str | int], num_stages: int) -> Recompute:
        """Parse one mode for all stages, or a list with one entry per stage.

        Raises:
            UserError: an entry is neither a mode nor a number of graphs, or the list has not one entry per stage.
        """
        if isinstance(value, str):
            _check(value)
            entries: Sequence[str | int] = [value] * num_stages
            of_table: str | Limits = "stage" if value == "stage" else "none"
        elif len(value) != num_stages:
            raise UserError(
                f"recompute={list(value)}: {len(value)} entries for num_stages={num_stages}; give one per stage"
            )
        else:
            entries, of_table = value, tuple(_limit(entry) for entry in value)
        block_stages = frozenset(stage for stage, entry in enumerate(entries) if entry == "block")
        return cls(tuple(entries), of_table, block_stages)


def _limit(entry: str | int) -> int | None:
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 1:
        return entry
    _check(entry)
    # One graph at a time: a forward is recomputed unless its backward follows at once.
    return 1 if entry == "stage" else None


def _check(entry: object) -> None:
    if entry not in RECOMPUTE_MODES:
        raise UserError(
            f"recompute={entry!r}: expected one of {', '.join(RECOMPUTE_MODES)}, or in a list for each stage also the "
            f"most graphs to keep alive, 1 or more{nearest(str(entry), RECOMPUTE_MODES)}"
        )
