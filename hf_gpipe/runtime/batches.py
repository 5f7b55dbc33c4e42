"""One data loader per pipeline: the main process reads the mini-batches and sends them to all, ahead of use.

A random collator or a network stream is read once and so cannot differ between stages. Mini-batches travel as
other values do (wire.py), and every process computes from them the shapes that it will receive. With replicas each
process gets the rows of all of them: docs/parallelism.md counts what parts would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.errors import DataError, MessageError, PeerError
from hf_gpipe.job import wire
from hf_gpipe.job.job import Job
from hf_gpipe.job.world import World
from hf_gpipe.runtime.micro_batch import Batch

Batches = Sequence[Batch]


def tensors_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The entries of a mini-batch, labels among them. Raises DataError for one that is not a tensor."""
    # Numbers that collators without padding add for flash attention. They follow from the lengths of the documents.
    kept = {name: value for name, value in batch.items() if name not in ("max_length_q", "max_length_k")}
    for name, value in kept.items():
        if not isinstance(value, torch.Tensor):
            raise DataError(
                f"mini-batch entry {name!r} is a {type(value).__name__}; only tensors can be trained on: let the data "
                "collator make a tensor of it, or leave it out"
            )
    shifted = kept.get("shift_labels")
    if "labels" not in kept and shifted is not None and shifted.dim() == 2:
        # The labels that these are the shifted ones of; the first has no position before it.
        kept["labels"] = F.pad(shifted[:, :-1], (1, 0), value=IGNORED_LABEL)
    return kept


def unpack(data: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The mini-batches of a message. Raises MessageError for any other bytes."""
    batches = wire.unpack(data)
    if not isinstance(batches, list) or not all(map(_is_batch, batches)):
        raise MessageError("what the main process has sent in place of mini-batches has other types")
    return batches


def _is_batch(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in value.items()
    )


def share(batches: Batches | None, world: World) -> list[dict[str, torch.Tensor]]:
    """The main process's mini-batches, on every process; what other processes pass is not read."""
    if world.num_processes == 1:
        return [tensors_of(batch) for batch in batches or ()]
    messages = _Messages(world)
    messages.begin(lambda: batches or ())
    shared = messages.end()
    assert shared is not None
    return shared


def shared_stream(source: Iterator[Batches] | None, world: World) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The main process's stream of mini-batches, on every process, each sent while the one before it is in use.

    Args:
        source: read in the main process only.

    Raises:
        PeerError: reading `source` failed in the main process, which raises the error itself; both after the
            mini-batches before it.
    """
    if source is not None:
        source = Job.current().noting(source, "reading a mini-batch")
    if world.num_processes == 1:
        assert source is not None
        for batches in source:
            yield [tensors_of(batch) for batch in batches]
        return

    def read() -> Batches | None:
        assert source is not None
        return next(source, None)

    messages = _Messages(world)
    messages.begin(read)
    while (shared := messages.end()) is not None:
        messages.begin(read)
        yield shared


_HEADER_BYTES = 8
#: Room for mini-batches in the first message.
_FIRST_BYTES = 1 << 16
#: Values in place of the number of bytes: the messages end, or reading has failed.
_END, _FAILED = 0, -1


class _Messages:
    """Messages of mini-batches from the main process to all, one after the other.

    All processes know the size of a message without being told: a header, and room for the longest mini-batches so
    far. The rest of longer ones is sent when they are waited for.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._room = _FIRST_BYTES

    def begin(self, read: Callable[[], Batches | None]) -> None:
        """Begin to send what `read` returns in the main process, where alone it is called; None ends the messages."""
        self._message = torch.zeros(_HEADER_BYTES + self._room, dtype=torch.uint8)
        self._data: torch.Tensor | None = None
        self._error: Exception | None = None
        if self._world.is_main:
            size = _FAILED
            try:
                batches = read()
                self._data = None if batches is None else wire.pack([tensors_of(batch) for batch in batches])
                size = _END if self._data is None else self._data.numel()
            except Exception as error:
                # Raised with the others' error, at the end of the step that is under way; the report tells this work.
                self._error, self._work_of_error = error, Job.current().work
            self._message[:_HEADER_BYTES] = torch.tensor([size]).view(torch.uint8)
            if self._data is not None:
                beginning = self._data[: self._room]
                self._message[_HEADER_BYTES : _HEADER_BYTES + len(beginning)] = beginning
        self._work = self._world.broadcast(self._message, self._world.main, async_op=True)

    def end(self) -> list[dict[str, torch.Tensor]] | None:
        """Wait for the mini-batches; None after the last."""
        assert self._work is not None
        self._work.wait()
        size = int(self._message[:_HEADER_BYTES].view(torch.int64))
        if self._error is not None:
            Job.current().note(self._work_of_error)
            raise self._error
        if size == _FAILED:
            raise PeerError("the main process failed to read the data; its own message says why")
        if size == _END:
            return None
        body = self._message[_HEADER_BYTES:]
        if wire.checked_size(size) > self._room:
            rest = torch.empty(size - self._room, dtype=torch.uint8) if self._data is None else self._data[self._room :]
            self._world.broadcast(rest, self._world.main)
            body = torch.cat([body, rest])
            self._room = size
        return unpack(body[:size])
