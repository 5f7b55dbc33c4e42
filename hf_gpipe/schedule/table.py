"""The schedule table: for every worker, the ordered list of actions that it runs in one step. A worker is a process.

A table is plain data. The same object is validated, simulated, drawn and executed, and it has a text form
(`hf_gpipe.schedule.text_form`) that can be read, compared and edited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

from hf_gpipe.errors import ScheduleError
from hf_gpipe.schedule.actions import Action, gradient_action
from hf_gpipe.schedule.kinds import (
    FORWARD,
    INPUT,
    RECOMPUTE,
    ActionKind,
    Held,
    Resource,
    awaited_by,
)
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.text_form import read_text, write_text


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
    """The number of micro-batches of each step of a window, whose stages update their weights after each step by
    themselves. None: the table has one step, which all stages end together."""
    versions: frozenset[tuple[int, int, int]] = frozenset()
    """(stage, micro-batch, version) of those that read another version of the weights than the newest."""
    stashes: bool = True
    """Whether a version that is still to be read is kept when an update replaces it. False, of a window:
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
    def group_size(self) -> int:
        """How many consecutive micro-batches depend on each other (`hf_gpipe.schedule.groups`)."""
        return self.placement.group_size

    def before_in_group(self, action: Action) -> Action | None:
        """The action on another member of the group that comes before this one on the same stage; None: there is
        none."""
        if not action.kind.before_in_group or action.micro_batch is None:
            return None
        other = action.micro_batch + action.kind.before_in_group
        if other < 0 or other // self.group_size != action.micro_batch // self.group_size:
            return None
        if action.kind.takes_gradient:
            return gradient_action(action.stage, other, self.split)
        return Action(action.kind, action.stage, other)

    @property
    def is_window(self) -> bool:
        """Whether it has several steps, after each of which each stage updates its weights by itself."""
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
        versions: dict[tuple[int, int], int] = {}
        for actions in self.actions:
            updates = [0] * self.num_stages
            for action in actions:
                if action.kind.changes_weights:
                    updates[action.stage] += 1
                elif action.kind == FORWARD and action.micro_batch is not None:
                    versions[action.stage, action.micro_batch] = updates[action.stage]
        return versions

    @cached_property
    def version_read(self) -> Mapping[tuple[int, int], int]:
        """The version of the weights that each (stage, micro-batch) reads, in its forward at least (`stashes`): the
        number of updates that made it."""
        return {**self.newest_version, **{(stage, m): version for stage, m, version in self.versions}}

    @cached_property
    def has_turns(self) -> bool:
        """Whether it has actions between the way down of a micro-batch and its way up (`ActionKind.turn`)."""
        return any(kind.turn for kind in self.kinds)

    @cached_property
    def _further_sources(self) -> tuple[Callable[[Action, int], tuple[Action, ...]], ...]:
        return tuple(kind.sources for kind in self.kinds if kind.sources is not None)

    def sources(self, action: Action) -> tuple[Action, ...]:
        """The actions of other stages whose messages this one receives."""
        if action not in self._sources:
            source = action.source(self.num_stages, self.split)
            others = (other for sources in self._further_sources for other in sources(action, self.num_stages))
            self._sources[action] = (
                *others,
                *self._links.get(action, ()),
                *(() if source is None else (source,)),
            )
        return self._sources[action]

    @cached_property
    def _sources(self) -> dict[Action, tuple[Action, ...]]:
        return {}

    def consumers(self, action: Action) -> tuple[Action, ...]:
        """The actions of other stages that receive this one's message."""
        return self._consumers.get(action, ())

    @cached_property
    def _consumers(self) -> Mapping[Action, tuple[Action, ...]]:
        consumers: dict[Action, tuple[Action, ...]] = {}
        for consumer in (action for row in self.actions for action in row):
            for source in self.sources(consumer):
                consumers[source] = (*consumers.get(source, ()), consumer)
        return consumers

    @cached_property
    def _links(self) -> Mapping[Action, tuple[Action, ...]]:
        """The actions from other workers whose messages an action receives beside those of its neighbours
        (`ActionKind.links`). A recomputation receives the inputs of its forward, where that is on another worker."""
        links: dict[Action, tuple[Action, ...]] = {}
        for action, worker in self._worker_of.items() if self.placement.is_shared else ():
            if action.kind.receives is Held.INPUT and not action.kind.sends and action.stage:
                forward = replace(action, kind=FORWARD)
                if self._worker_of.get(forward, worker) != worker:
                    links[action] = (replace(forward, stage=action.stage - 1),)
        for kind in self.kinds:
            for action, sources in {} if kind.links is None else kind.links(self).items():
                links[action] = (*links.get(action, ()), *sources)
        return links

    def concerned(self, process: int, action: Action, kinds: Iterable[ActionKind]) -> Iterator[Action]:
        """Yield the actions of some kinds on the stage and micro-batch of an action that a worker runs; and on its step
        where one of the two kinds concerns a step. The table need not have them."""
        stage, micro_batch = action.stage, action.micro_batch
        for kind in kinds:
            if (concerned := kind.concerned or action.kind.concerned) is not None:
                yield from concerned(self, process, action, kind)
            elif kind.is_of_mini_batch:
                yield Action(kind, stage, step=action.step if micro_batch is None else self.step_of[micro_batch])
            elif micro_batch is not None:
                yield Action(kind, stage, micro_batch)
            else:
                own = self.micro_batches_of(process, stage)
                yield from (Action(kind, stage, m) for m in own if self.step_of[m] == action.step)

    def does_nothing(self, process: int, action: Action) -> bool:
        """Whether an action of a worker has nothing to do (`ActionKind.does_nothing`)."""
        kind = action.kind
        return kind.does_nothing is not None and kind.does_nothing(self, process, action)

    @cached_property
    def kinds(self) -> frozenset[ActionKind]:
        """The kinds of actions that the table has."""
        return frozenset(action.kind for row in self.actions for action in row)

    def awaited_by(self, kind: ActionKind) -> tuple[ActionKind, ...]:
        """`kinds.awaited_by` of the kinds that the table has."""
        if kind not in self._awaited:
            self._awaited[kind] = tuple(need for need in awaited_by(kind) if need in self.kinds)
        return self._awaited[kind]

    @cached_property
    def _awaited(self) -> dict[ActionKind, tuple[ActionKind, ...]]:
        return {}

    def keeps_graph(self, stage: int, micro_batch: int) -> bool:
        """Whether this forward keeps its autograd graph: a backward follows, and no recomputation lies between."""
        return (stage, micro_batch) in self._graph_keeping_forwards

    def graphs_made(self, action: Action) -> int:
        """1 for an action that makes an autograd graph, -1 for one that uses it up, 0 for any other."""
        if Held.GRAPH in action.kind.frees:
            return -1
        if action.kind.makes is not Held.GRAPH or action.micro_batch is None:
            return 0
        return int(not action.kind.sends or self.keeps_graph(action.stage, action.micro_batch))

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

    def has(self, action: Action) -> bool:
        """Whether an action of a micro-batch stands in the table."""
        return action in self._worker_of

    def num_actions(self, stage: int, kind: ActionKind) -> int:
        """How many actions of a kind a stage has, on all its replicas together."""
        return self._num_actions[stage, kind]

    @cached_property
    def _num_actions(self) -> Counter[tuple[int, ActionKind]]:
        return Counter((action.stage, action.kind) for row in self.actions for action in row)

    def worker_of(self, action: Action) -> int:
        """The worker in whose row the action of a micro-batch stands: it sends and receives the action's messages.
        Where stages are shared, that of an action that is numbered or runs on the host too."""
        return self._worker_of[action]

    @cached_property
    def _worker_of(self) -> Mapping[Action, int]:
        rows, is_shared = enumerate(self.actions), self.placement.is_shared

        def is_single(kind: ActionKind) -> bool:
            return kind.is_numbered or kind.resource is Resource.HOST

        return {
            action: worker
            for worker, row in rows
            for action in row
            if action.micro_batch is not None or (is_shared and is_single(action.kind))
        }

    def is_moving(self, action: Action) -> bool:
        """Whether the forward of a micro-batch is on another worker than its recomputation and its backward, where the
        action is one of the first two."""
        if not self.placement.is_shared or action.micro_batch is None or not self.is_training:
            return False
        if action.kind != FORWARD and (action.kind.sends or action.kind.receives is not Held.INPUT):
            return False
        forward, recompute = replace(action, kind=FORWARD), replace(action, kind=RECOMPUTE)
        return self._worker_of[forward] != self._worker_of.get(recompute, self._worker_of[forward])

    def micro_batches_of(self, process: int, stage: int) -> tuple[int, ...]:
        """The micro-batches that a worker runs on a stage, ascending."""
        return self._micro_batches_of.get((process, stage), ())

    @cached_property
    def _micro_batches_of(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        micro_batches: dict[tuple[int, int], set[int]] = {}
        for action, worker in self._worker_of.items():
            if action.micro_batch is not None:
                micro_batches.setdefault((worker, action.stage), set()).add(action.micro_batch)
        return {where: tuple(sorted(own)) for where, own in micro_batches.items()}

    def first(self, num_micro_batches: int) -> Schedule:
        """The table of the first n micro-batches, without the actions of the others.

        A valid table stays valid, for an action needs no other micro-batch's actions: run what is left in the order in
        which the whole table can be run, and each action finds its message where it did. A replica without a
        micro-batch keeps its G and U, for the others reduce with it.

        Raises:
            ScheduleError: the table has fewer micro-batches, or none is asked for, or it is a window.
        """
        if self.is_window:
            raise ScheduleError(
                f"the table {self.name!r} has several steps: build one with the steps that are asked for."
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
        """The text form; `from_text` reads it back exactly."""
        return write_text(*(getattr(self, field.name) for field in fields(self)))

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Read the text form. It is not checked whether the table can be run.

        Raises:
            ScheduleError: begins with the number of the line that is wrong, or says which one is missing.
        """
        return read_text(text, cls)
