"""The executor: interprets the table of any schedule for the stages of this process.

It works the same for every schedule. For each action it receives the message that the action needs, calls the stage,
and sends the result. Receives are started ahead (`hf_gpipe.runtime.wiring`), so messages arrive while the process
computes. Sends are waited for only at the end of the table.

Modes perform kinds of their own, and do more around the actions of others (`hf_gpipe.modes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from hf_gpipe.errors import StageError
from hf_gpipe.registry import parts_of_modes
from hf_gpipe.runtime.background import BackgroundThreads
from hf_gpipe.runtime.edges import Edges
from hf_gpipe.runtime.micro_batch import PLAIN_STEP, MicroBatch, StepOptions, on_devices
from hf_gpipe.runtime.replicas import Replicas
from hf_gpipe.runtime.step import ModeState, Planned, Rows, Step, StepResult, UpdateStage
from hf_gpipe.runtime.timing import NamedRanges, Timer, is_profiled
from hf_gpipe.runtime.wiring import Wiring
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import Resource
from hf_gpipe.schedule.table import Schedule


class Executor:
    """Runs tables on the stages of this process.

    Args:
        rows: the stages of each worker of this process, by the worker's number. There is one worker, or where stages
            are shared one for each of the process's devices.
        edges: the edges at the ends of these stages.
        replicas: adds up gradients with replicas of these stages in other processes. None: there are no such replicas.
        modes: the state of each mode, by its name. None: those of modes that are not on.
    """

    def __init__(
        self,
        rows: Rows,
        edges: Edges,
        replicas: Replicas | None = None,
        modes: Mapping[str, ModeState] | None = None,
    ) -> None:
        if modes is None:
            modes = {name: mode.State(rows) for name, mode in parts_of_modes("runtime").items()}
        of_edges = [way for edge in edges.values() for way in (edge.down, edge.up)]
        self._channels = (*of_edges, *(channel for mode in modes.values() for channel in mode.channels))
        self._rows, self._replicas, self.modes = rows, replicas, modes
        self._stages = [stage for stages in rows.values() for stage in stages.values()]
        self._devices = {stage.device for stage in self._stages}
        self._wiring = Wiring(rows, edges, modes)
        self._table: Schedule | None = None
        self._planned: list[Planned] = []
        #: The numbers of the micro-batches of these actions.
        self._indices: list[int] = []
        self._threads = BackgroundThreads(min(rows))
        self._step = partial(Step, rows, self._channels, replicas, self._threads)

    def run(
        self,
        schedule: Schedule,
        micro_batches: Sequence[MicroBatch],
        options: StepOptions = PLAIN_STEP,
        *,
        reduce: Callable[[StepResult], None] | None = None,
        update: Callable[[], None] | None = None,
        update_stage: UpdateStage | None = None,
        is_measured: bool = False,
    ) -> StepResult:
        """Run this process's part of the table once.

        Clipping, loss scaling and the decision to skip an update need the gradients of all stages. So in a table of
        one step the last U of a process updates all its stages, after everything else that it does in the step. In a
        window each U updates its own stage, and so does each H, in a thread beside the actions after it.

        Args:
            schedule: a valid table for these stages and this many micro-batches.
            micro_batches: the same on every process.
            reduce: called at the process's last U or H with the results so far, to complete gradients and loss
                together with the other processes. Its time counts as waiting.
            update: called after `reduce`. Its errors are raised unchanged.
            update_stage: called at each U of a window, in place of `reduce` and `update`; and at each H,
                before them.
            is_measured: whether to note when each action ran.

        Raises:
            StageError: an action failed; names the process, the stage, the action and the micro-batch. A pipeline of
                one process can run the next step after it, unless the table has H or several steps: then some stages
                are updated and others are not. A pipeline of several processes cannot go on.
            HfGpipeError: a step failed before, in a pipeline of several processes.
        """
        for channel in self._channels:
            channel.check()
        self.prepare(schedule)
        # Micro-batches that only other replicas run stay in CPU memory.
        shares = on_devices([micro_batches[index] for index in self._indices], self._devices)
        if self._replicas is not None and schedule.is_training:
            self._replicas.check(schedule, len(micro_batches))
        for mode in self.modes.values():
            mode.begin(options)
        timer = Timer(self._devices) if is_measured else None
        note = timer.mark if timer is not None else NamedRanges().mark if is_profiled() else _not_measured
        given = schedule, micro_batches, options, reduce, update, update_stage
        step = self._step(*given, shares, timer, self.modes)
        result = step.result
        action = None
        # The clock of a worker. Each action of its row has three phases, between four marks of the timer. A neighbour
        # may have sent the message that the action needs long before:
        #
        #     mark          mark         mark      mark
        #      |  1 receive  |  2 compute  |  3 send  |      the next action
        #           |                           |
        #           waits for a message         hands its message over, and does not wait
        try:
            for planned in self._planned:
                # 1. Receive: start the receives of coming actions, and wait for the message of this one.
                action, device = planned.action, planned.device
                self._threads.check()
                # An action of the CPU's resource runs in a background thread, which measures itself.
                mark = note if action.kind.resource is not Resource.HOST else _not_measured
                mark(action, device)
                for incoming in planned.expected:
                    incoming.channel.expect(incoming.key, incoming.shapes(micro_batches[incoming.key[0]]))
                received: dict[str, torch.Tensor] = {}
                for incoming in planned.received:
                    received |= incoming.channel.receive(incoming.key)
                    for channel, key in incoming.arrived:
                        channel.arrived(key)
                if planned.wait is not None:
                    planned.wait(step, planned)
                # 2. Compute.
                mark(action, device)
                message = planned.run(step, planned, received)
                # 3. Send.
                mark(action, device)
                step.send(planned, message)
                if message and not planned.sent:
                    result.outputs[planned.index] = message
                mark(action, device)
                # Free the tensors before the process waits for its next message.
                del received, message
            step.flush()
        except Exception as error:
            if step.is_updating:  # everything was sent and received
                raise
            with suppress(Exception):  # a consequence of `error`, which is raised below
                self._reset()
            if isinstance(error, StageError):  # from a background thread, with the place in its message
                raise
            where = f"stage {action.stage}, action {action}" if action is not None else "before the first action"
            row = row_around([planned.action for planned in self._planned], action) if action is not None else ""
            raise StageError(f"process {min(self._rows)}, {where}: {type(error).__name__}: {error}{row}") from error
        for mode in self.modes.values():
            mode.end(result)
        if timer is not None:
            result.times += timer.read()
        return result

    def prepare(self, schedule: Schedule) -> None:
        """Derive from a table, once, the actions and messages of this process.

        Raises UserError if the table splits a stage's backward into I and W and the stage cannot do that.
        """
        if schedule is self._table:
            return
        split = {number for number, _ in schedule.split}
        for stages in self._rows.values():
            for number in split & stages.keys():
                stages[number].model.defer_weight_gradients()
        self._planned = self._wiring.planned(schedule)
        self._indices = sorted({planned.index for planned in self._planned} - {-1})
        for mode in self.modes.values():
            mode.prepare(schedule)
        self._table = schedule

    def _reset(self) -> None:
        """Drop the micro-batches and messages of a failed step, so that the next step does not receive them."""
        for mode in self.modes.values():
            mode.reset()
        for stage in self._stages:
            stage.reset()
        self._threads.reset()
        for channel in self._channels:
            channel.reset()


def row_around(actions: Sequence[Action], action: Action, most: int = 4) -> str:
    """Text for an error message: the actions of a worker's row around `action`, which is marked."""
    place = actions.index(action)
    first, stop = max(place - most, 0), min(place + most + 1, len(actions))
    words = [f">{other}<" if other == action else str(other) for other in actions[first:stop]]
    before, after = "... " if first else "", " ..." if stop < len(actions) else ""
    return f" (action {place + 1} of {len(actions)} of this process: {before}{' '.join(words)}{after})"


def _not_measured(action: Action, device: torch.device) -> None:
    """Stands for `Timer.mark` in a step that is not measured."""
