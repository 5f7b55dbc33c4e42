"""The schedules by name: `build` makes and checks the table of any of them, `placement_for` says where its stages are.

A builder is a small function, in `basic` or in the file of its kind of schedule. It says in which order each stage
works, `with_recomputations` puts the recomputations in, and `clock.merge` turns the orders of stages into the orders of
processes; where a process holds one stage, both are the same. Where a stage has replicas, each replica takes its own
micro-batches out of the stage's order. So D replicas of every stage are D pipelines side by side, each with the
schedule of its own micro-batches.

Every table runs to its end if sends do not wait, and also if every send and every receive blocks its process:
`hf_gpipe.schedule.messages` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

from hf_gpipe.errors import ScheduleError, nearest
from hf_gpipe.schedule import groups
from hf_gpipe.schedule.basic import forward_only, gpipe, gpipe_fused, naive, one_forward_one_backward
from hf_gpipe.schedule.breadth_first import breadth_first
from hf_gpipe.schedule.file import TABLE_SUFFIX
from hf_gpipe.schedule.interleaved import interleaved_1f1b
from hf_gpipe.schedule.named import SCHEDULES, NamedSchedule, window_schedules
from hf_gpipe.schedule.placement import Placement, replicas_of
from hf_gpipe.schedule.recompute import Limits
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.schedule.text_form import MOST_ACTIONS
from hf_gpipe.schedule.updates import with_updates
from hf_gpipe.schedule.validate import check_table
from hf_gpipe.schedule.zero_bubble import v_half, whole_backwards, zb_h1, zb_h2, zb_v

RECOMPUTE_MODES = ("stage", "none")


IN_TURN = ("interleaved_1f1b", "breadth_first")
"""The schedules whose stages are assigned to the processes in turn."""

SPLIT_SCHEDULES = ("zb_h1", "zb_h2", "zb_v", "v_half")
"""The schedules whose backward is split into I and W."""

V_SHAPED = ("zb_v", "v_half")
"""The schedules whose stages are placed in the shape of a V."""

_in_turn, _in_a_v = (partial(NamedSchedule, place=place) for place in (Placement.interleaved, Placement.v_shaped))
SCHEDULES.update(
    {
        "naive": NamedSchedule(naive, text="no pipelining"),
        "gpipe": NamedSchedule(gpipe, text="as in the paper"),
        "gpipe_fused": NamedSchedule(gpipe_fused, text="the last stage runs each backward right after its forward"),
        "1f1b": NamedSchedule(one_forward_one_backward, text="least memory"),
        "interleaved_1f1b": _in_turn(interleaved_1f1b, text="several stages per process, assigned in turn"),
        "breadth_first": _in_turn(breadth_first, text="the same, each stage running all micro-batches before the next"),
        "zb_h1": NamedSchedule(zb_h1, text="1f1b with a split backward, a third of its bubble in its memory"),
        "zb_h2": NamedSchedule(zb_h2, text="twice the memory, no bubble between steps that do not wait for each other"),
        "zb_v": _in_a_v(zb_v, text="two stages per process in a V, a sixth of 1f1b's bubble in its memory"),
        "v_half": _in_a_v(v_half, text="the same in half of it, with half of 1f1b's bubble"),
        "forward_only": NamedSchedule(forward_only, is_for_training=False),
    }
)


def placement_for(name: str, num_stages: int, num_processes: int, replicas: int | Sequence[int] = 1) -> Placement:
    """The placement of a schedule's stages (`NamedSchedule.place`).

    Args:
        name: one of `SCHEDULES`.
        num_stages: K.
        num_processes: of all replicas together.
        replicas: one number D for all stages: D pipelines of num_processes / D consecutive processes each. Or one
            number for each stage: every replica in a process of its own, as in `Placement.one_stage_each`.

    Raises:
        ScheduleError: an unknown name, or numbers of stages, replicas and processes that do not fit each other.
    """
    named = _named(name)
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
    return named.place(num_stages, num_processes // counts[0]).replicated(counts[0])


def build(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    placement: Placement | None = None,
    recompute: str | tuple[int | None, ...] = "stage",
    replicas: int | Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    group_size: int = 1,
    *,
    is_checked: bool = True,
) -> Schedule:
    """Build and check the table of a schedule. Equal arguments give the same object.

    A replica may be left without a micro-batch, where M is smaller than the number of a stage's replicas: it then only
    takes part in G and U. The last mini-batch of an epoch, which may have a single row, needs this.

    Args:
        name: one of `SCHEDULES`.
        num_stages: K, at least 1.
        num_micro_batches: M, at least 1, of the whole mini-batch; it may be smaller than K. Of a window
            those of all steps. Of groups the number of all members.
        placement: where the stages are; None: each replica of a stage in its own process.
        recompute: "stage": a backward (B or I) is preceded by a recomputation R of its stage, but for the last stage of
            all but naive and gpipe; "none": no R; or for each stage the most autograd graphs that it may
            keep alive at once on each of its replicas (at least 1; None: any number), with as few R as this allows: see
            `hf_gpipe.schedule.recompute`.
        replicas: the number of replicas of every stage, or of each; None: the placement's, without a placement 1.
        steps: of a schedule whose tables are windows the number of micro-batches of each step; None: one step.
        group_size: how many consecutive micro-batches depend on each other (`hf_gpipe.schedule.groups`).
        is_checked: whether `check_table` sees it, which takes about as long as a simulation. A search compares many
            tables, and checks the one that it takes.

    Raises:
        ScheduleError: an unknown name or mode, K or M below 1, limits that do not fit the stages, a placement of
            another number of stages or replicas, or one that the schedule cannot use, groups that are not whole, or
            that the schedule has no order for.
    """
    named = _named(name)
    if steps is not None and named.window is None:
        raise ScheduleError(
            f"schedule {name!r} has one step in a table; leave steps out, or use one of "
            f"{', '.join(window_schedules())}."
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
        counts = replicas_of(num_stages, 1 if replicas is None else replicas)
        placement = Placement.one_stage_each(num_stages, counts)
        if named.is_shared and len(set(counts)) == 1:
            placement = named.place(num_stages, num_stages).replicated(counts[0])
    if group_size > 1:
        ordered = [other for other in SCHEDULES if SCHEDULES[other].takes_groups]
        groups.check_schedule(name, group_size, num_micro_batches, ordered, has_order=named.takes_groups)
        placement = replace(placement, group_size=group_size)
    if placement.num_stages != num_stages:
        raise ScheduleError(
            f"schedule {name!r}: num_stages is {num_stages}, but the placement is of {placement.num_stages} stages."
        )
    if replicas is not None and placement.replicas != replicas_of(num_stages, replicas):
        raise ScheduleError(
            f"schedule {name!r}: replicas is {replicas}, but the stages of the placement {placement} have "
            f"{list(placement.replicas)}; leave replicas out."
        )
    if named.window is not None and placement.has_replicas and len(placement.places) > placement.num_processes:
        raise ScheduleError(
            f"schedule {name!r} and the placement {placement} do not go together: replicas wait for each other in each "
            "step, and two stages of one process would do so in different orders; give each replica of each stage a "
            "process of its own."
        )
    if named.same_replicas and len(set(placement.replicas)) > 1:
        raise ScheduleError(
            f"schedule {name!r}: the stages have {list(placement.replicas)} replicas, and every micro-batch "
            f"{named.same_replicas}; "
            "use one number of replicas for all stages."
        )
    limits = _limits(name, num_stages, recompute)
    if named.window is not None:
        table = named.window(tuple(steps or [num_micro_batches]), placement, limits)
    else:
        table = _build(name, num_micro_batches, placement, limits)
    if is_checked:
        check_once(table)
    return table


check_once = lru_cache(maxsize=256)(check_table)
"""`check_table`, which sees equal tables once."""


@lru_cache(maxsize=256)
def _build(name: str, num_micro_batches: int, placement: Placement, limits: Limits) -> Schedule:
    builder = SCHEDULES[name].orders
    assert builder is not None
    orders = builder(num_micro_batches, placement, limits)
    orders = [whole_backwards(order, process, placement) for process, order in enumerate(orders)]
    if any(action.kind.takes_gradient for order in orders for action in order):
        orders = with_updates(orders, placement)
    return Schedule(name, placement.num_stages, num_micro_batches, placement, tuple(map(tuple, orders)))


def _named(name: str) -> NamedSchedule:
    names = tuple(SCHEDULES)
    if name not in names:
        raise ScheduleError(
            f"schedule {name!r} is unknown; use one of {', '.join(names)}, or the path of a table, which ends in "
            f"{TABLE_SUFFIX}{nearest(name, names)}"
        )
    return SCHEDULES[name]


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
