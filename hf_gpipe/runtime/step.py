"""One run of a table in this process: what its actions read, wait for, send and add to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from hf_gpipe.adapters.base import Inputs
from hf_gpipe.runtime.background import BackgroundThreads
from hf_gpipe.runtime.channel import Channel, Shapes
from hf_gpipe.runtime.micro_batch import Context, MicroBatch, StepOptions
from hf_gpipe.runtime.replicas import Replicas
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.timing import ActionTime, Timer
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import Resource
from hf_gpipe.schedule.table import Schedule

Tensors: TypeAlias = dict[str, torch.Tensor]
UpdateStage = Callable[[int, int], None]
"""(stage, step of the table) -> None: updates the weights of a stage from its gradients, and drops the gradients."""


@dataclass
class StepResult:
    """The results of one run of a table in this process.

    Attributes:
        outputs: the outputs of the last stage for each micro-batch, by its number, in the order of the forwards; empty
            in the other processes.
        times: when each action ran, if that was measured.
        stash_bytes: the most memory that old versions of weights have held in this process, in bytes; 0 for a
            synchronous table.
    """

    outputs: dict[int, Tensors] = field(default_factory=dict)
    times: list[ActionTime] = field(default_factory=list)
    stash_bytes: int = 0

    @property
    def loss(self) -> torch.Tensor | None:
        """The sum of the micro-batches' losses; None in processes without the last stage."""
        # Where the last stage is shared, several devices may have some of the losses.
        losses = [output["loss"] for output in self.outputs.values()]
        losses = [loss.to(losses[0].device, non_blocking=True) for loss in losses]
        return sum(losses[1:], losses[0]) if losses else None


Rows: TypeAlias = Mapping[int, Mapping[int, Stage]]
"""For each worker of this process the stages whose actions may stand in its row, by number."""


Sent = tuple[tuple[Channel, tuple[int, int]], ...]
"""The (channel, key) of each of several messages."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message of one action, as far as the table tells it."""

    channel: Channel
    key: tuple[int, int]
    """The number of the micro-batch, and the turn of the action that sends it; together they are unique among the
    messages that are on an edge at one time."""
    shapes: Callable[[MicroBatch], Shapes]
    arrived: Sent = ()
    """For a received message, the messages of this process that must have arrived before the sender could send it."""


Run: TypeAlias = Callable[["Step", "Planned", Tensors], Tensors]
"""(step, action, tensors received) -> the tensors for the neighbouring stage, or the outputs of the last stage."""


class Performed(NamedTuple):
    """How a kind of action is performed."""

    run: Run
    wait: Callable[[Step, Planned], None] | None = None
    """Waits before an action runs, once its messages have come."""


class ModeState:
    """The state of a mode in an executor (`hf_gpipe.modes`). A mode overrides what it needs.

    Args:
        rows: the stages of each worker of this process.

    Attributes:
        channels: those that are the mode's own.
    """

    channels: Sequence[Channel] = ()

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def message(self, source: Action, consumer: Action, sender: int, receiver: int) -> Message | None:
        """The message of an action to another one, between two workers; None: it is not the mode's."""
        return None

    def wrap(self, schedule: Schedule, worker: int, action: Action, performed: Performed) -> Performed:
        """How an action of a table is performed in this mode, from how it is performed without it."""
        return performed

    def prepare(self, schedule: Schedule) -> None:
        """Called for each new table."""

    def begin(self, options: StepOptions) -> None:
        """Called before each run of a table."""

    def collect(self) -> None:
        """Called before gradients are summed, or an update reads them: wait until they are all there."""

    def end(self, result: StepResult) -> None:
        """Called after a run that has not failed."""

    def reset(self) -> None:
        """Drop what a failed run has left."""

    def using(self, stage: int) -> AbstractContextManager[object]:
        """Context manager in which a stage can run outside of a table."""
        return nullcontext()

    def next_logits(self, generator: Any, outputs: Tensors, inputs: Inputs, num_rows: int) -> torch.Tensor | None:
        """The logits of the last position (B, 1, V), on every process, where the last stage does not have them.

        Args:
            generator: the `runtime.generation.Generator` that runs the stages of this process.
            outputs: of the last stage; elsewhere {}.
            inputs: of the forward.
            num_rows: B.
        """
        return None


@dataclass(frozen=True, slots=True)
class Planned:
    """An action of this process with everything that follows from the table, derived once for all steps."""

    action: Action
    index: int
    """Number of the micro-batch; -1 for an action that concerns a whole step."""
    stage: Stage
    worker: int
    """In whose row it stands."""
    device: torch.device
    run: Run
    wait: Callable[[Step, Planned], None] | None
    expected: tuple[Message, ...]
    """The messages whose receives start just before the action, for this action and later ones."""
    received: tuple[Message, ...]
    """The messages that the action itself needs, which the loop waits for."""
    received_in_background: tuple[Message, ...]
    """The messages that the action's background thread waits for, while the loop goes on."""
    sent: tuple[Message, ...]
    """The messages in which the action's result is sent, unless the result is empty."""
    is_last: bool
    """For U or H, whether it is the process's last one; for B or W, whether its stage's G can begin in it."""
    keeps_graph: bool
    """For F, whether a backward follows without a recomputation."""
    is_moving: bool
    """Whether forward and backward of its micro-batch run on different workers, where the stage is shared."""


@dataclass(slots=True)
class Step:
    """One run of a table in this process.

    Attributes:
        rows, channels, replicas, threads: fields of the executor.
        schedule, micro_batches, options, reduce, update, update_stage: the arguments of `Executor.run`.
        shares: the micro-batches of this process on each of its devices, by their numbers.
        timer: measures the step. None: the step is not measured.
        modes: the state of each mode that has one, by its name.
        result: the result so far.
        is_updating: whether `update` runs, whose errors are raised unchanged.
    """

    rows: Rows
    channels: Sequence[Channel]
    replicas: Replicas | None
    threads: BackgroundThreads
    schedule: Schedule
    micro_batches: Sequence[MicroBatch]
    options: StepOptions
    reduce: Callable[[StepResult], None] | None
    update: Callable[[], None] | None
    update_stage: UpdateStage | None
    shares: Mapping[torch.device, Mapping[int, MicroBatch]]
    timer: Timer | None
    modes: Mapping[str, Any]
    result: StepResult = field(default_factory=StepResult)
    is_updating: bool = False

    def context(self, planned: Planned, received: Tensors) -> Context:
        """The data that an action on a micro-batch reads."""
        return Context(self.shares[planned.device][planned.index], received, self.options)

    def send(self, planned: Planned, message: Tensors) -> None:
        """Send an action's result to the stages that need it."""
        for outgoing in planned.sent:
            shapes = outgoing.shapes(self.micro_batches[outgoing.key[0]])
            if message or not shapes:  # for some micro-batches no tensor crosses the boundary
                outgoing.channel.send(outgoing.key, message, shapes)

    def send_after(self, wait: Callable[[], None], planned: Planned, message: Tensors) -> None:
        """Send an action's message in a background thread, once `wait` returns.

        If the loop waited, the worker's next action would begin late although its device is free.
        """

        def send() -> None:
            wait()
            self.send(planned, message)

        self.threads.begin(Resource.COPY_OUT, planned.action, send)

    def collect(self) -> None:
        """Wait until all gradients are where they are summed and read."""
        for mode in self.modes.values():
            mode.collect()

    def flush(self) -> None:
        """Wait until the threads are done, and all messages have been sent."""
        self.threads.finish()
        for channel in self.channels:
            channel.flush()

    def complete(self) -> None:
        """Before the update, wait until everything has been computed and sent, then call `reduce`."""
        self.flush()
        mini_batches = [micro_batch.mini_batch for micro_batch in self.micro_batches]
        for stages in self.rows.values():
            for number, stage in sorted(stages.items()):
                stage.end_step(mini_batches, None if self.replicas is None else partial(self.replicas.total, number))
        self.collect()
        if self.timer is not None:
            self.timer.synchronize()
        if self.reduce is not None:
            self.reduce(self.result)
