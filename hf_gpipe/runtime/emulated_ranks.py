"""Ranks of a worker that are threads of one process, for the check of a tiny clone: no process group is needed.

One thread runs at a time, from message to message, so that each rank has torch's random numbers for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


class _StoppedError(Exception):
    """Another rank has failed."""


class _Turns:
    """The turns of the threads, and the messages of each, in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
        self.has_failed = False
        self._running = [True] * size
        self._turn = 0
        self._changed = threading.Condition()

    def wait(self, place: int) -> None:
        """Wait for this rank's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == place or self.has_failed)
        if self.has_failed:
            raise _StoppedError

    def pass_on(self, place: int, *, is_done: bool = False) -> None:
        """Let the next rank run that is not done."""
        with self._changed:
            self._running[place] = not is_done
            others = [(place + step) % self.size for step in range(1, self.size + 1)]
            self._turn = next((other for other in others if self._running[other]), place)
            self._changed.notify_all()

    def fail(self) -> None:
        """End all of them."""
        with self._changed:
            self.has_failed = True
            self._changed.notify_all()


class EmulatedRanks:
    """One of the ranks; see `adapters.tensor_parallel.ranks.Ranks`."""

    def __init__(self, turns: _Turns, place: int, *, divides_rows: bool = False) -> None:
        self.size, self.place, self.divides_rows = turns.size, place, divides_rows
        self._turns = turns

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchanged(tensor).sum(0, dtype=tensor.dtype)

    def begin_total(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        total = self.total(tensor)
        return lambda: total

    def begin_total_part(self, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
        part = self.total(tensor).split(list(lengths), dim)[self.place].contiguous()
        return lambda: part

    def gathered(self, part: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        return torch.cat(self._sent_by_all(part), dim)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchanged(tensor).amax(0)

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._sent_by_all(tensor))

    def _sent_by_all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks."""
        sent = self._turns.sent
        number = len(sent[self.place])
        sent[self.place].append(tensor.detach().clone())
        state = torch.get_rng_state()
        self._turns.pass_on(self.place)
        self._turns.wait(self.place)
        torch.set_rng_state(state)
        return [own[number] for own in sent]


def emulate(size: int, function: Callable[[EmulatedRanks], Result], *, divides_rows: bool = False) -> list[Result]:
    """The results of a function of each of several ranks. Raises what one of them raises."""
    turns, results, errors = _Turns(size), {}, []
    state = torch.get_rng_state()

    def run(place: int) -> None:
        try:
            turns.wait(place)
            torch.set_rng_state(state)
            results[place] = function(EmulatedRanks(turns, place, divides_rows=divides_rows))
            turns.pass_on(place, is_done=True)
        except _StoppedError:
            pass
        except BaseException as error:
            errors.append(error)
            turns.fail()

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(size)]
