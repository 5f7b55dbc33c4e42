"""Cost of a run: speed, idle time and memory, beside the planner's prediction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from hf_gpipe.pipeline import Pipeline
from hf_gpipe.runtime.batches import Batches
from hf_gpipe.runtime.memory import peak_memory_bytes
from hf_gpipe.schedule import Timeline


@dataclass(frozen=True)
class Speed:
    """The speed of all updates that a log has lines for, also of those before the run was interrupted and resumed.

    Attributes:
        num_steps: these updates.
        training_seconds: that they took, without evaluations and checkpoints. A run that was resumed between two lines
            does not know how long its updates from the line to the checkpoint took; they are missing here.
        tokens_per_second: of sources and targets, without padding; None where there is no line, or no token.
        seconds_per_step: the median over the lines of their mean, which a first slow step does not change much. A last
            line of fewer steps does not count: it may be of rows that an epoch leaves over. None where there is no
            line.
    """

    num_steps: int
    training_seconds: float
    tokens_per_second: float | None
    seconds_per_step: float | None

    @classmethod
    def from_log(cls, log_history: Sequence[Mapping[str, Any]]) -> Speed:
        """Read it from the history of a trainer's state, which its checkpoints keep."""
        lines = [line for line in log_history if "training_seconds" in line]
        ends = [line["step"] for line in lines]
        steps = [end - start for start, end in pairwise([0, *ends])]
        seconds = sum(line["training_seconds"] for line in lines)
        if not seconds or not all(steps):
            return cls(0, 0.0, None, None)
        has_tokens = all("tokens_per_second" in line for line in lines)
        tokens = sum(line.get("tokens_per_second", 0) * line["training_seconds"] for line in lines)
        means = [line["training_seconds"] / count for line, count in zip(lines, steps, strict=True)]
        if steps[-1] < max(steps):
            del means[-1]
        return cls(sum(steps), seconds, tokens / seconds if has_tokens else None, median(means))


class CostMeter:
    """Begins with a run and says at its end what it cost. Every process has one."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._peaks: list[int] = []

    def note_memory(self, pipe: Pipeline) -> None:
        """The peak so far; called after training, before evaluation. Every process calls it."""
        mine = peak_memory_bytes(set(pipe.world.stage_devices.values()))
        self._peaks = pipe.world.gather_objects(mine)

    def cost(
        self,
        pipe: Pipeline,
        log_history: Sequence[Mapping[str, Any]],
        measured: Timeline,
        batches: Batches,
        first_step: int,
    ) -> dict[str, Any]:
        """The `cost` entry of metrics.json; called in the main process.

        Args:
            pipe: what was trained.
            log_history: of the trainer's state.
            measured: one step, or a window of them, measured after the training.
            batches: that it was measured on, and that the prediction is for.
            first_step: where this start of the command went on; 0: it trained all of it.
        """
        return {
            **asdict(Speed.from_log(log_history)),
            # Of the step that was measured, on `batches`.
            "step_seconds": float(measured.total_seconds) / measured.schedule.num_steps,
            "bubble": float(measured.bubble),
            # Of this start of the command alone, where it was resumed.
            "resumed_from_step": first_step,
            "wall_seconds": time.perf_counter() - self._start,
            "peak_bytes": list(self._peaks),
            "num_parameters": pipe.adapter.num_parameters(),
            **pipe.config.in_short,
            "num_processes": pipe.world.num_processes,
            "device": pipe.world.device.type,
            "predicted": _predicted(pipe, batches),
        }


def _predicted(pipe: Pipeline, batches: Batches) -> dict[str, Any]:
    """The planner's prediction for the measured step, on the rates of this machine, and for the longest mini-batch."""
    try:
        step, longest = pipe.plan(batches[0]), pipe.plan()
    except Exception as error:
        # A training that is done must not fail because it cannot be predicted.
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "step_seconds": step.table_seconds,
        "bubble": step.bubble,
        "peak_bytes": [process.memory.total for process in longest.processes],
    }
