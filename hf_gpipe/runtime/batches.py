"""One data loader per pipeline: the main process reads the mini-batches and sends them to all, ahead of use.

A random collator or a network stream is read once and so cannot differ between stages. Mini-batches travel as bytes
in safetensors form, from which every process computes the shapes that it will receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import safetensors.torch
import torch

from hf_gpipe.errors import DataError, PeerError
from hf_gpipe.runtime.micro_batch import Batch
from hf_gpipe.runtime.processes import Processes

Batches = Sequence[Batch]


def pack(batches: Batches) -> torch.Tensor:
    """Serialise mini-batches into one tensor of bytes. Raises DataError for an entry that is not a tensor."""
    tensors = {}
    for number, batch in enumerate(batches):
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                raise DataError(
                    f"mini-batch entry {name!r} is a {type(value).__name__}; only tensors can be trained on"
                )
            # A copy: safetensors raises an error for entries that share memory, such as labels that are the ids.
            tensors[f"{number}.{name}"] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Restore the mini-batches that `pack` serialised."""
    batches: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in safetensors.torch.load(data.numpy().tobytes()).items():
        number, _, name = key.partition(".")
        batches.setdefault(int(number), {})[name] = tensor
    return [batches[number] for number in sorted(batches)]


def share(batches: Batches | None, processes: Processes) -> list[dict[str, torch.Tensor]]:
    """The main process's mini-batches, on every process; what other processes pass is not read."""
    if processes.num_processes == 1:
        return [dict(batch) for batch in batches or ()]
    message = _send(batches or (), processes) if processes.is_reader else _receive(processes)
    assert message is not None
    return message.wait()


def shared_stream(source: Iterator[Batches] | None, processes: Processes) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The main process's stream of mini-batches, on every process, each sent while the one before it is in use.

    Args:
        source: read in the main process only.
        processes: the processes.

    Raises:
        PeerError: reading `source` failed in the main process, which raises the error itself.
    """
    if processes.num_processes == 1:
        assert source is not None
        for batches in source:
            yield [dict(batch) for batch in batches]
        return
    messages = _send_all(source, processes) if processes.is_reader else iter(partial(_receive, processes), None)
    pending = next(messages, None)
    while pending is not None:
        following = next(messages, None)
        yield pending.wait()
        pending = following


class _Message:
    """Mini-batches that are being sent."""

    def __init__(self, data: torch.Tensor, processes: Processes) -> None:
        self._data = data
        self._work = processes.broadcast(data, processes.reader, async_op=True)

    def wait(self) -> list[dict[str, torch.Tensor]]:
        assert self._work is not None
        self._work.wait()
        return unpack(self._data)


_END, _FAILED = 0, -1


def _send(batches: Batches, processes: Processes) -> _Message:
    try:
        data = pack(batches)
    except Exception:
        _announce(_FAILED, processes)
        raise
    _announce(data.numel(), processes)
    return _Message(data, processes)


def _send_all(source: Iterator[Batches] | None, processes: Processes) -> Iterator[_Message]:
    assert source is not None
    while True:
        try:
            batches = next(source, None)
        except Exception:
            _announce(_FAILED, processes)
            raise
        if batches is None:
            _announce(_END, processes)
            return
        yield _send(batches, processes)


def _announce(size: int, processes: Processes) -> None:
    """Tell the other processes how many bytes follow."""
    processes.broadcast(torch.tensor([size]), processes.reader)


def _receive(processes: Processes) -> _Message | None:
    """The next message; None at the end of the stream."""
    size = torch.zeros(1, dtype=torch.int64)
    processes.broadcast(size, processes.reader)
    if size.item() == _FAILED:
        raise PeerError("the main process failed to read the data; its own message says why")
    if size.item() == _END:
        return None
    return _Message(torch.empty(int(size.item()), dtype=torch.uint8), processes)
