"""The breadth-first pipeline (Lamy-Poirier, arXiv 2211.05953, section 4.1).

A process has several stages, which are assigned in turn. It runs all micro-batches on one of its stages before it turns
to its next stage.

A process turns to each of its stages twice, so weights that visit the device come and go as seldom as possible. The
price is memory for activations: a process holds the inputs of all micro-batches on all its stages.
"""

from __future__ import annotations

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, ActionKind
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits, fused_last, merge_with_recomputations


def breadth_first(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Stages assigned to the processes in turn, each of which runs all micro-batches before the process turns to its
    next one (arXiv 2211.05953).

    The pipeline fills once with stages a fraction as long, so with P processes and enough micro-batches the bubble is
    gpipe's divided by K / P. Weights that visit their device (`hf_gpipe.modes.visits`) come twice in a step.

    The last stage runs each micro-batch's backward right after its forward, and those of a group, the last one
    first, right after their forwards. The backwards of the other stages follow in the order in which gradients arrive.

    K = 4, M = 2, on two processes, without recomputation:

        stage 0  F0 F1 .. .. .. .. .. .. .. .. .. B0 -- B1 --
        stage 1  .. F0 F1 .. .. .. .. .. .. B0 -- B1 -- .. ..
        stage 2  .. .. F0 F1 .. .. B0 -- B1 -- .. .. .. .. ..
        stage 3  .. .. .. F0 B0 -- F1 B1 -- .. .. .. .. .. ..
    """
    #: The actions of each device of each process, whose stages may be anywhere.
    orders: dict[tuple[int, str | None], list[Action]] = {}

    def run(stage: int, *kinds: ActionKind) -> None:
        for process in placement.workers[stage]:
            order = orders.setdefault(placement.place_of(process, stage), [])
            for group in placement.groups_of(placement.micro_batches_of(stage, process, num_micro_batches)):
                for kind in kinds:
                    order += [Action(kind, stage, m) for m in (group if kind == FORWARD else reversed(group))]

    last = placement.num_stages - 1
    for stage in range(last):
        run(stage, FORWARD)
    run(last, FORWARD, BACKWARD)
    for stage in reversed(range(last)):
        run(stage, BACKWARD)
    return merge_with_recomputations(list(orders.values()), placement, fused_last(limits))
