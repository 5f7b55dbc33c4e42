"""Speed of a training for its logs: tokens per second, peak memory and, with several processes, the bubble."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.memory import peak_memory_bytes
from hf_gpipe.runtime.timing import ActionTime
from hf_gpipe.schedule.kinds import Resource
from hf_gpipe.training.loader import Batch

#: The beginning of the name of each stage's metric.
STAGE_PEAK = "peak_memory_bytes_stage_"

#: The seconds of a process, the peak of each of its stages, its timed steps (busy, whole) and the bytes of its stashes.
_Measured: TypeAlias = tuple[float, dict[int, int], list[tuple[float, float]], int]


class Meter:
    """Counts between two lines of metrics. Every process has one and calls it in step with the others.

    Args:
        pipe: the pipeline that is trained.
        timeline_steps: the number of updates after which an update's actions are timed for the bubble again; None: no
            update is timed.
    """

    def __init__(self, pipe: Pipeline, timeline_steps: int | None = None) -> None:
        self._pipe = pipe
        self._timeline_steps, self._is_due = timeline_steps, False
        self._restart()

    def times(self, step: int, num_steps: int = 1, *, is_whole: bool = True) -> list[ActionTime] | None:
        """The list in which the executor notes the actions of an update or a window; None: it is not timed.

        Args:
            step: the number of the update, or of the first update of the window, counted from 1.
            num_steps: the number of updates of the window. It is timed if any of its updates is.
            is_whole: whether its mini-batches have all of their rows; if not, the next one that has is timed.
        """
        if (every := self._timeline_steps) is None:
            return None
        self._is_due |= (step + num_steps - 1) // every > (step - 1) // every
        if not (self._is_due and is_whole):
            return None
        self._is_due = False
        self._timed.append([])
        return self._timed[-1]

    def count(self, batches: Sequence[Batch]) -> int:
        """Note what an update trained on. Returns the number of its tokens without padding, or of its rows."""
        count = sum(map(self._pipe.adapter.size_of, batches))
        self._count += count
        return count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for evaluating and saving, whose time does not count as training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    def read(self) -> dict[str, float]:
        """The metrics since the last call, the same in every process.

        Returns:
            tokens_per_second: the tokens of sources and targets, without padding, per second; rows_per_second for a
                model that reads no tokens.
            training_seconds: the seconds of the slowest process since the last call, without pauses.
            peak_memory_bytes: the most bytes that a process has used since it started, of its device on CUDA, else of
                CPU memory.
            peak_memory_bytes_stage_N: the peak memory of stage N's device or process, where there are several stages.
            stash_bytes: the most bytes that a process has kept of old versions of weights in the last window, where the
                schedule has windows.
            bubble: the idle fraction of all processes in the timed updates, where there were any.
        """
        peaks = {stage: peak_memory_bytes({where}) for stage, where in self._pipe.world.stage_devices.items()}
        mine = (time.perf_counter() - self._since, peaks)
        timed = [
            (
                sum(
                    span.end - span.start - span.waiting
                    for span in times
                    if span.action.kind.resource is Resource.COMPUTE
                ),
                max(span.end for span in times) - min(span.start for span in times),
            )
            for times in self._timed
        ]
        everyone = self._pipe.world.gather_objects((*mine, timed, self._pipe.stash_bytes), _Measured)
        seconds = max(seconds for seconds, *_ in everyone)
        metrics: dict[str, float] = {
            f"{self._pipe.adapter.counted}_per_second": self._count / seconds,
            "training_seconds": seconds,
            "peak_memory_bytes": max(max(peaks.values()) for _, peaks, *_ in everyone),
        }
        if (num_stages := self._pipe.num_stages) > 1:
            for stage in range(num_stages):
                metrics[f"{STAGE_PEAK}{stage}"] = max(peaks.get(stage, 0) for _, peaks, *_ in everyone)
        if self._pipe.runs_windows:
            metrics["stash_bytes"] = max(stashed for *_, stashed in everyone)
        if timed:
            # A step is as long as the longest process's part: the clocks of several machines cannot be compared.
            steps = list(zip(*(theirs for _, _, theirs, _ in everyone), strict=True))
            available = sum(len(step) * max(length for _, length in step) for step in steps)
            metrics["bubble"] = 1 - sum(busy for step in steps for busy, _ in step) / available
        self._restart()
        return metrics

    def _restart(self) -> None:
        self._since = time.perf_counter()
        self._count = 0
        self._timed: list[list[ActionTime]] = []
