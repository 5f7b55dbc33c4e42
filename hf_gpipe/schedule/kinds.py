"""The kinds of actions: one record for each, which checks, messages, memory, time, pictures and the executor read.

For stage s and micro-batch m:

    F  runs the stage and sends its outputs to stage s+1
    R  runs the forward again with gradients. It does not need the incoming gradient, so a worker may run it while it
       would otherwise wait. On another worker than its F it receives the inputs too, from F of stage s-1
    B  takes the gradient that B or I of stage s+1 sent (the last stage starts from its own loss), adds to the gradients
       of the weights and sends the gradient of the stage's inputs
    I  does what B does, but leaves the gradients of the weights to W: both are the backward in two parts (zero bubble,
       arXiv 2401.10241, section 2)
    W  adds to the gradients of the weights what I has left
    G  sums the stage's gradients of a step over its replicas. It is a collective, which begins when all replicas have
       reached it and runs while they go on. Only a stage with several replicas has G, once on each replica for each
       step
    U  updates the stage's weights at the end of a step, once on each replica

`add_kind` adds another kind; `hf_gpipe.runtime.performing.add_kind` also says how the executor performs it. Modes add
kinds of their own (`hf_gpipe.modes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeAlias

from hf_gpipe.errors import ScheduleError

Fault: TypeAlias = tuple[str, int | str]
"""A problem of a table, and the process, or the key of the line, that has it."""


class Resource(StrEnum):
    """The part of a worker that an action occupies. A worker starts its actions in order, and each resource runs one
    action at a time."""

    COMPUTE = "compute"
    """The device of the stage. Its worker starts the next action when this one has started."""
    COPY_IN = "copy in"
    """The device's engine for copies from the host. The action goes on beside the worker's next ones, as the following
    three, and an action that needs it waits for it."""
    COPY_OUT = "copy out"
    """The device's engine for copies to the host."""
    HOST = "host"
    """The CPU and its memory. The worker goes on at once; the action itself waits for what it needs."""
    LINK = "link"
    """The worker's connection to its stage's replicas. Messages between stages travel beside it."""


class Held(StrEnum):
    """Things that a stage holds for a while; kinds of modes have further ones, as text."""

    MICRO_BATCH = "micro-batch"
    """The micro-batch itself, from its first to its last action, both included."""
    INPUT = "input"
    """The tensors received from the stage before."""
    GRAPH = "graph"
    """The activations that the graph of a micro-batch saves."""
    GRADIENT = "gradient"
    """The gradient received from the stage after, while it waits for its backward."""
    DEFERRED = "deferred"
    """The tensors that W needs: inputs and output gradients of linear layers, from the end of I to the end of W."""
    FORWARD_ONLY = "forward only"
    """The working memory of a forward without a graph, while it runs."""
    FORWARD = "forward"
    """The working memory of a forward or a recomputation that makes a graph."""
    BACKWARD = "backward"
    """The working memory of B or I."""
    WEIGHT = "weight gradient"
    """The working memory of W."""
    FIRST_BACKWARD = "first backward"
    """The extra memory of the stage's first B or W, which makes the gradients of the weights."""
    WEIGHT_GRADIENTS = "gradients of weights"
    """The gradients of the stage's weights, from the end of the first B or W on."""
    LEAVING_GRADIENTS = "leaving gradients"
    """Gradients of weights that an action copies to the host, until the next copy of gradients on the device begins."""

    ROW = "row"
    """The values that the micro-batches of a group leave to each other: from the first F of the group to the end of
    its last B or I."""
    ROW_GRADIENTS = "gradients of a row"
    """The gradients of these tensors, from the group's first B or I on."""

    __hash__ = str.__hash__


@dataclass(frozen=True, eq=False, repr=False)
class ActionKind(str):
    """The kind of work that a worker does with a stage. It is its letter: it compares, hashes and travels as text."""

    letter: str
    word: str
    """The kind in full, in lower case."""
    price: tuple[tuple[str, Fraction | int], ...] = ()
    """The time of an action, as (field of `Costs`, share). The first given field counts, else `Costs.others`."""
    part: str = "forward"
    """The part of a step's time that it belongs to: "forward", "recompute", "backward" or "update"."""
    colour: str = "#999999"
    label_colour: str = "black"
    needs: tuple[ActionKind, ...] = ()
    """Kinds that come before it, where the table has them: of the same stage and micro-batch, or step."""
    needed_by: tuple[ActionKind, ...] = ()
    """Kinds that it comes before. So a new kind need not change another record."""
    before_in_group: int = 0
    """The member of a group whose action of the same kind comes first on the stage. -1: the one before, whose forward
    leaves tensors; 1: the one after, whose backward leaves the gradients of such tensors; 0: none."""
    after_update: bool = False
    """Whether it comes after U of the step before, at which the gradients of that step are dropped."""
    way: int = -1
    """1 for an action on the way of its micro-batch down the stages, -1 on the way up again, 0 beside it."""
    sends: bool = False
    """Whether it waits for the message that the stage before it on that way sends, and sends one on."""
    turn: int = 0
    """The number of the action's turn between its micro-batch's way down and its way up, counted from 1; 0: it has
    none."""
    sources: Callable[[Any, int], tuple[Any, ...]] | None = None
    """(action, K) -> the actions of other stages whose messages an action receives beside those of its neighbours, in a
    table that has the kind."""
    evaluation: str | None = None
    """The schedule of evaluations beside a table that has the kind; None: forward_only."""
    fills_idle: bool = False
    """Whether it may run while the gradient of its micro-batch is still on its way."""
    is_of_mini_batch: bool = False
    """Whether it concerns a whole step, and so has no micro-batch."""
    is_numbered: bool = False
    """Whether the number in its text counts the stage's actions of its kind, and not the steps of the table."""
    concerned: Callable[[Any, int, Any, Any], Iterator[Any]] | None = None
    """(table, process, action, kind) -> the actions of a kind that concern an action, where one of the two is of this
    kind. None: those of the same micro-batch, or of the same step."""
    links: Callable[[Any], Mapping[Any, tuple[Any, ...]]] | None = None
    """(table) -> for each action that receives messages beside those of `sources`, the actions that send them."""
    is_signal: bool = False
    """Whether its message only says that it is done: it takes no time, and is not sent within a process."""
    carries_gradients: bool = False
    """Whether it copies gradients to the host. Actions that need it wait only until the device has come to it."""
    does_nothing: Callable[[Any, int, Any], bool] | None = None
    """(table, process, action) -> whether there is nothing to do, so that it takes no time; None: never."""
    is_paced: bool = False
    """Whether the device goes on after it only once the one before it there has ended, so that one is under way."""
    is_collective: bool = False
    """Whether all replicas of the stage do it together; a stage without replicas has none."""
    rule: str | None = None
    """The words of the error where a table lacks the kind. None: a table need not have it."""
    is_optional: bool = False
    """Whether a table may do without it. Where a table has one of the kinds that are optional, it has all of them."""
    in_training_only: bool = True
    part_of: ActionKind | None = None
    """The kind in place of which it stands, together with the others that name the same one."""
    resource: Resource = Resource.COMPUTE
    ticks: Fraction | int = 0
    """How long it takes on a clock with equal stages."""
    held_ticks: Fraction | int | None = None
    """How long it takes there where things held are counted; None: `ticks`."""
    copies: str = ""
    """The things that it copies, in words, for what limits a plan; empty: it copies nothing."""
    recompute: str | None = None
    """The value of `recompute` of a stage that has such actions in a table's file; None: they say nothing of it."""
    receives: str | None = None
    """The thing that its message is while it waits, until the action begins or another action frees it."""
    makes: str | None = None
    """The thing that the stage holds from the end of this action to the end of the action that frees it. Where several
    actions make it before that one, the last does."""
    frees: tuple[str, ...] = ()
    working: str | None = None
    """The memory that it takes while it runs."""
    working_alone: str | None = None
    """The working memory where it makes nothing, because nothing frees that thing or a later action makes it."""
    completes_micro_batch: bool = False
    """Whether the gradients of the weights have the micro-batch's part after it."""
    reads_weights: bool = True
    changes_weights: bool = False

    def __new__(cls, letter: str, *rest: object, **fields: object) -> ActionKind:
        return str.__new__(cls, letter)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return kind_of, (self.letter,)

    @property
    def takes_gradient(self) -> bool:
        """Whether it takes the gradient of the stage's outputs, uses up the graph and sends a gradient: B or I."""
        return self.sends and self.way < 0


#: All kinds by letter, in the order of legends.
KINDS: dict[str, ActionKind] = {}


def add_kind(kind: ActionKind) -> ActionKind:
    """Add a kind to those that tables have; returns it.

    Raises:
        ScheduleError: the letter is not one capital letter, or another kind has it.
    """
    if len(kind) != 1 or not "A" <= kind <= "Z" or kind in KINDS:
        raise ScheduleError(
            f"a kind of action {kind.letter!r}: give it a capital letter other than {', '.join(KINDS)}."
        )
    KINDS[kind] = kind
    needs_of.cache_clear()
    awaited_by.cache_clear()
    return kind


def kind_of(letter: str) -> ActionKind:
    """The kind with a letter. Raises ScheduleError if there is none."""
    if letter not in KINDS:
        raise ScheduleError(f"{letter!r} is not a kind of action; use one of {', '.join(KINDS)}.")
    return KINDS[letter]


@functools.cache
def needs_of(kind: ActionKind) -> tuple[ActionKind, ...]:
    """All kinds that come before a kind: those that it needs, and those that are needed by it."""
    return (*kind.needs, *(other for other in KINDS.values() if kind in other.needed_by))


@functools.cache
def awaited_by(kind: ActionKind) -> tuple[ActionKind, ...]:
    """The needed kinds that go on beside a worker's actions, so that an action on another resource waits for them."""
    return tuple(need for need in needs_of(kind) if need.resource not in (Resource.COMPUTE, kind.resource))


_ONCE, _PARTS = "it must occur exactly once.", "a backward is one B, or one I and one W."
_REDUCED = "every replica of a stage reduces its gradients once in a step."
_UPDATED = "a training step updates each stage once."
_HALF, _USED = ("backward_seconds", Fraction(1, 2)), (Held.INPUT, Held.GRAPH)

# The records as a table. F frees its input unless a backward comes, which needs it longer.
# fmt: off
FORWARD = add_kind(ActionKind(
    "F", "forward", (("forward_seconds", 1),), "forward", "#5b9bd5", ticks=1,
    way=1, sends=True, before_in_group=-1, rule=_ONCE, in_training_only=False,
    receives=Held.INPUT, makes=Held.GRAPH, frees=(Held.INPUT,), working=Held.FORWARD, working_alone=Held.FORWARD_ONLY))
RECOMPUTE = add_kind(ActionKind(
    "R", "recompute", (("recompute_seconds", 1), ("forward_seconds", 1)), "recompute", "#f2c14e", ticks=1,
    needs=(FORWARD,), fills_idle=True, receives=Held.INPUT, makes=Held.GRAPH, working=Held.FORWARD))
BACKWARD = add_kind(ActionKind(
    "B", "backward", (("backward_seconds", 1),), "backward", "#2a7f62", "white", ticks=2,
    needs=(FORWARD, RECOMPUTE), before_in_group=1, after_update=True, sends=True, rule=_ONCE,
    completes_micro_batch=True, receives=Held.GRADIENT, frees=_USED, working=Held.BACKWARD))
INPUT = add_kind(ActionKind(
    "I", "input gradient", (("input_seconds", 1), _HALF), "backward", "#5fb49c", ticks=1,
    needs=(FORWARD, RECOMPUTE), before_in_group=1, after_update=True, sends=True, rule=_PARTS, part_of=BACKWARD,
    receives=Held.GRADIENT, makes=Held.DEFERRED, frees=_USED, working=Held.BACKWARD))
WEIGHT = add_kind(ActionKind(
    "W", "weight gradient", (("weight_seconds", 1), _HALF), "backward", "#1f4e3d", "white", ticks=1,
    needs=(INPUT,), after_update=True, way=0, rule=_PARTS, part_of=BACKWARD, completes_micro_batch=True,
    frees=(Held.DEFERRED,), working=Held.WEIGHT))
REDUCE = add_kind(ActionKind(
    "G", "reduce", (("reduce_seconds", 1),), colour="#c8553d", label_colour="white", resource=Resource.LINK,
    needs=(BACKWARD, WEIGHT), after_update=True, is_of_mini_batch=True, is_collective=True, rule=_REDUCED,
    reads_weights=False))
UPDATE = add_kind(ActionKind(
    "U", "update", (("update_seconds", 1),), "update", "#8e5ea2", "white",
    needs=(BACKWARD, WEIGHT, REDUCE), after_update=True, is_of_mini_batch=True, rule=_UPDATED,
    reads_weights=False, changes_weights=True))
# fmt: on
