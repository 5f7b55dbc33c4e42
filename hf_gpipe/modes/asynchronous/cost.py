"""The cost of asynchronous schedules: the old versions of weights that they keep, and how stale gradients are."""

from __future__ import annotations

from collections.abc import Iterator

from hf_gpipe.planner.plan import Plan
from hf_gpipe.schedule import Schedule, num_stashes, staleness
from hf_gpipe.text import seconds_text, size_text


def old_versions(table: Schedule, stage: int, process: int | None) -> int:
    """The old versions of its weights that a stage keeps at once."""
    return num_stashes(table, stage, process)


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield lines about how stale an asynchronous schedule's gradients are, and about the plan of 1f1b."""
    table = plan.timeline.schedule
    if not table.is_window:
        return
    late = "-".join(str(max(staleness(table, stage))) for stage in range(table.num_stages))
    yield "staleness", f"gradients of the stages come {late} updates late; what that costs in loss a plan cannot know"
    other = plan.planner.plan(plan.settings.replace(schedule="1f1b"))
    rows = plan.planner.rows * plan.planner.inputs.accumulation
    yield (
        "against",
        f"1f1b, with the plain model's numbers: {seconds_text(other.step_seconds / rows)} a row, here "
        f"{seconds_text(plan.step_seconds / rows)}; peak memory {size_text(other.peak_bytes)} in a process, "
        f"here {size_text(plan.peak_bytes)}",
    )
