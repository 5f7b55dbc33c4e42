"""What a failure for want of memory says; tests/test_execution.py has the planner's own advice."""

from __future__ import annotations

from typing import Any

import pytest

from hf_gpipe.errors import StageError
from hf_gpipe.planner.search.advice import advising


def no_plan() -> Any:
    raise ValueError("nothing is known of this optimizer")


@pytest.mark.parametrize("cause", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: 8 bytes")])
def test_a_cause_deep_below_is_found_and_a_planner_that_fails_hides_nothing(cause: Exception) -> None:
    with (
        pytest.raises(StageError, match=r"stage 1 failed\. More micro-batches, recompute 'stage'") as caught,
        advising(no_plan, rank=3),
    ):
        raise StageError("stage 1 failed.") from cause
    assert caught.value.__cause__ is not None
    with pytest.raises(StageError, match="process 3: "), advising(no_plan, rank=3):
        raise cause


def test_other_failures_pass_as_they_are() -> None:
    with pytest.raises(ValueError, match="another"), advising(no_plan, rank=3):
        raise ValueError("another")
