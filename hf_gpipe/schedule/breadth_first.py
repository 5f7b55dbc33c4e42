"""The order of the breadth-first pipeline: several stages per process, assigned in turn, and each of them runs all
micro-batches before the process turns to its next one (Lamy-Poirier, arXiv 2211.05953, section 4.1).

A process turns to each of its stages twice, so weights that visit the device come and go as seldom as possible. The
price is memory for activations: the inputs of all micro-batches on all stages.
"""

from __future__ import annotations

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD
from hf_gpipe.schedule.placement import Placement


def breadth_first_orders(num_stages: int, num_micro_batches: int, placement: Placement) -> list[list[Action]]:
    """The forwards and backwards of each process, whose stages may be anywhere.

    The last stage runs each micro-batch's backward right after its forward. The backwards of the other stages follow in
    the order in which gradients arrive.
    """
    orders: list[list[Action]] = [[] for _ in range(placement.num_processes)]
    for stage in range(num_stages):
        for process in placement.workers[stage]:
            for m in placement.micro_batches_of(stage, process, num_micro_batches):
                orders[process].append(Action(FORWARD, stage, m))
                if stage == num_stages - 1:
                    orders[process].append(Action(BACKWARD, stage, m))
    for stage in reversed(range(num_stages - 1)):
        for process in placement.workers[stage]:
            own = placement.micro_batches_of(stage, process, num_micro_batches)
            orders[process] += [Action(BACKWARD, stage, m) for m in own]
    return orders
