"""Schedules with a divided head, which are tried where a configuration leaves its schedule open."""

from __future__ import annotations

from collections.abc import Iterator

from hf_gpipe.adapters import Adapter
from hf_gpipe.losses.loss import Loss
from hf_gpipe.modes.divided_head.requirements import why_not_divided
from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD
from hf_gpipe.planner.plan import Planner
from hf_gpipe.planner.workload import Workload
from hf_gpipe.settings.pipeline import PipelineConfig

SCHEDULES = (*DIVIDED_HEAD,)


def possible(adapter: Adapter, loss: Loss, mini_batch: Workload) -> Iterator[str]:
    """Yield the field of this mode where the head of a model can be divided."""
    if not why_not_divided(adapter, loss):
        yield "divided_head"


def is_worth_a_try(planner: Planner, config: PipelineConfig) -> bool:
    """Whether the head can be divided over the stages of a mesh: each process has one."""
    is_one_each = config.places == config.processes and config.mesh[0] > 1
    return is_one_each and "divided_head" in planner.possible
