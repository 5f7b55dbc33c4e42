"""The visits of weights in the row of a worker, each from its L to its D. `hf_gpipe.schedule.visits` writes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import DROP, LOAD
from hf_gpipe.schedule.placement import Placement


@dataclass(frozen=True)
class Visit:
    """A visit of a stage's weights in the row of a worker.

    Attributes:
        load, drop: its first and last action; no D where it is missing in a table that was not checked.
        actions: those of micro-batches on the stage between the two.
        after: the D of the visit whose buffer it takes; None: no visit in the row had the buffer before.
    """

    load: Action
    drop: Action | None
    actions: tuple[Action, ...]
    after: Action | None

    @property
    def makes_gradients(self) -> bool:
        """Whether gradients of the weights are made in it."""
        return any(action.kind.completes_micro_batch for action in self.actions)


def visits_of(row: Sequence[Action], placement: Placement, worker: int) -> list[Visit]:
    """The visits in the row of a worker, in the order of their L.

    A device has as many buffers as it has visits at once at most. An L takes the buffer that has been free for longest.
    """
    visits: list[tuple[Action, list[Action], str | None]] = []
    ends: dict[int, Action] = {}
    open_visits: dict[int, int] = {}
    drops: defaultdict[str | None, list[Action]] = defaultdict(list)
    there, num_buffers = Counter[str | None](), Counter[str | None]()
    for action in row:
        device = placement.device_of(action.stage, worker)
        if action.kind == LOAD:
            open_visits[action.stage] = len(visits)
            visits.append((action, [], device))
            there[device] += 1
            num_buffers[device] = max(num_buffers[device], there[device])
        elif (number := open_visits.get(action.stage)) is None:
            continue
        elif action.kind == DROP:
            ends[number] = action
            drops[device].append(action)
            there[device] -= 1
            del open_visits[action.stage]
        elif action.micro_batch is not None:
            visits[number][1].append(action)
    made, earlier = [], Counter[str | None]()
    for number, (load, actions, device) in enumerate(visits):
        buffer = earlier[device] - num_buffers[device]
        earlier[device] += 1
        after = drops[device][buffer] if buffer >= 0 else None
        made.append(Visit(load, ends.get(number), tuple(actions), after))
    return made
