"""Interleaved 1F1B (Megatron-LM, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

A process has several stages, which are assigned in turn.

Micro-batches are run in rounds. A process takes a whole round forward through its first stage, then through its second
stage, and so on. A round of at least P micro-batches, where P is the number of processes, is long enough that its first
micro-batch is back from the other processes when the process turns to its next stage. Backwards take the same rounds
through the stages in reverse. A process starts with forwards alone and then alternates one forward and one backward:

- the last process starts each micro-batch's backward on the last stage right after its forward;
- a process that is d processes before the last one is 2d forwards further ahead, as in the published order. Half of
  these forwards would fill the pipeline where transfers are free; messages travel during the other half.

The published order takes rounds of P and so needs M to be a multiple of P. Here there are M // P rounds, whose sizes
are equal or differ by one, and no round is smaller than P; where M < P there is one round. For a multiple of P this is
the published order. The smaller rounds come first, because a process that went over to smaller rounds would run
backwards while others wait for its forwards.

Where micro-batches depend on each other in groups of c, a round has whole groups, and enough of them for at least P
micro-batches. The backward of a group begins with its last member, so each process runs c - 1 more forwards before its
first backward (Seq1F1B, arXiv 2406.03488, section 3).

Each replica of the pipeline does this with its own micro-batches, on its own P processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.basic import in_turn, naive, one_forward_one_backward
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.recompute import Limits, fused_last, rows_with_recomputations


def interleaved_1f1b(num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """1F1B with v = K/P stages per process, assigned in turn: stage s is on process s % P (Megatron-LM, Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2 and figure 4).

    A micro-batch passes every process v times, each time through a v-th of its layers, so the pipeline fills and drains
    v times as fast: with equal stages and free transfers the bubble is (P-1)/(vM+P-1) where P divides M, against
    (P-1)/(M+P-1) in 1f1b. The price is v times the messages, and more micro-batches between forward and backward.

    K must be a multiple of P. With one stage per process it is 1f1b, and also in one process with several devices. One
    process with one device has no bubble to shorten and takes one micro-batch after another.
    Where a process has several devices, each stage keeps its order, and the process starts the actions in the order in
    which they can run.

    K = 4, M = 4 on P = 2 processes, without recomputation:

        stage 0  F0 F1 .. .. F2 .. .. .. F3 .. .. .. B0 -- .. B1 -- .. .. .. .. .. .. B2 -- B3 --
        stage 1  .. F0 F1 .. .. .. .. .. .. F2 B0 -- F3 B1 -- .. .. .. .. .. .. B2 -- B3 -- .. ..
        stage 2  .. .. F0 F1 .. .. B0 -- .. B1 -- F2 .. .. F3 .. .. .. B2 -- .. B3 -- .. .. .. ..
        stage 3  .. .. .. F0 B0 -- F1 B1 -- .. .. .. .. .. .. F2 B2 -- F3 B3 -- .. .. .. .. .. ..
    """
    is_one_process = placement.replicas == (placement.num_processes,) * placement.num_stages
    if is_one_process and not placement.has_several_devices:
        return naive(num_micro_batches, placement, fused_last(limits))
    if is_one_process or len(placement.places) == placement.num_processes:
        return one_forward_one_backward(num_micro_batches, placement, limits)
    return rows_with_recomputations(_interleaved_orders(num_micro_batches, placement), placement, fused_last(limits))


def _interleaved_orders(num_micro_batches: int, placement: Placement) -> list[list[Action]]:
    """The forwards and backwards of each process.

    Raises:
        ScheduleError: the stages are not assigned in turn.
    """
    num_replicas = placement.replicas[0]
    num_processes = placement.num_processes // num_replicas
    if not _is_in_turn(placement, num_processes):
        raise ScheduleError(
            "schedule 'interleaved_1f1b' needs stages that are assigned to the processes in turn, the same number to "
            f"each, and as many replicas of every stage; the placement is {placement}. Use "
            f"Placement.interleaved({placement.num_stages}, P), or replicated(D) of it."
        )
    orders: list[list[Action]] = [[] for _ in range(placement.num_processes)]
    for replica in range(num_replicas):
        own = placement.micro_batches_of(0, placement.workers[0][replica], num_micro_batches)
        groups, size = placement.groups_of(own), placement.group_size
        for stage, order in enumerate(_orders_of_pipeline(placement.num_stages, num_processes, groups, size)):
            orders[placement.workers[stage][replica]] = order
    return orders


def _is_in_turn(placement: Placement, num_processes: int) -> bool:
    """Whether each replica of the pipeline has its stages in turn on so many processes of its own."""
    return (
        len(set(placement.replicas)) == 1
        and num_processes * placement.replicas[0] == placement.num_processes
        and placement.num_stages % num_processes == 0
        and all(own == placement.workers[stage % num_processes] for stage, own in enumerate(placement.workers))
    )


def _orders_of_pipeline(
    num_stages: int, num_processes: int, groups: Sequence[Sequence[int]], group_size: int
) -> list[list[Action]]:
    """The forwards and backwards of each process of one replica of the pipeline."""
    stages_each = num_stages // num_processes
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    ahead: list[int] = []
    for round_ in _rounds(groups, -(-num_processes // group_size)):
        forwards += [(turn, m) for turn in range(stages_each) for group in round_ for m in group]
        backwards += [(turn, m) for turn in reversed(range(stages_each)) for group in round_ for m in reversed(group)]
        # Of all forwards of the round, those of its last turn alone may still be to come at its first backward.
        ahead += [(stages_each - 1) * group_size * len(round_)] * (stages_each * group_size * len(round_))
    orders = []
    for process in range(num_processes):
        further = 2 * (num_processes - 1 - process) + group_size - 1
        own_forwards, own_backwards = (
            [Action(kind, turn * num_processes + process, m) for turn, m in of_kind]
            for kind, of_kind in ((FORWARD, forwards), (BACKWARD, backwards))
        )
        before = [index + 1 + more + further for index, more in enumerate(ahead)]
        orders.append(in_turn(own_forwards, own_backwards, before.__getitem__))
    return orders


def _rounds(groups: Sequence[Sequence[int]], fewest: int) -> list[Sequence[Sequence[int]]]:
    """Consecutive groups, at least `fewest` in each round where there are as many; the smaller rounds first."""
    count = max(1, len(groups) // fewest)
    size, extra = divmod(len(groups), count)
    rounds: list[Sequence[Sequence[int]]] = []
    start = 0
    for index in range(count):
        stop = start + size + (index >= count - extra)
        rounds.append(groups[start:stop])
        start = stop
    return rounds
