"""The schedules by name, each a small function that writes a table.

A builder says in which order each stage works, `with_recomputations` puts the recomputations in, and `clock.merge`
turns this into the order of each process, which is the same thing where a process holds one stage. Where a stage has
replicas, each takes its own micro-batches out of the stage's order. So D replicas of every stage are D pipelines side
by side, each with the schedule of its own micro-batches.

In the drawings a row is a stage, in its own process where nothing else is said, a column one tick (forward 1,
recomputation 1, backward 2 ticks, the second of them "--"), and ".." is idle.

Every table runs to its end if sends do not wait, and also if every send and every receive blocks its process:
`hf_gpipe.schedule.messages` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from hf_gpipe.errors import ScheduleError, nearest
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.asynchronous import ASYNCHRONOUS_SCHEDULES, asynchronous
from hf_gpipe.schedule.breadth_first import breadth_first_orders
from hf_gpipe.schedule.file import TABLE_SUFFIX
from hf_gpipe.schedule.interleaved import interleaved_orders
from hf_gpipe.schedule.kinds import BACKWARD, FORWARD, LOGITS, LOGITS_GRADIENT, RECOMPUTE, REDUCE, UPDATE
from hf_gpipe.schedule.placement import Placement, replicas_of
from hf_gpipe.schedule.recompute import Limits, fused_last, merge_with_recomputations, with_recomputations
from hf_gpipe.schedule.round_robin import Deal, deal_of, round_robin_orders, with_updates
from hf_gpipe.schedule.table import MOST_ACTIONS, Schedule
from hf_gpipe.schedule.validate import check_table
from hf_gpipe.schedule.zero_bubble import forwards_ahead, v_half, whole_backwards, zb_h1, zb_h2, zb_v

Builder = Callable[[int, int, Placement, Limits], list[list[Action]]]
"""(num_stages, num_micro_batches, placement, limits of stored graphs) -> each process's actions, without G and U."""

RECOMPUTE_MODES = ("stage", "none")
_forward, _backward = partial(Action, FORWARD), partial(Action, BACKWARD)


def naive(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """One micro-batch after another, through all stages and back, without pipelining.

    K = 3, M = 2, without recomputation:

        stage 0  F0 .. .. .. .. .. .. B0 -- F1 .. .. .. .. .. .. B1 --
        stage 1  .. F0 .. .. .. B0 -- .. .. .. F1 .. .. .. B1 -- .. ..
        stage 2  .. .. F0 B0 -- .. .. .. .. .. .. F1 B1 -- .. .. .. ..
    """
    orders = [_one_row_after_another(s, num_micro_batches, placement) for s in range(num_stages)]
    return merge_with_recomputations(orders, placement, limits)


def _one_row_after_another(stage: int, num_micro_batches: int, placement: Placement) -> list[Action]:
    """The order of a stage that runs the backwards of a micro-batch, or of a row's chunks, right after its forwards."""
    order: list[Action] = []
    for row in placement.rows_of(range(num_micro_batches)):
        order += [_forward(stage, m) for m in row] + [_backward(stage, m) for m in reversed(row)]
    return order


def gpipe(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """All forwards, then all backwards in reverse order (GPipe, arXiv 1811.06965, section 2.3 and figure 2c).

    K = 3, M = 3, without recomputation and with it:

        stage 0  F0 F1 F2 .. .. .. .. .. .. B2 -- B1 -- B0 --
        stage 1  .. F0 F1 F2 .. .. .. B2 -- B1 -- B0 -- .. ..
        stage 2  .. .. F0 F1 F2 B2 -- B1 -- B0 -- .. .. .. ..

        stage 0  F0 F1 F2 R2 .. .. .. .. .. .. B2 -- R1 B1 -- R0 B0 --
        stage 1  .. F0 F1 F2 R2 .. .. .. B2 -- R1 B1 -- R0 B0 -- .. ..
        stage 2  .. .. F0 F1 F2 R2 B2 -- R1 B1 -- R0 B0 -- .. .. .. ..

    With equal stages, free transfers and no recomputation the bubble is (K-1)/(M+K-1). Recomputation does not lengthen
    the fill and the drain of the pipeline: a stage begins it while it waits for its first gradient (see
    `hf_gpipe.schedule.simulate` for the formula).
    """
    micro_batches = range(num_micro_batches)
    orders = [
        [_forward(s, m) for m in micro_batches] + [_backward(s, m) for m in reversed(micro_batches)]
        for s in range(num_stages)
    ]
    return merge_with_recomputations(orders, placement, limits)


def gpipe_fused(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """GPipe whose last stage runs each micro-batch's backward right after its forward.

    The last stage recomputes nothing and keeps one micro-batch's logits. The other stages run all forwards first; the
    gradients that come early wait there, and they run their backwards in the order in which the gradients arrive.

    K = 3, M = 3, with recomputation:

        stage 0  F0 F1 F2 R0 .. .. .. B0 -- R1 B1 -- R2 B2 --
        stage 1  .. F0 F1 F2 R0 B0 -- R1 B1 -- R2 B2 -- .. ..
        stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. .. ..
    """
    last = num_stages - 1
    micro_batches = range(num_micro_batches)
    orders = [
        [_forward(s, m) for m in micro_batches] + [_backward(s, m) for m in placement.backward_order(micro_batches)]
        for s in range(last)
    ]
    orders.append(_one_row_after_another(last, num_micro_batches, placement))
    return merge_with_recomputations(orders, placement, fused_last(limits))


def one_forward_one_backward(
    num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits
) -> list[list[Action]]:
    """1F1B: a stage alternates one forward and one backward (PipeDream, arXiv 1806.03377), here with the flush that
    keeps GPipe's semantics (PipeDream-Flush, arXiv 2006.09503).

    Stage s starts with K-s-1 forwards, so it holds at most K-s micro-batches, however many there are. The bubble is
    gpipe's. The last stage has its gradient at hand and recomputes nothing.

    With replicas this is PipeDream's 1F1B-RR: a replica of stage s holds at most n / r micro-batches, rounded up, where
    r is the number of the stage's replicas and n that of all replicas of stages s to K-1. It is K-s where all stages
    have as many.

    Where rows are cut into c chunks, the first backward is that of a row's last chunk, so a stage starts with c-1
    forwards more (Seq1F1B, arXiv 2406.03488, section 3).

    K = 3, M = 4, without recomputation and with it:

        stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        stage 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..

        stage 0  F0 F1 F2 R0 .. .. .. B0 -- F3 R1 B1 -- R2 .. B2 -- R3 B3 --
        stage 1  .. F0 F1 R0 .. B0 -- F2 R1 B1 -- F3 R2 B2 -- R3 B3 -- .. ..
        stage 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. F3 B3 -- .. .. .. .. ..
    """
    orders: list[list[Action]] = []
    for s, workers in enumerate(placement.workers):
        ahead = forwards_ahead(placement, s)
        order: list[Action] = []
        for process in workers:
            order += _alternating(s, placement.micro_batches_of(s, process, num_micro_batches), ahead, placement)
        orders.append(order)
    return merge_with_recomputations(orders, placement, fused_last(limits))


def _alternating(stage: int, own: Sequence[int], ahead: int, placement: Placement) -> list[Action]:
    """The order of a replica with these micro-batches: so many forwards ahead, then one with each backward."""
    order = [_forward(stage, m) for m in own[:ahead]]
    for index, m in enumerate(placement.backward_order(own)):
        order += [_forward(stage, later) for later in own[index + ahead : index + ahead + 1]]
        order.append(_backward(stage, m))
    return order


def interleaved_1f1b(
    num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits
) -> list[list[Action]]:
    """1F1B with v = K/P stages per process, assigned in turn: stage s is on process s % P (Megatron-LM, Narayanan et
    al. 2021, arXiv 2104.04473, section 2.2 and figure 4).

    A micro-batch passes every process v times, each time through a v-th of its layers, so the pipeline fills and drains
    v times as fast: with equal stages and free transfers the bubble is (P-1)/(vM+P-1) where P divides M, against
    (P-1)/(M+P-1) in 1f1b. The price is v times the messages, and more micro-batches between forward and backward.

    K must be a multiple of P. With one stage per process it is 1f1b, and also in one process with several devices. One
    process with one device has no bubble to shorten and takes one micro-batch after another.
    `hf_gpipe.schedule.interleaved` has the order of the others; where a process has several devices, each stage keeps
    it and the process starts the actions in the order in which they can run.

    K = 4, M = 4 on P = 2 processes, without recomputation:

        stage 0  F0 F1 .. .. F2 .. .. .. F3 .. .. .. B0 -- .. B1 -- .. .. .. .. .. .. B2 -- B3 --
        stage 1  .. F0 F1 .. .. .. .. .. .. F2 B0 -- F3 B1 -- .. .. .. .. .. .. B2 -- B3 -- .. ..
        stage 2  .. .. F0 F1 .. .. B0 -- .. B1 -- F2 .. .. F3 .. .. .. B2 -- .. B3 -- .. .. .. ..
        stage 3  .. .. .. F0 B0 -- F1 B1 -- .. .. .. .. .. .. F2 B2 -- F3 B3 -- .. .. .. .. .. ..
    """
    has_several_devices = len(set(placement.devices or ())) > 1
    is_one_process = placement.replicas == (placement.num_processes,) * num_stages
    if is_one_process and not has_several_devices:
        return naive(num_stages, num_micro_batches, placement, fused_last(limits))
    if is_one_process or len(placement.places) == placement.num_processes:
        return one_forward_one_backward(num_stages, num_micro_batches, placement, limits)
    orders = interleaved_orders(num_stages, num_micro_batches, placement)
    if not has_several_devices:
        return [with_recomputations(order, fused_last(limits)) for order in orders]
    of_stages = [[action for order in orders for action in order if action.stage == s] for s in range(num_stages)]
    return merge_with_recomputations(of_stages, placement, fused_last(limits))


def breadth_first(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Stages assigned to the processes in turn, each of which runs all micro-batches before the process turns to its
    next one (arXiv 2211.05953): see `hf_gpipe.schedule.breadth_first`.

    The pipeline fills once with stages a fraction as long, so with P processes and enough micro-batches the bubble is
    gpipe's divided by K / P. Weights that visit their device (`hf_gpipe.schedule.visits`) come twice in a step.

    K = 4, M = 2, on two processes, without recomputation:

        stage 0  F0 F1 .. .. .. .. .. .. .. .. .. B0 -- B1 --
        stage 1  .. F0 F1 .. .. .. .. .. .. B0 -- B1 -- .. ..
        stage 2  .. .. F0 F1 .. .. B0 -- B1 -- .. .. .. .. ..
        stage 3  .. .. .. F0 B0 -- F1 B1 -- .. .. .. .. .. ..
    """
    orders = breadth_first_orders(num_stages, num_micro_batches, placement)
    return merge_with_recomputations(orders, placement, fused_last(limits))


def round_robin(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Slots of forwards and backwards that are dealt to the processes in turn, whatever their stages, whose weights
    visit (RoundPipe, arXiv 2604.27085): see `hf_gpipe.schedule.round_robin`.

    Here all stages are equal, so three of them have their forwards in one slot. With S slots in a round and P processes
    the bubble is about (P-1) / (S M / P + P-1), if the slots of all rounds are a multiple of P.

    K = 4, M = 2, on two processes, with L and D left out:

        process 0  0F0 1F0 2F0 0F1 1F1 2F1 2R0 2B0 --- 2R1 2B1 --- ... 0R0 0B0 --- 0R1 0B1 ---
        process 1  ... ... ... 3F0 3B0 --- 3F1 3B1 --- ... 1R0 1B0 --- 1R1 1B1 --- ... ... ...
    """
    deal = _deal_of_equal_stages(num_stages, num_micro_batches, placement)
    if None in limits[: deal.together.start]:
        raise ScheduleError(
            "schedule 'round_robin' recomputes, for the backward of a stage is on another worker than its forward; let "
            "recompute be stage."
        )
    return round_robin_orders(placement, num_micro_batches, deal)


def _deal_of_equal_stages(num_stages: int, num_micro_batches: int, placement: Placement) -> Deal:
    size = len(placement.crew_of(0))
    count = -(-num_micro_batches // len(placement.crews)) if placement.is_dealt else num_micro_batches
    forward, recompute, backward = ([kind.ticks] * num_stages for kind in (FORWARD, RECOMPUTE, BACKWARD))
    return deal_of(forward, recompute, backward, size, count)


def forward_only(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """Evaluation: forwards only, no update. `recompute` has nothing to act on.

    K = 3, M = 3:

        stage 0  F0 F1 F2 .. ..
        stage 1  .. F0 F1 F2 ..
        stage 2  .. .. F0 F1 F2
    """
    orders = [[_forward(s, m) for m in range(num_micro_batches)] for s in range(num_stages)]
    return merge_with_recomputations(orders, placement, limits)


def vocab_gpipe(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """GPipe with the head divided over the stages (vocabulary parallelism, arXiv 2411.05288): `_with_divided_head`.

    The backwards are in the order of the forwards: the last stage has the gradients in the order in which it has the
    hidden states.

    K = 3, M = 3, without recomputation; S takes one tick, T two:

        stage 0  F0 F1 F2 S0 S1 .. T0 -- S2 T1 -- T2 -- .. .. .. .. .. B0 -- B1 -- B2 --
        stage 1  .. F0 F1 F2 S0 S1 T0 -- S2 T1 -- T2 -- .. .. .. B0 -- B1 -- B2 -- .. ..
        stage 2  .. .. F0 F1 F2 S0 S1 T0 -- S2 T1 -- T2 -- B0 -- B1 -- B2 -- .. .. .. ..
    """
    micro_batches = range(num_micro_batches)
    orders = [[Action(kind, s, m) for kind in (FORWARD, BACKWARD) for m in micro_batches] for s in range(num_stages)]
    return _with_divided_head(orders, num_micro_batches, placement, limits)


def vocab_1f1b(num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> list[list[Action]]:
    """1F1B with the head divided over the stages (vocabulary parallelism, arXiv 2411.05288): `_with_divided_head`.

    Between F and B of the last stage all stages run S, and then all run T. So a stage has two micro-batches more under
    way than in 1f1b, however many stages there are.

    K = 3, M = 4, without recomputation; S takes one tick, T two:

        stage 0  F0 F1 F2 F3 S0 S1 .. T0 -- S2 T1 -- .. .. .. .. S3 T2 -- B0 -- T3 -- B1 -- .. .. B2 -- B3 --
        stage 1  .. F0 F1 F2 F3 S0 S1 T0 -- S2 T1 -- .. .. .. B0 -- S3 T2 -- B1 -- T3 -- .. B2 -- B3 -- .. ..
        stage 2  .. .. F0 F1 F2 .. S0 S1 T0 -- S2 T1 -- B0 -- F3 B1 -- S3 T2 -- T3 -- B2 -- B3 -- .. .. .. ..
    """
    orders: list[list[Action]] = []
    for s, workers in enumerate(placement.workers):
        ahead = forwards_ahead(placement, s) + 2
        order: list[Action] = []
        for process in workers:
            order += _alternating(s, placement.micro_batches_of(s, process, num_micro_batches), ahead, placement)
        orders.append(order)
    return _with_divided_head(orders, num_micro_batches, placement, limits)


def vocab_forward_only(
    num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits
) -> list[list[Action]]:
    """Evaluation with the head divided over the stages.

    K = 3, M = 3:

        stage 0  F0 F1 F2 S0 S1 S2 .. ..
        stage 1  .. F0 F1 F2 S0 S1 S2 ..
        stage 2  .. .. F0 F1 F2 S0 S1 S2
    """
    orders = [[_forward(s, m) for m in range(num_micro_batches)] for s in range(num_stages)]
    return _with_divided_head(orders, num_micro_batches, placement, limits)


def _with_divided_head(
    orders: list[list[Action]], num_micro_batches: int, placement: Placement, limits: Limits
) -> list[list[Action]]:
    """The order of each process, from that of each stage, with S and in training T in the gaps.

    A part of the head is like one more stage of the process, so `clock.merge` puts its actions where they can run. Each
    replica runs S of one micro-batch before T of the one before it, so that it does not wait for the other stages; then
    it has the logits of two.
    """
    is_training = any(action.kind.takes_gradient for action in orders[0])
    heads: list[list[Action]] = []
    for s, ahead in enumerate(placement.replicas):
        heads.append([])
        for m in range(num_micro_batches + ahead):
            heads[-1] += [Action(LOGITS, s, m)] if m < num_micro_batches else []
            heads[-1] += [Action(LOGITS_GRADIENT, s, m - ahead)] if is_training and m >= ahead else []
    return merge_with_recomputations([*orders, *heads], placement, limits)


SPLIT_SCHEDULES: dict[str, Builder] = {"zb_h1": zb_h1, "zb_h2": zb_h2, "zb_v": zb_v, "v_half": v_half}
"""Those whose backward is split into I and W."""

V_SHAPED = ("zb_v", "v_half")
"""Those whose stages are placed in the shape of a V."""

DIVIDED_HEAD = ("vocab_1f1b", "vocab_gpipe")
"""Those that divide the head over the stages."""

IN_TURN = ("interleaved_1f1b", "breadth_first")
"""Those whose stages are assigned to the processes in turn."""

DEALT = ("round_robin",)
"""Those whose stages are dealt: their weights are in memory that the processes share, and visit."""

#: The synchronous ones. `hf_gpipe.schedule.asynchronous` has the others.
SCHEDULES: dict[str, Builder] = {
    "naive": naive,
    "gpipe": gpipe,
    "gpipe_fused": gpipe_fused,
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved_1f1b,
    "breadth_first": breadth_first,
    "round_robin": round_robin,
    **SPLIT_SCHEDULES,
    "vocab_gpipe": vocab_gpipe,
    "vocab_1f1b": vocab_1f1b,
    "forward_only": forward_only,
    "vocab_forward_only": vocab_forward_only,
}


def placement_for(name: str, num_stages: int, num_processes: int, replicas: int | Sequence[int] = 1) -> Placement:
    """The placement of a schedule's stages: assigned in turn for interleaved_1f1b and breadth_first, in the
    shape of a V for zb_v and v_half, dealt for round_robin, consecutive for every other.

    Args:
        name: one of `SCHEDULES` or `ASYNCHRONOUS_SCHEDULES`.
        num_stages: K.
        num_processes: of all replicas together.
        replicas: one number D for all stages: D pipelines of num_processes / D consecutive processes each. Or one
            number for each stage: every replica in a process of its own, as in `Placement.one_stage_each`.

    Raises:
        ScheduleError: an unknown name, or numbers of stages, replicas and processes that do not fit each other.
    """
    _check_name(name)
    counts = replicas_of(num_stages, replicas)
    if len(set(counts)) > 1:
        if num_processes != sum(counts):
            raise ScheduleError(
                f"replicas {list(counts)} are on {sum(counts)} processes, and there are {num_processes}: where the "
                "numbers differ, each replica has a process of its own; use as many, or write a table, whose placement "
                "is free."
            )
        return Placement.one_stage_each(num_stages, counts)
    if num_processes % counts[0]:
        raise ScheduleError(
            f"replicas is {counts[0]} and the number of processes is {num_processes}: every replica of the pipeline "
            "has processes of its own, and as many as the others; use a multiple of replicas."
        )
    places: dict[str, Callable[[int, int], Placement]] = dict.fromkeys(IN_TURN, Placement.interleaved)
    places.update(dict.fromkeys(V_SHAPED, Placement.v_shaped))
    places.update(dict.fromkeys(DEALT, Placement.dealt))
    place = places.get(name, Placement.spread)
    return place(num_stages, num_processes // counts[0]).replicated(counts[0])


def build(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    placement: Placement | None = None,
    recompute: str | tuple[int | None, ...] = "stage",
    replicas: int | Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    chunks: int = 1,
) -> Schedule:
    """Build and check the table of a schedule. Equal arguments give the same object.

    A replica may be left without a micro-batch, where M is smaller than the number of a stage's replicas: it then only
    takes part in G and U. The last mini-batch of an epoch, which may have a single row, needs this.

    Args:
        name: one of `SCHEDULES` or `ASYNCHRONOUS_SCHEDULES`.
        num_stages: K, at least 1.
        num_micro_batches: M, at least 1, of the whole mini-batch; it may be smaller than K. Of an asynchronous
            schedule those of all steps. Of rows that are cut into chunks the number of all chunks.
        placement: where the stages are; None: each replica of a stage in its own process.
        recompute: "stage": a backward (B or I) is preceded by a recomputation R of its stage, but for the last stage of
            all but naive and gpipe; "none": no R; or for each stage the most autograd graphs that it may
            keep alive at once on each of its replicas (at least 1; None: any number), with as few R as this allows: see
            `hf_gpipe.schedule.recompute`.
        replicas: the number of replicas of every stage, or of each; None: the placement's, without a placement 1.
        steps: of an asynchronous schedule the number of micro-batches of each step; None: one step.
        chunks: into how many chunks of tokens each row is cut, each a micro-batch of the table.

    Raises:
        ScheduleError: an unknown name or mode, K or M below 1, limits that do not fit the stages, a placement of
            another number of stages or replicas, or one that the schedule cannot use, rows that lack chunks, or chunks
            that the schedule has no order for.
    """
    _check_name(name)
    is_asynchronous = name in ASYNCHRONOUS_SCHEDULES
    if steps is not None and not is_asynchronous:
        raise ScheduleError(
            f"schedule {name!r} has one step in a table; leave steps out, or use one of "
            f"{', '.join(ASYNCHRONOUS_SCHEDULES)}."
        )
    if num_stages < 1 or num_micro_batches < 1:
        raise ScheduleError(
            f"schedule {name!r}: num_stages is {num_stages} and num_micro_batches is {num_micro_batches}; "
            "both must be at least 1."
        )
    # At least a forward, a backward and an update; before anything is made that is as large as these numbers.
    if num_stages * num_micro_batches * 2 > MOST_ACTIONS:
        raise ScheduleError(
            f"schedule {name!r}: num_stages is {num_stages} and num_micro_batches is {num_micro_batches}; a table has "
            f"at most {MOST_ACTIONS} actions, and these are more: let one of the numbers be smaller."
        )
    if placement is None:
        one_each = Placement.dealt(num_stages, num_stages) if name in DEALT else None
        counts = 1 if replicas is None else replicas
        placement = (
            Placement.one_stage_each(num_stages, counts) if one_each is None else one_each.replicated(_one(counts))
        )
    if chunks > 1:
        if is_asynchronous or name in (*DIVIDED_HEAD, *DEALT):
            others = [one for one in SCHEDULES if not one.startswith("vocab") and one not in DEALT]
            raise ScheduleError(
                f"schedule {name!r} has no order for rows that are cut into chunks (chunks is {chunks}); use one of "
                f"{', '.join(others)}, or let chunks be 1."
            )
        if num_micro_batches % chunks:
            raise ScheduleError(
                f"schedule {name!r}: num_micro_batches is {num_micro_batches} and chunks is {chunks}: each row has all "
                "its chunks; use a multiple of chunks."
            )
        placement = replace(placement, chunks=chunks)
    if placement.num_stages != num_stages:
        raise ScheduleError(
            f"schedule {name!r}: num_stages is {num_stages}, but the placement is of {placement.num_stages} stages."
        )
    if replicas is not None and placement.replicas != replicas_of(num_stages, replicas):
        raise ScheduleError(
            f"schedule {name!r}: replicas is {replicas}, but the stages of the placement {placement} have "
            f"{list(placement.replicas)}; leave replicas out."
        )
    if is_asynchronous and placement.has_replicas and len(placement.places) > placement.num_processes:
        raise ScheduleError(
            f"schedule {name!r} and the placement {placement} do not go together: replicas wait for each other in each "
            "step, and two stages of one process would do so in different orders; give each replica of each stage a "
            "process of its own."
        )
    if name.startswith("vocab_") and len(set(placement.replicas)) > 1:
        raise ScheduleError(
            f"schedule {name!r}: the stages have {list(placement.replicas)} replicas, and every micro-batch needs each "
            "stage's part of the head; use one number of replicas for all stages."
        )
    limits = _limits(name, num_stages, recompute)
    if is_asynchronous:
        return _build_asynchronous(name, tuple(steps or [num_micro_batches]), placement, limits)
    return _build(name, num_stages, num_micro_batches, placement, limits)


@lru_cache(maxsize=64)
def _build_asynchronous(name: str, steps: tuple[int, ...], placement: Placement, limits: Limits) -> Schedule:
    schedule = asynchronous(name, steps, placement, limits)
    check_table(schedule)
    return schedule


@lru_cache(maxsize=256)
def _build(name: str, num_stages: int, num_micro_batches: int, placement: Placement, limits: Limits) -> Schedule:
    orders = SCHEDULES[name](num_stages, num_micro_batches, placement, limits)
    orders = [whole_backwards(order, process, placement) for process, order in enumerate(orders)]
    if placement.is_dealt and name in DEALT:
        orders = with_updates(orders, placement)
    elif any(action.kind.takes_gradient for order in orders for action in order):
        for process, order in enumerate(orders):
            orders[process] = _with_reductions(order, process, placement)
            # The updates of a process stand at its end, where every gradient is complete: see `validate`.
            orders[process] += [Action(UPDATE, stage) for stage in placement.stages_of(process)]
    schedule = Schedule(name, num_stages, num_micro_batches, placement, tuple(tuple(order) for order in orders))
    check_table(schedule)
    return schedule


def _with_reductions(order: list[Action], process: int, placement: Placement) -> list[Action]:
    """The order of a process, with a G of each stage that has replicas.

    It stands directly after the process's last B or W of the stage, so that it overlaps with what the process still
    runs; at the end if there is none. A G never stands before that of a deeper stage, so all processes have one
    order of them.
    """
    last = {action.stage: index for index, action in enumerate(order) if action.kind.completes_micro_batch}
    waiting = [stage for stage in placement.stages_of(process) if placement.replicas[stage] > 1]
    result: list[Action] = []
    for index, action in enumerate(order):
        result.append(action)
        while waiting and last.get(waiting[-1], len(order)) <= index:
            result.append(Action(REDUCE, waiting.pop()))
    return result + [Action(REDUCE, stage) for stage in reversed(waiting)]


def _one(replicas: int | Sequence[int]) -> int:
    """The number of replicas of all stages. Raises ScheduleError where they differ."""
    counts = {replicas} if isinstance(replicas, int) else set(replicas)
    if len(counts) > 1:
        raise ScheduleError(f"replicas is {list(counts)}: dealt stages have one number of replicas.")
    return counts.pop()


def _check_name(name: str) -> None:
    names = (*SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
    if name not in names:
        raise ScheduleError(
            f"schedule {name!r} is unknown; use one of {', '.join(names)}, or the path of a table, which ends in "
            f"{TABLE_SUFFIX}{nearest(name, names)}"
        )


def _limits(name: str, num_stages: int, recompute: str | tuple[int | None, ...]) -> Limits:
    """How many graphs each stage may keep alive under a mode of `build`."""
    if isinstance(recompute, str):
        if recompute not in RECOMPUTE_MODES:
            raise ScheduleError(
                f"recompute {recompute!r} is unknown to schedule {name!r}; use one of {', '.join(RECOMPUTE_MODES)}, or "
                f"for each stage the most graphs it keeps alive{nearest(recompute, RECOMPUTE_MODES)}"
            )
        return (0 if recompute == "stage" else None,) * num_stages
    if len(recompute) != num_stages:
        raise ScheduleError(
            f"recompute of schedule {name!r} has {len(recompute)} limits for {num_stages} stages; give one for each."
        )
    for stage, limit in enumerate(recompute):
        if limit is not None and limit < 1:
            raise ScheduleError(
                f"recompute of schedule {name!r}: stage {stage} may keep {limit} graphs alive, but a backward needs "
                "one; give at least 1, or None for no limit."
            )
    return tuple(recompute)
