"""Ranks of a worker that are threads of one process, for the check of a tiny clone: no process group is needed.

One thread runs at a time, from message to message, so that each rank has torch's random numbers for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hf_gpipe.adapters.parts.ranks import Ranks
from hf_gpipe.settings.division import Division

Result = TypeVar("Result")


class _Meeting:
    """The threads' common state: whose turn it is, where they wait for each other, messages by number and place."""

    def __init__(self, size: int) -> None:
        self.turn, self.barrier = threading.Lock(), threading.Barrier(size)
        self.sent: dict[tuple[int, int], torch.Tensor] = {}


class EmulatedRanks(Ranks):
    """One of the ranks."""

    def __init__(self, meeting: _Meeting, division: Division, place: int) -> None:
        self.division, self.place = division, place
        self._meeting, self._num_sent = meeting, 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchanged(tensor).sum(0, dtype=tensor.dtype)

    def begin_total(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        total = self.total(tensor)
        return lambda: total

    def gathered(self, part: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        return torch.cat(self._sent_by_all(part), dim)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchanged(tensor).amax(0)

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._sent_by_all(tensor))

    def _sent_by_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks."""
        sent, number = self._meeting.sent, self._num_sent
        self._num_sent += 1
        sent[number, self.place] = tensor.detach().clone()
        state = torch.get_rng_state()
        self.meet()
        torch.set_rng_state(state)
        return [sent[number, place] for place in range(self.size)]

    def meet(self) -> None:
        """Let the other ranks come as far as this one. Raises BrokenBarrierError where one has failed."""
        self._meeting.turn.release()
        try:
            self._meeting.barrier.wait()
        finally:
            self._meeting.turn.acquire()


def emulate(division: Division, function: Callable[[EmulatedRanks], Result]) -> list[Result]:
    """The results of a function of each of several ranks. Raises what one of them raises."""
    size = division.num_ranks
    meeting, results, errors = _Meeting(size), {}, []
    state = torch.get_rng_state()
    states = [state] * size

    def run(place: int) -> None:
        ranks = EmulatedRanks(meeting, division, place)
        with meeting.turn:
            try:
                torch.set_rng_state(state)
                results[place] = function(ranks)
                states[place] = torch.get_rng_state()
                ranks.meet()  # others would wait for ever for the message of one that has ended
            except threading.BrokenBarrierError:
                """Another rank has failed."""
            except BaseException as error:
                errors.append(error)
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    torch.set_rng_state(states[-1])
    return [results[place] for place in range(size)]
