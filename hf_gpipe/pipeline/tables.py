"""The tables that a pipeline runs, for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Placement
from hf_gpipe.schedule.asynchronous import ASYNCHRONOUS_SCHEDULES
from hf_gpipe.schedule.builders import build
from hf_gpipe.schedule.recompute import Limits
from hf_gpipe.schedule.table import Schedule


@dataclass(frozen=True)
class Tables:
    """The tables of a schedule.

    Attributes:
        name: of the schedule, or the path of the file with its table.
        placement: of the stages.
        recompute: argument of `build`.
        given: the table of that file.
    """

    name: str
    placement: Placement
    recompute: str | Limits
    given: Schedule | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether each stage updates its weights by itself, so that steps run in windows."""
        return self.name in ASYNCHRONOUS_SCHEDULES

    def of(self, num_micro_batches: int | Sequence[int], name: str | None = None, chunks: int = 1) -> Schedule:
        """The table of this schedule, or of another one; see `Pipeline.schedule`.

        Raises:
            ScheduleError: the table was read from a file and has fewer micro-batches, or cuts rows into other chunks.
        """
        steps = None if isinstance(num_micro_batches, int) else num_micro_batches
        total = num_micro_batches if isinstance(num_micro_batches, int) else sum(num_micro_batches)
        if self.given is not None and name is None:
            if chunks != self.given.chunks:
                raise ScheduleError(
                    f"the table {self.name!r} cuts rows into {self.given.chunks} chunks, and those of this step are in "
                    f"{chunks}; give rows of at least {self.given.chunks} tokens."
                )
            return self.given.of_first(total)
        num_stages = len(self.placement.workers)
        return build(name or self.name, num_stages, total, self.placement, self.recompute, steps=steps, chunks=chunks)
