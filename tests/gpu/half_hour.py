"""The order of the checks for half an hour of a GPU, and the time that is left for each.

Each call of the command goes on where the call before stopped: results of the same machine and versions are kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from tests.gpu.checks import Result

#: Words that a check's kind and name begin with, in the order in which they run; the most words count, and checks that
#: begin with none of them come last. A check that may not end comes after those that do.
ORDER = (
    *("exactness", "order", "one GPU", "hang", "speed: 1 GPU", "exactness: compiled", "plan: all weights visit"),
    *("plan: dealt stages", "plan: chunks", "plan", "capped: 7B", "capped", "gain", "waiting", "speed"),
)
#: No check begins with less time than this, in seconds.
LEAST_SECONDS = 30.0
#: Of the environment, what must be alike for results of an earlier call to be kept, beside the GPUs.
_SAME = ("hf_gpipe", "torch", "transformers", "nccl", "cuda", "driver")


def in_order(checks: Sequence[Any]) -> list[Any]:
    """The checks, the most important first."""

    def place(check: Any) -> int:
        name = f"{check.kind}: {check.name}"
        found = max((words for words in ORDER if name.startswith(words)), key=len, default=None)
        return len(ORDER) if found is None else ORDER.index(found)

    return sorted(checks, key=place)


def kept(file: Path, environment: dict[str, Any], how: dict[str, Any]) -> list[Result]:
    """The results of earlier calls on the same GPUs, with the same versions and the same values of `how`."""
    if not file.exists():
        return []
    written = json.loads(file.read_text())
    is_same = _machine(written["environment"]) == _machine(environment)
    return [Result(**one) for one in written["checks"]] if is_same and how.items() <= written.items() else []


def _machine(environment: dict[str, Any]) -> list[Any]:
    return [*(environment.get(name) for name in _SAME), *(gpu["name"] for gpu in environment["gpus"])]


def is_done(check: Any, results: Sequence[Result]) -> bool:
    """Whether a check, or a comparison of several cases, has its results."""
    names = [f"{check.name}: {case.name}" for case in check.cases] if hasattr(check, "cases") else [check.name]
    return {(check.kind, name) for name in names} <= {(one.kind, one.name) for one in results}


@dataclass(frozen=True)
class Clock:
    """How long checks may still run.

    Attributes:
        end: by `time.monotonic`; None: there is no limit for all of them.
        limit: of each check, in seconds.
    """

    end: float | None
    limit: float

    @classmethod
    def of(cls, minutes: float, limit: float) -> Clock:
        """So many minutes from the start of this process, which imports for some of them; 0: no limit."""
        running = time.time() - psutil.Process().create_time()
        return cls(time.monotonic() + 60 * minutes - running if minutes else None, limit)

    @property
    def is_over(self) -> bool:
        """Whether no check may begin."""
        return self.end is not None and self.end - time.monotonic() < LEAST_SECONDS

    def begin(self) -> Clock:
        """The clock of a check that begins now, whose limit is at most the time that is left."""
        return self if self.end is None else replace(self, limit=min(self.limit, self.end - time.monotonic()))

    def was_cut(self, check: Clock, result: Result) -> bool:
        """Whether a check had less time than others and did not end: a later call runs it again."""
        return check.limit < self.limit and "took too long" in result.message
