"""The tensors that stages hold over time, from one sweep over a timeline; every count of live tensors is read off it.

The kinds of actions say what each of them receives, makes and frees. So the input of a micro-batch comes when the stage
before sends it, and stays until the end of the micro-batch's backward. Its autograd graph is there from the end of the
forward or recomputation that makes it to the end of the backward. A gradient that comes early waits for its backward to
begin. Where the backward is split, the input and the graph stay until the end of I, and the tensors that W needs stay
from then to the end of W.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.simulate import Costs, Seconds, Span, Timeline, simulate
from hf_gpipe.schedule.table import Schedule


def holdings(timeline: Timeline, stage: int, process: int) -> Iterator[tuple[str, Seconds, Seconds]]:
    """Yield the things that a stage holds in one of its workers for each micro-batch: (what, from, until)."""
    schedule, ran = timeline.schedule, timeline.spans_of
    own = schedule.micro_batches_of(process, stage)
    spans_of = {m: [span for span in ran[stage][m] if span.process == process] for m in own}
    completed = [span for spans in spans_of.values() for span in spans if span.action.kind.completes_micro_batch]
    completed.sort(key=lambda span: span.end)
    first_completed = next(iter(completed), None)
    copies: dict[Action, Span] = {}
    carriers = [kind for kind in schedule.kinds if kind.carries_gradients]
    for span in completed if carriers else ():
        for copy in schedule.concerned(process, span.action, carriers):
            copies.setdefault(copy, span)
    for copy, span in copies.items():
        yield Held.LEAVING_GRADIENTS, span.end, timeline.left_at[process, copy]
    for micro_batch in own:
        spans = spans_of[micro_batch]
        yield Held.MICRO_BATCH, spans[0].computes, spans[-1].end
        frees_at = {what: span.end for span in spans for what in span.action.kind.frees}
        for number, span in enumerate(spans):
            kind = span.action.kind
            if (received := kind.receives) is not None:
                for source in schedule.sources(span.action):
                    if not source.kind.sends and not source.kind.turn:
                        continue
                    sent_at = timeline.ends[schedule.worker_of(source), source]
                    yield received, sent_at, frees_at.get(received, span.computes)
            freed = None if kind.makes is None else _freed(kind.makes, spans[number + 1 :])
            working = kind.working if freed is not None or kind.working_alone is None else kind.working_alone
            if working is not None:
                yield working, span.computes, span.end
            if kind.makes is not None and freed is not None:
                yield kind.makes, span.end, freed
            if span is first_completed:
                yield Held.FIRST_BACKWARD, span.computes, span.end
                yield Held.WEIGHT_GRADIENTS, span.end, math.inf
    for group in schedule.placement.groups_of(own) if schedule.group_size > 1 else ():
        spans = [span for micro_batch in group for span in spans_of[micro_batch]]
        backwards = [span for span in spans if span.action.kind.takes_gradient]
        end = max(span.end for span in backwards or spans)
        yield Held.ROW, min(span.computes for span in spans), end
        if backwards:
            yield Held.ROW_GRADIENTS, min(span.computes for span in backwards), end


def _freed(what: str, later: Sequence[Span]) -> Seconds | None:
    """When a thing is freed that an action makes before these; None: never, or another of them makes it first."""
    for span in later:
        if what in span.action.kind.frees:
            return span.end
        if span.action.kind.makes == what:
            return None
    return None


Amounts = Mapping[str, Mapping[str, float]]
"""How much each thing that a stage holds adds to each item of a sum."""


def occupancy(
    timeline: Timeline, amounts: Mapping[int, Amounts], process: int
) -> Iterator[tuple[Seconds, dict[str, float]]]:
    """How much some stages hold over time in a worker, as steps: (from this time on, so much of each item).

    What ends makes room for what begins at the same time.

    Args:
        timeline: simulated or measured.
        amounts: of each stage that counts.
        process: the worker.
    """
    changes: defaultdict[Seconds, list[tuple[str, float]]] = defaultdict(list)
    for stage, of_stage in amounts.items():
        for held, start, end in holdings(timeline, stage, process):
            if end <= start:
                continue
            for item, amount in of_stage.get(held, {}).items():
                if amount:
                    changes[start].append((item, amount))
                    changes[end].append((item, -amount))
    level: dict[str, float] = {}
    before: dict[str, float] = {}
    for time in sorted(changes):
        for item, change in changes[time]:
            level[item] = level.get(item, 0) + change
        if level != before:
            before = dict(level)
            yield time, before


def most_held(timeline: Timeline, stage: int) -> dict[str, int]:
    """The most of each thing that a stage holds at once in any one of its workers, as a number of micro-batches."""
    most = Counter[str]()
    placement = timeline.schedule.placement
    for process in range(placement.num_processes) if placement.is_shared else placement.workers[stage]:
        changes: defaultdict[str, list[tuple[Seconds, int]]] = defaultdict(list)
        for held, start, end in holdings(timeline, stage, process):
            if end > start:
                changes[held] += [(start, 1), (end, -1)]
        for held, of_held in changes.items():
            # At one time -1 comes first.
            most[held] = max(most[held], *accumulate(change for _, change in sorted(of_held)))
    return most


@lru_cache(maxsize=256)
def most_of_equal_stages(table: Schedule) -> tuple[dict[str, int], ...]:
    """The most of each thing that each stage holds at once, if all stages are equally fast, and a graph
    travels as long as its forward takes."""
    others: dict[str, Seconds] = {
        kind: kind.ticks if kind.held_ticks is None else kind.held_ticks for kind in table.kinds if not kind.price
    }
    timeline = simulate(table, Costs(1, 2, input_seconds=1, weight_seconds=1, others=others))
    return tuple(most_held(timeline, stage) for stage in range(table.num_stages))
