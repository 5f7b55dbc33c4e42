"""Schedules whose backward is split into I and W: zero bubble (Qi et al. 2023, arXiv 2401.10241), and controllable
memory on a V-shaped placement (Qi et al. 2024, arXiv 2405.15362).

The next process waits only for I, which gives it its gradient, and W fills time in which a process would wait. Where W
follows its I directly and no other process waits for the I, the two are one B (`whole_backwards`).

In the formulas a stage takes F, I and W seconds for a micro-batch, all stages are equal and transfers are free. In the
drawings each takes one tick.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.basic import forwards_ahead, one_with_each
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, INPUT, WEIGHT
from hf_gpipe.schedule.list_scheduling import best_listed
from hf_gpipe.schedule.listing import Work
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits, fused_last, merge_with_recomputations, rows_with_recomputations

_F, _I, _W = FORWARD, INPUT, WEIGHT


def zb_h1(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """1F1B with a split backward and 1F1B's memory (ZB-H1, arXiv 2401.10241, section 2.2 and figure 3).

    Stage s starts with K-s-1 forwards, as in 1F1B, and runs the W of a micro-batch with the I of the s-th after it. So
    every stage holds at most K micro-batches between F and W. The paper gives the bubble (K-1) (F+I-W). With F = I = W
    and M >= K a step takes exactly M (F+I+W) + (K-1) F here: a third of 1F1B's bubble (K-1) (F+B).

    K = 3, M = 4, without recomputation:

        stage 0  F0 F1 F2 .. .. B0 -- F3 B1 -- B2 -- B3 --
        stage 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        stage 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return _split_1f1b(num_micro_batches, placement, limits, doubled=False)


def zb_h2(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """ZB-H1 with about twice the forwards before the first backward (ZB-H2, arXiv 2401.10241, section 2.2, figure 3).

    Stage s starts with 2(K-s-1) forwards and runs the W of a micro-batch with the I of the 2s-th after it. So at most
    2K-1 micro-batches are between F and W in any stage. For M >= 2K-1 and F = I = W no process waits between its
    first and its last action: n steps whose updates wait for no other process take n M (F+I+W) + (K-1) F. One step
    takes as long as with zb_h1. With M between K and 2K-1 it starts with fewer forwards.

    K = 3, M = 5, without recomputation:

        stage 0  F0 F1 F2 F3 F4 B0 -- B1 -- B2 -- B3 -- B4 -- .. ..
        stage 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 ..
        stage 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return _split_1f1b(num_micro_batches, placement, limits, doubled=True)


def zb_v(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Two stages per process in the shape of a V, and 1F1B's memory (ZB-V, arXiv 2401.10241, section 6).

    Process k of P has the stages k and 2P-1-k: a micro-batch goes down all processes and up again, so the last process
    has two neighbouring stages, and the first one begins the backward. Every process holds at most 2P (stage,
    micro-batch) pairs between F and W, as much as P micro-batches of 1F1B. For M >= 2P-1 and F = I = W, each of half a
    process's layers, the bubble is (P-1) F: the last process waits for its first forward.

    In groups of c micro-batches a process holds at most 2(P+c-1) pairs, and the bubble is (P-1) F for M of them in
    all of at least 2P-2+c.

    K = 4, M = 4 on P = 2 processes, without recomputation:

        stage 0  F0 F1 F2 .. .. .. .. .. .. F3 B0 -- .. .. .. B1 -- .. .. .. .. B2 -- B3 --
        stage 1  .. F0 .. F1 .. .. .. F2 I0 W0 .. .. .. F3 I1 W1 .. .. .. .. I2 I3 W2 .. W3
        stage 2  .. .. F0 .. F1 B0 -- .. .. .. F2 B1 -- .. .. .. F3 B2 -- I3 .. .. .. W3 ..
        stage 3  .. .. .. F0 I0 W0 F1 I1 W1 .. .. .. F2 I2 W2 .. .. F3 I3 W3 .. .. .. .. ..
    """
    num_processes = _check_v_shape("zb_v", placement)
    # A group's backward begins with the last of its members.
    size = placement.group_size
    limit = 2 * (num_processes + size - 1)
    if num_micro_batches // (size * placement.replicas[0]) * size < 2 * (num_processes - 1) + size:
        # The pattern needs as many. For fewer, list scheduling is fast and finds shorter tables.
        return _v_listed(num_micro_batches, placement, limits, limit)
    orders: list[list[Action]] = [[] for _ in range(placement.num_processes)]
    for replica in range(placement.replicas[0]):
        for number in range(num_processes):
            process = placement.workers[number][replica]
            own = placement.micro_batches_of(number, process, num_micro_batches)
            orders[process] = _zb_v_order(number, num_processes, own, placement)
    return rows_with_recomputations(orders, placement, fused_last(limits))


def v_half(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """The placement of zb_v with half of 1F1B's memory (V-Half, arXiv 2405.15362, section 3).

    Every process holds at most P+2 (stage, micro-batch) pairs between F and W, as much as P/2+1 micro-batches of 1F1B.
    The table is the shortest that list scheduling finds (`hf_gpipe.schedule.list_scheduling`). Its bubble is at most 3P
    F where F = I = W, each of half a process's layers: half of 1F1B's. In groups of c a process holds at most P+2c
    pairs, for those of a row are all between F and I at once.

    For this, process k keeps at most P+1-k/2 micro-batches of its first stage between F and W. Otherwise forwards that
    run ahead would leave room for one micro-batch at a time in the second stages.

    K = 4, M = 4 on P = 2 processes, without recomputation:

        stage 0  F0 F1 F2 .. .. .. .. .. I0 .. I1 W0 F3 W1 .. .. .. .. .. .. I2 .. I3 W2 W3
        stage 1  .. F0 .. F1 .. .. I0 .. .. I1 .. W0 F2 .. W1 F3 .. .. I2 .. .. I3 .. W2 W3
        stage 2  .. .. F0 .. F1 I0 .. W0 I1 .. W1 .. .. F2 .. .. I2 F3 .. W2 I3 .. W3 .. ..
        stage 3  .. .. .. F0 I0 W0 F1 I1 .. W1 .. .. .. .. F2 I2 W2 .. F3 I3 .. W3 .. .. ..
    """
    num_processes = _check_v_shape("v_half", placement)
    size = placement.group_size
    in_flight = [num_processes + size - number // 2 - number % 2 for number in range(num_processes)]
    limit = num_processes + 2 * size
    return _v_listed(num_micro_batches, placement, limits, limit, [*in_flight, *[math.inf] * num_processes])


def whole_backwards(order: Sequence[Action], process: int, placement: Placement) -> list[Action]:
    """The order of a process with B for I and W where W is the device's next action and no other device waits for I."""
    result: list[Action] = []
    last_on: dict[str | None, int] = {}
    for action in order:
        device = placement.device_of(action.stage, process)
        place = last_on.get(device, -1)
        before = result[place] if place >= 0 else None
        if action.kind == _W and before == Action(_I, action.stage, action.micro_batch):
            receiver = action.stage - 1
            worker = placement.worker_of(receiver, action.micro_batch)
            if receiver < 0 or placement.place_of(worker, receiver) == (process, device):
                result[place] = Action(BACKWARD, action.stage, action.micro_batch)
                continue
        last_on[device] = len(result)
        result.append(action)
    return result


def _split_1f1b(num_micro_batches: int, placement: Placement, limits: Limits, *, doubled: bool) -> list[list[Action]]:
    """1F1B in which W follows some micro-batches after I."""
    orders: list[list[Action]] = []
    for stage, workers in enumerate(placement.workers):
        ahead = forwards_ahead(placement, stage)
        # With replicas: of all replicas before this stage the share of one replica.
        behind = -(-sum(placement.replicas[:stage]) // len(workers))
        orders.append([])
        for process in workers:
            own = placement.micro_batches_of(stage, process, num_micro_batches)
            spare = max(0, len(own) - ahead - behind - 1) if doubled else 0
            first, late = ahead + min(ahead, spare), behind + min(behind, spare)
            waiting: list[Action] = []
            for action in one_with_each(stage, own, placement.backward_order(own), first, _I):
                orders[-1].append(action)
                if action.kind == _I:
                    waiting.append(replace(action, kind=_W))
                    if len(waiting) > late:
                        orders[-1].append(waiting.pop(0))
            orders[-1] += waiting
    return merge_with_recomputations(orders, placement, fused_last(limits))


def _check_v_shape(name: str, placement: Placement) -> int:
    """The number of processes of one replica of the pipeline.

    Raises:
        ScheduleError: the placement is not V-shaped.
    """
    workers = placement.workers
    if (
        workers != workers[::-1]
        or len(set(workers[: len(workers) // 2])) * 2 != len(workers)
        or (len(placement.places) != 2 * placement.num_processes)
    ):
        raise ScheduleError(
            f"schedule {name!r} has two stages on each process, k and 2P-1-k on process k of P, and as many replicas "
            f"of every stage; the placement is {placement}. Let num_stages be twice the number of processes."
        )
    return len(workers) // 2


def _zb_v_order(number: int, num_processes: int, own: Sequence[int], placement: Placement) -> list[Action]:
    """The order of one process. It has a fixed pattern, in which each kind of action takes the next micro-batch.

    Of a group of c the backward of the last is first, so c-1 forwards more of each stage come before I and W.
    """
    more = placement.group_size - 1
    down, up = number, 2 * num_processes - 1 - number
    deeper = num_processes - number
    pattern = [(_F, down)] * (2 * deeper - 1)
    pattern += [(_F, up), (_F, down)] * (number + more)
    pattern += [(_F, up), (_I, up), (_W, up)] * deeper
    pattern += [(_F, down), (_I, down), (_W, down), (_F, up), (_I, up), (_W, up)] * (len(own) - num_processes - more)
    pattern += [(_I, down), (_W, down), (_I, up), (_W, up)] * more
    pattern += [(_I, up), (_I, down)] * number
    pattern += [(_I, down), (_W, down)] * deeper
    pattern += [(_W, up)] * number + [(_W, down)] * number
    backwards = placement.backward_order(own)
    count: Counter[tuple[str, int]] = Counter()
    order = []
    for kind, stage in pattern:
        # The forwards of the first stage are done some rounds before the others.
        if count[kind, stage] < len(own):
            order.append(Action(kind, stage, (own if kind == _F else backwards)[count[kind, stage]]))
            count[kind, stage] += 1
    return order


def _v_listed(
    num_micro_batches: int, placement: Placement, limits: Limits, limit: float, in_flight: Sequence[float] | None = None
) -> list[list[Action]]:
    limits = fused_last(limits)
    work = Work.equal_stages(placement.num_stages, [graphs == 0 for graphs in limits])
    most = [limit] * placement.num_processes
    return rows_with_recomputations(
        best_listed(placement, num_micro_batches, work, most, in_flight).orders, placement, limits
    )
