"""What each stage recomputes, as a user says it, and what that means for the table and for the stage's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_gpipe.errors import UserError, nearest
from hf_gpipe.schedule.recompute import Limits

RECOMPUTE_MODES = ("none", "block", "stage")


@dataclass(frozen=True)
class Recompute:
    """Recomputation stage by stage.

    Attributes:
        of_table: what `hf_gpipe.schedule.build` is told. Only the recomputation of a whole stage is an action.
        block_stages: stages whose blocks are recomputed inside B, by transformers' own checkpointing.
    """

    of_table: str | Limits
    block_stages: frozenset[int]

    @classmethod
    def parse(cls, value: str | Sequence[str | int], num_stages: int) -> Recompute:
        """From one mode for all stages, or one entry for each.

        Raises:
            UserError: an entry is neither a mode nor a number of graphs, or their number is not that of the stages.
        """
        if isinstance(value, str):
            _check(value)
            every_stage = range(num_stages) if value == "block" else ()
            return cls("stage" if value == "stage" else "none", frozenset(every_stage))
        if len(value) != num_stages:
            raise UserError(
                f"recompute={list(value)}: {len(value)} entries for num_stages={num_stages}; give one a stage"
            )
        limits = tuple(_limit(entry) for entry in value)
        return cls(limits, frozenset(stage for stage, entry in enumerate(value) if entry == "block"))


def _limit(entry: str | int) -> int | None:
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 1:
        return entry
    _check(entry)
    # One graph alive at a time: recomputed wherever the backward does not follow at once.
    return 1 if entry == "stage" else None


def _check(entry: object) -> None:
    if entry not in RECOMPUTE_MODES:
        raise UserError(
            f"recompute={entry!r}: expected one of {', '.join(RECOMPUTE_MODES)}, or in a list for each stage also the "
            f"most graphs to keep alive, 1 or more{nearest(str(entry), RECOMPUTE_MODES)}"
        )
