"""CPU memory for what graphs save, between O and P of a table (`hf_gpipe.modes.host_graphs.table`).

While F runs, hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) hand out places in place of tensors. O
copies the memory of these tensors to the host, each storage once, and P copies it back. Weights, buffers and what the
stage holds anyway stay, and so do small tensors and those of other devices.

On CUDA the host's memory is pinned, and copies have streams of their own, one for each direction. The memory of a graph
that leaves is free for what computes after the next O, which waits for the copy. So the peak does not depend on how far
the host is ahead. On the CPU both memories are one, and nothing is saved: that is for tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_gpipe.libraries.torch import base_of, storage_id, version_of
from hf_gpipe.runtime.memory import aligned

#: A storage with fewer bytes stays: its copy would take longer to begin than to end.
SMALLEST_BYTES = 4096
#: Bytes of a piece of CPU memory. PyTorch rounds pinned memory up to a power of two, and this is one.
PIECE_BYTES = 1 << 23


@dataclass(slots=True, eq=False)
class _Home:
    """The memory that one or several saved tensors share."""

    storage: torch.UntypedStorage | None
    """On the device; None while it is away."""
    nbytes: int

    @property
    def there(self) -> torch.UntypedStorage:
        assert self.storage is not None, "the graph is away"
        return self.storage

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Some of its bytes on the device."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.there.device)
        return whole.set_(self.there, start, (stop - start,), (1,))


@dataclass(slots=True, eq=False)
class _Saved:
    """Stands for a saved tensor: it has the tensor, or, once the memory has left, how to make the tensor again."""

    tensor: torch.Tensor | None
    version: int
    home: _Home | None = None
    form: tuple[Any, ...] = ()
    """Type, offset, shape and strides."""
    is_changed: bool = False

    def check(self) -> None:
        """Note whether the tensor was changed in place, which autograd does not look for under hooks."""
        self.is_changed |= self.tensor is not None and version_of(self.tensor) != self.version


@dataclass(eq=False)
class _Piece:
    """CPU memory, which graphs take in turn."""

    memory: torch.Tensor
    is_free: torch.cuda.Event | None = None
    """On CUDA, when what it had has come back."""


class SavedTensors:
    """The tensors that the graph of one micro-batch on a stage saves.

    Args:
        device: of the stage.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.homes: dict[int, _Home] = {}
        self.pieces: list[_Piece] = []
        self.has_left: torch.cuda.Event | None = None
        self.has_come: torch.cuda.Event | None = None
        self._moved: list[_Saved] = []

    def hooks(self) -> AbstractContextManager[object]:
        """Context manager for F."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the memory of some tensors stay, for something else holds it."""
        stays = {storage_id(tensor.untyped_storage()) for tensor in tensors if _is_plain(tensor)}
        stays |= {key for key, home in self.homes.items() if home.nbytes < SMALLEST_BYTES}
        homes = {id(self.homes.pop(key)) for key in stays & self.homes.keys()}
        for saved in self._moved:
            if id(saved.home) in homes:
                saved.home = None
        self._moved = [saved for saved in self._moved if saved.home is not None]

    def release(self) -> None:
        """Free the memory on the device: it has been copied, for what computes from now on."""
        for saved in self._moved:
            saved.check()
            saved.tensor = None
        self._moved.clear()
        for home in self.homes.values():
            home.storage = None

    def arrive(self) -> None:
        """Before the backward: the device waits for what comes back. From then on each node frees its own."""
        if self.has_come is not None:
            torch.cuda.current_stream(self.device).wait_event(self.has_come)
        self.homes.clear()

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # Not the tensor: a node would keep itself by what it saves of its result.
        alias = tensor.detach()
        is_fixed = tensor.device != self.device or tensor.is_conj() or tensor.is_neg() or _is_of_weight(tensor)
        if not _is_plain(tensor) or is_fixed:
            return _Saved(alias, version_of(tensor))
        storage = alias.untyped_storage()
        home = self.homes.setdefault(storage_id(storage), _Home(storage, storage.nbytes()))
        form = alias.dtype, alias.storage_offset(), alias.shape, alias.stride()
        saved = _Saved(alias, version_of(tensor), home, form)
        self._moved.append(saved)
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        saved.check()
        if saved.is_changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                "(recompute: host looks at what a graph has saved)"
            )
        if saved.tensor is not None:
            return saved.tensor
        assert saved.home is not None, "only what moves lets its tensor go"
        dtype, *form = saved.form
        return torch.empty(0, dtype=dtype, device=self.device).set_(saved.home.there, *form)


class HostCopies:
    """Copies what graphs save from a device to the host and back.

    Args:
        device: its streams copy on CUDA; on the CPU all copies are made at once.

    Attributes:
        num_bytes: of the CPU memory that it has.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._free: list[_Piece] = []
        self._leaving: SavedTensors | None = None
        #: Whether a graph has come since the last one left.
        self._has_come = False
        self.num_bytes = 0

    def leave(self, saved: SavedTensors) -> None:
        """O: begin to copy to the host what a graph has saved. What computes next waits for the graph before."""
        self._finish()
        sizes = [aligned(home.nbytes) for home in saved.homes.values()]
        saved.pieces = [self._piece() for _ in range(-(-sum(sizes) // PIECE_BYTES))]
        if self._is_cuda:
            stream = self._stream("out")
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for piece in saved.pieces:
                if piece.is_free is not None:
                    stream.wait_event(piece.is_free)
            with torch.cuda.stream(stream):
                for there, here in _runs(saved):
                    there.copy_(here, non_blocking=True)
                saved.has_left = stream.record_event()
            self._leaving, self._has_come = saved, False
        else:
            for there, here in _runs(saved):
                there.copy_(here)
            saved.release()

    def come(self, saved: SavedTensors) -> None:
        """P: begin to copy it back, into memory that is free by now."""
        if self._has_come or self._leaving is saved:
            self._finish()
        self._has_come = True
        for home in saved.homes.values():
            memory = torch.empty(home.nbytes, dtype=torch.uint8, device=self._device)
            home.storage = memory.untyped_storage()
        if self._is_cuda:
            stream = self._stream("in")
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for there, here in _runs(saved):
                    here.copy_(there, non_blocking=True)
                saved.has_come = stream.record_event()
            for piece in saved.pieces:
                piece.is_free = saved.has_come
        else:
            for there, here in _runs(saved):
                here.copy_(there)
        self._free += saved.pieces
        saved.pieces = []

    def reset(self) -> None:
        """Drop what a failed step has left: the device waits for the copies, whose memory is free then."""
        for stream in self._streams.values():
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._leaving, self._has_come = None, False
        self._free.clear()
        self.num_bytes = 0

    def _finish(self) -> None:
        """Let the device wait for the graph that leaves, and free its memory there."""
        if self._leaving is not None:
            assert self._leaving.has_left is not None, "its copy has begun"
            torch.cuda.current_stream(self._device).wait_event(self._leaving.has_left)
            self._leaving.release()
            self._leaving = None

    def _piece(self) -> _Piece:
        if self._free:
            return self._free.pop(0)
        self.num_bytes += PIECE_BYTES
        return _Piece(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_cuda))

    def _stream(self, way: str) -> torch.cuda.Stream:
        if way not in self._streams:
            self._streams[way] = torch.cuda.Stream(self._device)
        return self._streams[way]


def _runs(saved: SavedTensors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of all storages, one after the other: (on the host, on the device), in runs within a piece each."""
    place = 0
    for home in saved.homes.values():
        start = 0
        while start < home.nbytes:
            number, inside = divmod(place + start, PIECE_BYTES)
            stop = min(home.nbytes, start + PIECE_BYTES - inside)
            yield saved.pieces[number].memory[inside : inside + stop - start], home.part(start, stop)
            start = stop
        place += aligned(home.nbytes)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is memory of a device and no more."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _is_of_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what autocast has made of a trained weight, once for all micro-batches of a step."""
    made = (tensor if (base := base_of(tensor)) is None else base).grad_fn
    if made is None or made.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(made.next_functions[0][0], "variable", None), nn.Parameter)
