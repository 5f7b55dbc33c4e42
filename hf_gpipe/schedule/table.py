"""The schedule table: for every worker, the ordered list of actions that it runs in one step. A worker is a process.

A table is plain data. The same object is validated, simulated, drawn and executed, and it has a text form that can be
read, compared and edited. GPipe with two stages and two micro-batches, recomputation on:

    table: 8
    schedule: gpipe
    num_stages: 2
    num_micro_batches: 2
    placement: 0 1
    process 0: 0F0 0F1 0R1 0B1 0R0 0B0 0U
    process 1: 1F0 1F1 1R1 1B1 1R0 1B0 1U

The first line has the version of this text, so that a later one can say more; earlier texts are read too.
`schedule` is a name for people. `placement` gives the process of each stage, or the processes of its replicas with
commas: in `placement: 0,1 2` stage 0 has two replicas, on processes 0 and 1, and micro-batch m runs on replica m % 2. A
line `devices: cuda:0 cuda:1 cuda:0` follows where devices are given: one for each replica of each stage, in the order
of the placement. Each process runs its line from left to right and waits, at an action, for the message which that
action receives. A reduction (G) is not waited for where it stands: it goes on beside the next actions until U needs it.

An asynchronous table has several steps, and each stage updates its weights after each of them (PipeDream, arXiv
1806.03377). A line `steps: 2 2 2` after the placement gives the number of micro-batches of each step. A word `2F7@3`
says that micro-batch 7 reads version 3 of stage 2's weights, in its forward, recomputation and backward: those after
three updates of this table. Without it a forward reads the newest version. A line `stashes: no` after the steps says
that no old version is kept: recomputations and backwards then read the newest version too.

A line `chunks: 4` after the placement says that rows are cut into 4 chunks of tokens, and each chunk is a micro-batch
of the table: number m is chunk m % 4 of the rows m // 4. A stage runs a chunk's forward after that of the chunk before
it, and its backward after that of the chunk after it. All chunks of a row run on one replica of a stage, (m // 4) % r
where the stage has r of them.

Where weights visit their device (`hf_gpipe.schedule.visits`), each run of a stage's actions stands between an L and a
D, which are numbered by the visits of the stage: `0L0 1L0 0F0 0F1 0D0 2L0 1F0 1F1 1D0`.

A line `dealt: yes` after the placement says that weights are in CPU memory that the workers of a pipeline
share. An action of a micro-batch may then stand in the row of any of them, between an L and a D of its stage; all
visits of a stage are numbered together. The placement gives the worker that updates each stage. A recomputation on
another worker than its forward receives the stage's inputs from the stage before, as the forward does. Where the
backwards of a stage are in several visits, each visit adds to the gradients that the one before has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NoReturn

from hf_gpipe.errors import ScheduleError, nearest
from hf_gpipe.schedule.actions import (
    TEXT_VERSION,
    Action,
    gradient_action,
    head_consumers,
    head_sources,
    parse_number,
)
from hf_gpipe.schedule.kinds import DROP, FORWARD, INPUT, LOAD, LOGITS, RECOMPUTE, ActionKind, Held, awaited_by
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.visit import Visit, visits_of

MOST_ACTIONS = 600_000
"""The most actions of a table: of more, the checks alone would take minutes."""

_HEADER_KEYS = ("table", "schedule", "num_stages", "num_micro_batches", "placement")
_OPTIONAL_KEYS = ("chunks", "dealt", "steps", "stashes", "devices")


@dataclass(frozen=True)
class Schedule:
    """One or several steps of a pipeline as a table. Immutable and hashable; `validate.check_table` says whether it can
    be run.

    Raises:
        ScheduleError: the name is empty, or would not survive the text form.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    placement: Placement
    actions: tuple[tuple[Action, ...], ...]
    """One ordered list per worker."""
    steps: tuple[int, ...] | None = None
    """Of an asynchronous table, whose stages update their weights after each step by themselves: the number of
    micro-batches of each step. None: a synchronous table, of one step that all stages end together."""
    versions: frozenset[tuple[int, int, int]] = frozenset()
    """(stage, micro-batch, version) of those that read another version of the weights than the newest."""
    stashes: bool = True
    """Whether a version that is still to be read is kept when an update replaces it. False, of an asynchronous table:
    a recomputation and a backward read the newest version, whatever their forward has read."""

    def __post_init__(self) -> None:
        if self.name.strip().splitlines() != [self.name]:
            raise ScheduleError(f"schedule name {self.name!r}: use one line of text without spaces at its ends.")

    def __str__(self) -> str:
        return self.text()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once, for a table is a key of caches and may have many actions."""
        return hash((self.name, self.placement, self.actions, self.steps, self.versions, self.stashes))

    @cached_property
    def is_training(self) -> bool:
        """Whether the table has backward actions."""
        return any(action.kind.takes_gradient for actions in self.actions for action in actions)

    @cached_property
    def split(self) -> frozenset[tuple[int, int | None]]:
        """The (stage, micro-batch) pairs whose backward is split into I and W."""
        return frozenset(
            (action.stage, action.micro_batch) for actions in self.actions for action in actions if action.kind == INPUT
        )

    @property
    def chunks(self) -> int:
        """Into how many chunks of tokens each row is cut; each chunk counts as a micro-batch."""
        return self.placement.chunks

    def chunk_before(self, action: Action) -> Action | None:
        """The action on another chunk of the same row that comes before this one on the same stage; None: there is
        none."""
        if not action.kind.chunk_before or action.micro_batch is None:
            return None
        other = action.micro_batch + action.kind.chunk_before
        if other < 0 or other // self.chunks != action.micro_batch // self.chunks:
            return None
        if action.kind.takes_gradient:
            return gradient_action(action.stage, other, self.split)
        return Action(action.kind, action.stage, other)

    @property
    def is_asynchronous(self) -> bool:
        """Whether each stage updates its weights by itself, after each step of the table."""
        return self.steps is not None

    @property
    def num_steps(self) -> int:
        """The number of updates of each stage."""
        return 1 if self.steps is None else len(self.steps)

    @cached_property
    def step_of(self) -> tuple[int, ...]:
        """The step of each micro-batch."""
        sizes = (self.num_micro_batches,) if self.steps is None else self.steps
        return tuple(step for step, size in enumerate(sizes) for _ in range(size))

    @cached_property
    def newest_version(self) -> Mapping[tuple[int, int], int]:
        """The number of updates of the stage before each forward, by its (stage, micro-batch)."""
        found: dict[tuple[int, int], int] = {}
        for actions in self.actions:
            updates = [0] * self.num_stages
            for action in actions:
                if action.kind.changes_weights:
                    updates[action.stage] += 1
                elif action.kind == FORWARD and action.micro_batch is not None:
                    found[action.stage, action.micro_batch] = updates[action.stage]
        return found

    @cached_property
    def version_read(self) -> Mapping[tuple[int, int], int]:
        """The version of the weights that each (stage, micro-batch) reads, in its forward at least (`stashes`): the
        number of updates that made it."""
        return {**self.newest_version, **{(stage, m): version for stage, m, version in self.versions}}

    @cached_property
    def divides_head(self) -> bool:
        """Whether each stage has a part of the head (S)."""
        return LOGITS in self.kinds

    def sources(self, action: Action) -> tuple[Action, ...]:
        """The actions of other stages whose messages this one receives."""
        if action not in self._sources:
            source = action.source(self.num_stages, self.split)
            of_head = head_sources(action, self.num_stages) if self.divides_head else ()
            far = self._far_sources.get(action, ()) if self.placement.is_dealt else ()
            self._sources[action] = (*of_head, *far, *(() if source is None else (source,)))
        return self._sources[action]

    @cached_property
    def _sources(self) -> dict[Action, tuple[Action, ...]]:
        return {}

    def consumers(self, action: Action) -> tuple[Action, ...]:
        """The actions of other stages that receive this one's message."""
        consumer = action.consumer(self.num_stages, self.split)
        of_head = head_consumers(action, self.num_stages, self.split) if self.divides_head else ()
        far = self._far_consumers.get(action, ()) if self.placement.is_dealt else ()
        # In evaluation there is no T.
        of_head = tuple(one for one in of_head if one.kind in self.kinds)
        return (*of_head, *far, *(() if consumer is None else (consumer,)))

    @cached_property
    def _far_sources(self) -> Mapping[Action, tuple[Action, ...]]:
        """Where stages are dealt, of actions on other workers than those before them on the stage: whose messages they
        receive beside those of their neighbours. A recomputation receives the inputs of its forward; the first backward
        of a visit waits for the D of the visit before, which leaves the gradients of the stage's weights."""
        found: dict[Action, tuple[Action, ...]] = {}
        for action, worker in self._worker_of.items():
            if action.kind.receives is Held.INPUT and not action.kind.sends and action.stage:
                forward = replace(action, kind=FORWARD)
                if self._worker_of.get(forward, worker) != worker:
                    found[action] = (replace(forward, stage=action.stage - 1),)
        of_stages: dict[tuple[int, tuple[int, ...]], list[tuple[int, int, Action, Action | None]]] = {}
        for worker in range(len(self.actions)):
            crew = self.placement.crew_of(worker)
            for visit in self.visits(worker):
                if backwards := [one for one in visit.actions if one.kind.completes_micro_batch]:
                    first = min(one.micro_batch or 0 for one in backwards)
                    own = of_stages.setdefault((visit.load.stage, crew), [])
                    own.append((first, worker, backwards[0], visit.drop))
        for visits in of_stages.values():
            visits.sort(key=lambda one: one[:2])
            for (_, before, _, drop), (_, worker, backward, _) in pairwise(visits):
                if before != worker and drop is not None:
                    found[backward] = (*found.get(backward, ()), drop)
        return found

    @cached_property
    def _far_consumers(self) -> Mapping[Action, tuple[Action, ...]]:
        found: dict[Action, tuple[Action, ...]] = {}
        for consumer, sources in self._far_sources.items():
            for source in sources:
                found[source] = (*found.get(source, ()), consumer)
        return found

    def concerned(self, process: int, action: Action, kinds: Iterable[ActionKind]) -> Iterator[Action]:
        """Yield the actions of some kinds on the stage and micro-batch of an action that a worker runs; and on its step
        where one of the two kinds concerns a step. The table need not have them."""
        stage, micro_batch = action.stage, action.micro_batch
        for kind in kinds:
            if kind.is_of_visit or action.kind.is_of_visit:
                yield from self._of_visit(process, action, kind)
            elif kind.is_of_mini_batch:
                yield Action(kind, stage, step=action.step if micro_batch is None else self.step_of[micro_batch])
            elif micro_batch is not None:
                yield Action(kind, stage, micro_batch)
            else:
                own = self.micro_batches_of(process, stage)
                yield from (Action(kind, stage, one) for one in own if self.step_of[one] == action.step)

    def _of_visit(self, process: int, action: Action, kind: ActionKind) -> Iterator[Action]:
        """Yield the actions of a kind that concern an action of the same visit; of an L the D that makes room for it.
        One of the two kinds is L or D."""
        visit = self._visit_of[process].get(action)
        if visit is None:
            return
        if action.kind == LOAD:
            if kind == DROP and visit.after is not None:
                yield visit.after
        elif kind == LOAD:
            yield visit.load
        elif kind == DROP and visit.drop is not None:
            yield visit.drop
        else:
            yield from (one for one in visit.actions if one.kind == kind)

    def visits(self, process: int) -> tuple[Visit, ...]:
        """The visits of weights in the row of a worker."""
        return tuple(dict.fromkeys(self._visit_of[process].values()))

    @cached_property
    def _visit_of(self) -> tuple[Mapping[Action, Visit], ...]:
        """For each worker, the visit of each action that has one."""
        every = []
        for worker, row in enumerate(self.actions):
            visits = visits_of(row, self.placement, worker) if self.kinds & {LOAD, DROP} else []
            every.append({one: v for v in visits for one in (v.load, *v.actions, v.drop) if one is not None})
        return tuple(every)

    @cached_property
    def kinds(self) -> frozenset[ActionKind]:
        """Those that the table has."""
        return frozenset(action.kind for row in self.actions for action in row)

    def awaited_by(self, kind: ActionKind) -> tuple[ActionKind, ...]:
        """`kinds.awaited_by` of the kinds that the table has."""
        if kind not in self._awaited:
            self._awaited[kind] = tuple(one for one in awaited_by(kind) if one in self.kinds)
        return self._awaited[kind]

    @cached_property
    def _awaited(self) -> dict[ActionKind, tuple[ActionKind, ...]]:
        return {}

    def keeps_graph(self, stage: int, micro_batch: int) -> bool:
        """Whether this forward keeps its autograd graph: a backward follows, and no recomputation lies between."""
        return (stage, micro_batch) in self._graph_keeping_forwards

    @cached_property
    def _graph_keeping_forwards(self) -> frozenset[tuple[int, int | None]]:
        maker: dict[tuple[int, int | None], ActionKind] = {}
        keeping: set[tuple[int, int | None]] = set()
        for actions in self.actions:
            for action in actions:
                where = (action.stage, action.micro_batch)
                if action.kind.makes is Held.GRAPH:
                    maker[where] = action.kind
                elif Held.GRAPH in action.kind.frees and maker.get(where) == FORWARD:
                    keeping.add(where)
        return frozenset(keeping)

    def num_recomputations(self, stage: int) -> int:
        """How many micro-batches a stage recomputes, on all its replicas together."""
        return sum(a.stage == stage and a.kind == RECOMPUTE for row in self.actions for a in row)

    def worker_of(self, action: Action) -> int:
        """The worker in whose row the action of a micro-batch stands: it sends and receives the action's messages.
        Where stages are dealt, that of an L or a D too."""
        return self._worker_of[action]

    @cached_property
    def _worker_of(self) -> Mapping[Action, int]:
        rows, is_dealt = enumerate(self.actions), self.placement.is_dealt
        return {
            action: worker
            for worker, row in rows
            for action in row
            if action.micro_batch is not None or (is_dealt and action.kind.is_of_visit)
        }

    def is_moving(self, action: Action) -> bool:
        """Of a forward or recomputation of a dealt stage: whether the other one, and the backward, are on another
        worker."""
        if not self.placement.is_dealt or action.micro_batch is None or not self.is_training:
            return False
        if action.kind != FORWARD and (action.kind.sends or action.kind.receives is not Held.INPUT):
            return False
        forward, recompute = replace(action, kind=FORWARD), replace(action, kind=RECOMPUTE)
        return self._worker_of[forward] != self._worker_of.get(recompute, self._worker_of[forward])

    def micro_batches_of(self, process: int, stage: int | None = None) -> tuple[int, ...]:
        """The micro-batches that a worker runs on a stage, or on any of its stages, ascending."""
        return self._micro_batches_of.get((process, stage), ())

    @cached_property
    def _micro_batches_of(self) -> Mapping[tuple[int, int | None], tuple[int, ...]]:
        found: dict[tuple[int, int | None], set[int]] = {}
        for action, worker in self._worker_of.items():
            if action.micro_batch is not None:
                for stage in (action.stage, None):
                    found.setdefault((worker, stage), set()).add(action.micro_batch)
        return {where: tuple(sorted(own)) for where, own in found.items()}

    def of_first(self, num_micro_batches: int) -> Schedule:
        """The same table for its first n micro-batches: the actions of the others are left out.

        A valid table stays valid, for an action needs no other micro-batch's actions: run what is left in the order in
        which the whole table can be run, and each action finds its message where it did. A replica without a
        micro-batch keeps its G and U, for the others reduce with it.

        Raises:
            ScheduleError: the table has fewer micro-batches, or none is asked for, or it is asynchronous.
        """
        if self.is_asynchronous:
            raise ScheduleError(
                f"the table {self.name!r} is asynchronous: build one with the steps that are asked for."
            )
        if not 1 <= num_micro_batches <= self.num_micro_batches:
            raise ScheduleError(
                f"a step has {num_micro_batches} micro-batches and the table {self.name!r} {self.num_micro_batches}; a "
                "table has num_micro_batches times the mini-batches that a step accumulates: write it so."
            )
        if num_micro_batches == self.num_micro_batches:
            return self
        kept = tuple(
            tuple(a for a in actions if a.micro_batch is None or a.micro_batch < num_micro_batches)
            for actions in self.actions
        )
        return replace(self, num_micro_batches=num_micro_batches, actions=kept)

    def text(self) -> str:
        """The text form shown at the top of this module; `from_text` reads it back exactly."""
        lines = [
            f"table: {TEXT_VERSION}",
            f"schedule: {self.name}",
            f"num_stages: {self.num_stages}",
            f"num_micro_batches: {self.num_micro_batches}",
            f"placement: {self.placement}",
        ]
        if self.chunks > 1:
            lines.append(f"chunks: {self.chunks}")
        if self.placement.is_dealt:
            lines.append("dealt: yes")
        if self.steps is not None:
            lines.append(f"steps: {' '.join(map(str, self.steps))}")
        if not self.stashes:
            lines.append("stashes: no")
        if self.placement.devices is not None:
            lines.append(f"devices: {' '.join(self.placement.devices)}")
        named = {(stage, micro_batch): f"@{version}" for stage, micro_batch, version in self.versions}
        for process, actions in enumerate(self.actions):
            words = [
                f"{one}{named.get((one.stage, one.micro_batch or 0), '') if one.kind == FORWARD else ''}"
                for one in actions
            ]
            lines.append(f"process {process}: {' '.join(words)}".rstrip())
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse the text form. Its lines are in the order of `text`; blank lines and spaces between words do not
        matter. It is not checked whether the table can be run.

        Raises:
            ScheduleError: begins with the number of the line that is wrong, or says which one is missing.
        """
        header: dict[str, str] = {}
        actions: list[tuple[Action, ...]] = []
        versions: set[tuple[int, int, int]] = set()
        places: dict[str, int] = {}
        num_actions = 0
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            key, colon, value = (part.strip() for part in line.partition(":"))
            try:
                expected = _expected(header, len(actions))
                if key not in expected or not colon:
                    raise ScheduleError(
                        f"found {_shown(line)}, expected a line that starts with "
                        f"{' or '.join(f'{name}:' for name in expected)}{nearest(key, expected)}"
                    )
                if key.startswith("process "):
                    words = value.split()
                    num_actions += len(words)
                    if num_actions > MOST_ACTIONS:
                        raise ScheduleError(f"the table has more than {MOST_ACTIONS} actions; let it have fewer.")
                    actions.append(tuple(_parse(word, versions) for word in words))
                else:
                    header[key] = value
                    _check_version(header)
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error}", key) from None
            places[key] = number
        if missing := [key for key in _HEADER_KEYS if key not in header]:
            raise ScheduleError(f"the line '{missing[0]}:' is missing; a table has it after the lines above it.")

        def fail(key: str, expected: str) -> NoReturn:
            raise ScheduleError(
                f"line {places[key]}: {key}: found {_shown(header[key])}, expected {expected} (version {TEXT_VERSION} "
                "of the text has no more).",
                key,
            )

        def read(key: str) -> int:
            if (number := parse_number(header[key])) is None:
                fail(key, "one number")
            return number

        def read_workers() -> list[tuple[int, ...]]:
            every = []
            for word in header["placement"].split():
                own = [parse_number(one) for one in word.split(",")]
                every.append(tuple(number for number in own if number is not None))
                if len(every[-1]) < len(own):
                    fail(
                        "placement", "one process for each stage, as in 0 0 1, or its replicas with commas, as in 0,1 2"
                    )
            return every

        def read_steps() -> tuple[int, ...] | None:
            if "steps" not in header:
                return None
            sizes = [parse_number(word) for word in header["steps"].split()]
            if None in sizes or not sizes:
                fail("steps", "the number of micro-batches of each step, as in 2 2 2")
            return tuple(size for size in sizes if size is not None)

        num_stages, num_micro_batches, steps = read("num_stages"), read("num_micro_batches"), read_steps()
        if header.get("stashes", "no") != "no":
            fail("stashes", "no, or no such line")
        if header.get("dealt", "yes") != "yes":
            fail("dealt", "yes, or no such line")
        devices = tuple(header["devices"].split()) if "devices" in header else None
        chunks = read("chunks") if "chunks" in header else 1
        try:
            placement = Placement(read_workers(), devices, chunks, is_dealt="dealt" in header)
        except ScheduleError as error:
            raise error if error.line else ScheduleError(f"line {places['placement']}: {error}", "placement") from None
        try:
            return cls(
                header["schedule"],
                num_stages,
                num_micro_batches,
                placement,
                tuple(actions),
                steps,
                frozenset(versions),
                stashes="stashes" not in header,
            )
        except ScheduleError as error:
            raise ScheduleError(f"line {places['schedule']}: {error}", "schedule") from None


def _parse(word: str, versions: set[tuple[int, int, int]]) -> Action:
    """An action; the version that a forward names is added to `versions`."""
    text, at, number = word.partition("@")
    action = Action.parse(text)
    if not at:
        return action
    version = parse_number(number)
    if version is None or action.kind != FORWARD or action.micro_batch is None:
        raise ScheduleError(
            f"{word!r}: a forward alone names the version of the weights that its micro-batch reads, as in 2F7@3."
        )
    versions.add((action.stage, action.micro_batch, version))
    return action


def _expected(header: dict[str, str], num_processes: int) -> list[str]:
    """How the next line of a table may begin."""
    process = f"process {num_processes}"
    if num_processes:
        return [process]
    if missing := [key for key in _HEADER_KEYS if key not in header]:
        return missing[:1]
    first = max((place for place, key in enumerate(_OPTIONAL_KEYS, 1) if key in header), default=0)
    return [*_OPTIONAL_KEYS[first:], process]


def _check_version(header: dict[str, str]) -> None:
    versions = [str(version) for version in range(1, TEXT_VERSION + 1)]
    if header["table"] not in versions:
        raise ScheduleError(
            f"the table's text is of version {_shown(header['table'])}, and this version of hf_gpipe reads versions "
            f"{', '.join(versions[:-1])} and {versions[-1]}; write table: {TEXT_VERSION}, and what that version has."
        )


def _shown(text: str) -> str:
    """A line in a message."""
    text = text.strip()
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
