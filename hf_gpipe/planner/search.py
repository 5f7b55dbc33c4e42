"""All ways to run a model on some devices, within limits, and the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hf_gpipe.errors import PartitionError, ScheduleError
from hf_gpipe.planner.decide import AUTO_SCHEDULES, best_plan, micro_batch_counts
from hf_gpipe.planner.plan import Plan, Planner
from hf_gpipe.recipe import AUTO, PipelineConfig

#: Stages of one process that a search tries.
_STAGES_A_PROCESS = (1, 2)


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        fastest: the plans that fit, the fastest first; of each schedule and recomputation the best only.
        leanest: the plan that needs the least memory.
        num_tried: how many plans there were.
    """

    fastest: tuple[Plan, ...]
    leanest: Plan
    num_tried: int


def search(planner: Planner, config: PipelineConfig) -> Found:
    """Try K, M, schedule, recomputation and partition on the configuration's number of processes.

    K is one or two stages per process, M every power of two up to one micro-batch per row, and one per
    row; the configuration's own values are among those tried.

    Raises:
        PartitionError: there is no split at all.
    """
    plans: list[tuple[PipelineConfig, Plan]] = []
    failure: Exception | None = None
    for one in _configs(planner, config):
        try:
            plans.append((one, best_plan(planner, one)))
        except (PartitionError, ScheduleError) as error:
            failure = failure or error
    if not plans:
        assert failure is not None, "a search tries something"
        raise failure
    best: dict[tuple[str, object], Plan] = {}
    for asked, plan in sorted(plans, key=lambda one: (one[1].step_seconds, one[1].peak_bytes)):
        if plan.fits:
            best.setdefault((asked.schedule, asked.recompute), plan)
    leanest = min((plan for _, plan in plans), key=lambda plan: (plan.peak_bytes, plan.step_seconds))
    return Found(tuple(best.values()), leanest, len(plans))


def _configs(planner: Planner, config: PipelineConfig) -> Sequence[PipelineConfig]:
    counts = {config.num_stages}
    # Replicas that are listed are of this many stages.
    of_replica = config.processes // config.replicas if isinstance(config.replicas, int) else config.num_stages
    if isinstance(config.replicas, int):
        counts |= {count * of_replica for count in _STAGES_A_PROCESS}
    micro_batches = set(micro_batch_counts(planner.rows, AUTO))
    if isinstance(config.num_micro_batches, int):
        micro_batches.add(config.num_micro_batches)
    found = []
    for num_stages in sorted(count for count in counts if count <= planner.num_layers):
        is_given = num_stages == config.num_stages and not isinstance(config.partition, str)
        for partition in dict.fromkeys((AUTO, "count", config.partition if is_given else AUTO)):
            for schedule in AUTO_SCHEDULES:
                if schedule == "interleaved_1f1b" and num_stages == of_replica:
                    continue
                found += [
                    replace(
                        config,
                        num_stages=num_stages,
                        num_micro_batches=num_micro_batches,
                        schedule=schedule,
                        recompute=recompute,
                        partition=partition,
                        num_processes=config.processes,
                    )
                    for num_micro_batches in sorted(micro_batches)
                    for recompute in (AUTO, "block", "stage")
                ]
    return found
