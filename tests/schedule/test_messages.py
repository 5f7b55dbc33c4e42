from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings

from hf_gpipe.errors import ScheduleError
from hf_gpipe.modes.divided_head.table import LOGITS, LOGITS_GRADIENT
from hf_gpipe.schedule import Action, Costs, Placement, Schedule, build, check_table, placement_for, simulate
from hf_gpipe.schedule.kinds import REDUCE, UPDATE
from hf_gpipe.schedule.messages import executable_order, messages
from tests.schedule.cases import Recompute, schedules
from tests.schedule.test_replicas import tables as replicated_tables

Operations = list[list[tuple[str, Action, Action]]]
"""For each process: ("run", action, action), ("send", ...) and ("receive", source and consumer of a message)."""


def operations(table: Schedule) -> Operations:
    """The operations of each process in the order in which the executor calls them."""
    found: Operations = []
    for process, actions in enumerate(table.actions):
        receives = defaultdict(list)
        for message in messages(table):
            if message.receiver == process:
                receives[message.before].append((message.source, message.consumer))
        found.append([])
        for index, action in enumerate(actions):
            found[-1] += [("receive", *pair) for pair in receives[index]]
            found[-1].append(("run", action, action))
            consumers = [one for one in table.consumers(action) if table.worker_of(one) != process]
            found[-1] += [("send", action, consumer) for consumer in consumers]
    return found


def runs_with_blocking_messages(table: Schedule, ahead: Operations) -> bool:
    """Whether every process gets to its end if a send and a receive last until the other one has begun too."""
    reached = [0] * len(ahead)
    at: dict[tuple[str, Action, Action], int] = {}
    done: Counter[Action] = Counter()
    progress = True
    while progress:
        progress = False
        for process, own in enumerate(ahead):
            while reached[process] < len(own):
                what, action, consumer = own[reached[process]]
                if what == "run":
                    if not all(source in done for source in table.sources(action)):
                        break
                    if action.kind == UPDATE:
                        workers = table.placement.workers[action.stage]
                        if len(workers) > 1 and done[replace(action, kind=REDUCE)] < len(workers):
                            break
                    done[action] += 1
                else:
                    at[what, action, consumer] = process
                    if ("receive" if what == "send" else "send", action, consumer) not in at:
                        break
                reached[process] += 1
                progress = True
    return all(count == len(own) for count, own in zip(reached, ahead, strict=True))


def last_own_needs(table: Schedule) -> dict[Action, list[int]]:
    """For each action and process the index of the last action there that it depends on, or that it is; -1: none."""
    latest = [[-1] * len(table.actions) for _ in table.actions]
    needs: dict[Action, list[int]] = {}
    for process, action in executable_order(table):
        now = list(latest[process])
        for source in table.sources(action):
            now = [max(pair) for pair in zip(now, needs[source], strict=True)]
        now[process] = latest[process][process] + 1
        needs[action] = latest[process] = now
    return needs


@given(schedules())
@settings(deadline=None, max_examples=60)
def test_every_table_runs_if_each_message_blocks(case: tuple[Schedule, Recompute]) -> None:
    table, _ = case
    assert runs_with_blocking_messages(table, operations(table))


@given(schedules())
@settings(deadline=None, max_examples=60)
def test_a_receive_starts_after_what_it_depends_on_and_before_its_use(case: tuple[Schedule, Recompute]) -> None:
    table, _ = case
    needs = last_own_needs(table)
    for message in messages(table):
        assert needs[message.source][message.receiver] < message.before
        assert message.before <= table.actions[message.receiver].index(message.consumer)


@given(schedules())
@settings(deadline=None, max_examples=60)
def test_there_is_one_message_for_each_pair_of_actions_on_two_processes(case: tuple[Schedule, Recompute]) -> None:
    table, _ = case
    home = {action: process for process, actions in enumerate(table.actions) for action in actions}
    expected = {
        (action, consumer, process, home[consumer])
        for action, process in home.items()
        for consumer in table.consumers(action)
        if home[consumer] != process
    }
    found = [message[:4] for message in messages(table)]
    assert set(found) == expected
    assert len(found) == len(expected)


@given(schedules())
@settings(deadline=None, max_examples=60)
def test_two_processes_send_and_receive_in_one_order(case: tuple[Schedule, Recompute]) -> None:
    """So the messages of all stages can share one first-in-first-out communicator per direction."""
    table, _ = case
    done = operations(table)
    ends = {message[:2]: (message.sender, message.receiver) for message in messages(table)}

    def order(process: int, what: str, pair: tuple[int, int]) -> list[tuple[Action, Action]]:
        return [(source, to) for kind, source, to in done[process] if kind == what and ends[source, to] == pair]

    for pair in set(ends.values()):
        assert order(pair[0], "send", pair) == order(pair[1], "receive", pair)


@given(schedules())
@settings(deadline=None, max_examples=60)
def test_a_receive_is_started_when_its_source_starts(case: tuple[Schedule, Recompute]) -> None:
    """With equal stages. So of each other process at most one message is announced and not yet sent."""
    table, _ = case
    ticks = {kind: kind.ticks for kind in (LOGITS, LOGITS_GRADIENT)}
    spans = {span.action: span for span in simulate(table, Costs(1, 2, others=ticks)).spans}
    for message in messages(table):
        own = table.actions[message.receiver]
        start = spans[message.source].start
        assert start <= spans[own[message.before]].start
        if message.before:
            assert spans[own[message.before - 1]].start <= start


@pytest.mark.parametrize("name", ["gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b"])
def test_two_receives_ahead_of_use_do_wait_for_each_other(name: str) -> None:
    """The check above bites: this is the rule of thumb that does not work."""
    num_stages = 8 if name == "interleaved_1f1b" else 4
    table = build(name, num_stages, 8, placement_for(name, num_stages, 4))
    ahead = operations(table)
    for process, actions in enumerate(table.actions):
        pairs = [(s, a) for a in actions for s in table.sources(a) if table.worker_of(s) != process]
        kept = [operation for operation in ahead[process] if operation[0] != "receive"]
        for place, pair in enumerate(pairs):
            use = 0 if place < 2 else kept.index(("run", pairs[place - 2][1], pairs[place - 2][1])) + 1
            kept.insert(use + (place == 1), ("receive", *pair))
        ahead[process] = kept
    assert not runs_with_blocking_messages(table, ahead)


def test_the_receives_of_a_small_table() -> None:
    table = build("1f1b", 2, 3, recompute="none")
    assert [list(map(str, actions)) for actions in table.actions] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2", "0U"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1U"],
    ]
    assert [f"{m.source} before {table.actions[m.receiver][m.before]}" for m in messages(table)] == [
        "0F0 before 1F0",
        "0F1 before 1F0",
        "1B0 before 0B0",
        "1B1 before 0F2",
        "0F2 before 1F2",
        "1B2 before 0B2",
    ]


@given(replicated_tables() | schedules())
@settings(deadline=None, max_examples=60)
def test_messages_go_where_the_stages_are(case: tuple[Schedule, Recompute]) -> None:
    """What the rows of a builder's table say is what the placement says."""
    table, _ = case

    def home(action: Action) -> int:
        return table.placement.worker_of(action.stage, action.micro_batch)

    every = [action for row in table.actions for action in row]
    pairs = [(action, consumer) for action in every for consumer in table.consumers(action)]
    expected = {(*pair, *map(home, pair)) for pair in pairs if home(pair[0]) != home(pair[1])}
    found = [message[:4] for message in messages(table)]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_messages_follow_the_rows() -> None:
    """Both micro-batches of stage 0 stand on its second replica, to which the placement would give the second alone."""
    rows = ["0G 0U", "0F0 0F1 0B0 0B1 0G 0U", "1F0 1F1 1B0 1B1 1U"]
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    table = Schedule("dealt", 2, 2, Placement([[0, 1], [2]]), actions)
    assert [(str(m.source), m.sender, m.receiver) for m in messages(table)] == [
        ("0F0", 1, 2),
        ("0F1", 1, 2),
        ("1B0", 2, 1),
        ("1B1", 2, 1),
    ]
    assert [table.micro_batches_of(process, 0) for process in (0, 1)] == [(), (0, 1)]
    with pytest.raises(ScheduleError, match="0F0 is on process 1, but micro-batch 0 belongs to replica 0 % 2"):
        check_table(table)


def test_one_process_has_no_messages() -> None:
    assert messages(build("1f1b", 4, 3, Placement.spread(4, 1))) == ()
