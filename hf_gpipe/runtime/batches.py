"""One loader a pipeline: the main process reads the mini-batches, every process gets them ahead of use.

A random collator or a network stream is read once and so cannot differ between stages. Mini-batches travel as bytes
in safetensors form, from which every process computes the shapes that it will receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import safetensors.torch
import torch
import torch.distributed as dist

from hf_gpipe.errors import DataError
from hf_gpipe.runtime.micro_batch import Batch
from hf_gpipe.runtime.topology import Topology

Batches = Sequence[Batch]


def pack(batches: Batches) -> torch.Tensor:
    """Mini-batches as one tensor of bytes. Raises DataError for an entry that is not a tensor."""
    tensors = {}
    for number, batch in enumerate(batches):
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                raise DataError(f"mini-batch entry {name!r} is a {type(value).__name__}; only tensors can be trained on")
            tensors[f"{number}.{name}"] = value.detach().cpu().contiguous()
    return torch.frombuffer(bytearray(safetensors.torch.save(tensors)), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The mini-batches that `pack` made bytes of."""
    batches: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in safetensors.torch.load(data.numpy().tobytes()).items():
        number, _, name = key.partition(".")
        batches.setdefault(int(number), {})[name] = tensor
    return [batches[number] for number in sorted(batches)]


def share(batches: Batches | None, topology: Topology) -> list[dict[str, torch.Tensor]]:
    """The main process's mini-batches, on every process; what other processes pass is not read."""
    return next(shared_stream(iter([batches or []]), topology))


def shared_stream(source: Iterator[Batches] | None, topology: Topology) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The main process's stream of mini-batches, on every process, each sent while the one before it is in use.

    Args:
        source: read in the main process only.
        topology: the processes.

    Raises:
        DataError: on every process, where reading `source` failed in the main process.
    """
    if topology.num_processes == 1:
        assert source is not None
        for batches in source:
            yield [dict(batch) for batch in batches]
        return
    messages = _send(source) if topology.is_main else _receive()
    pending = next(messages)
    while pending is not None:
        following = next(messages)
        yield pending.wait()
        pending = following


class _Message:
    """Mini-batches on their way."""

    def __init__(self, data: torch.Tensor, work: dist.Work) -> None:
        self._data, self._work = data, work

    def wait(self) -> list[dict[str, torch.Tensor]]:
        self._work.wait()
        return unpack(self._data)


_END, _FAILED = 0, -1


def _send(source: Iterator[Batches] | None) -> Iterator[_Message | None]:
    assert source is not None
    try:
        for batches in source:
            data = pack(batches)
            dist.broadcast(torch.tensor([data.numel()]), src=0)
            work = dist.broadcast(data, src=0, async_op=True)
            assert work is not None
            yield _Message(data, work)
    except Exception:
        dist.broadcast(torch.tensor([_FAILED]), src=0)
        raise
    dist.broadcast(torch.tensor([_END]), src=0)
    yield None


def _receive() -> Iterator[_Message | None]:
    while True:
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0)
        if size.item() == _FAILED:
            raise DataError("the main process failed to read the data; its own message says why")
        if size.item() == _END:
            yield None
            return
        data = torch.empty(int(size.item()), dtype=torch.uint8)
        work = dist.broadcast(data, src=0, async_op=True)
        assert work is not None
        yield _Message(data, work)
