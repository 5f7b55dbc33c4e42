"""Advice for a run that is out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hf_gpipe.errors import StageError
from hf_gpipe.planner.fix import smallest_fix
from hf_gpipe.planner.plan import Plan
from hf_gpipe.runtime import failures


@contextmanager
def advising(plan: Callable[[], Plan], rank: int) -> Iterator[None]:
    """Context manager that adds to an out-of-memory error what would need less memory.

    Args:
        plan: makes the plan of the run; it may fail, for an optimizer that is not known.
        rank: of this process.

    Raises:
        StageError: in place of the failure, whose message it has.
    """
    try:
        yield
    except Exception as error:
        if not any(_is_want_of_memory(one) for one in _causes(error)):
            raise
        failures.note(error)  # planning takes seconds
        what = str(error) if isinstance(error, StageError) else f"process {rank}: {error!r}"
        raise StageError(f"{what.rstrip('.')}. {_advice(plan)}") from error


def _advice(plan: Callable[[], Plan]) -> str:
    """In one sentence."""
    try:
        return f"By the planner, {smallest_fix(plan())}"
    except Exception:
        # Whatever hinders the planner now, the failure to report is the run's.
        return "More micro-batches, recompute 'stage', the schedule 1f1b or more stages need less."


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception, what caused it, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_want_of_memory(error: BaseException) -> bool:
    # On the CPU torch has no class of its own for it.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
