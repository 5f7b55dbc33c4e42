"""Finds accesses to a tensor that no event puts in an order, and memory that is freed while a stream may use it.

torch.cuda's own sanitizer (torch/cuda/_sanitizer.py) judges; it is told here of the streams, events and operations of
the emulated devices. The host executes every operation at once, so values are right even where the order is not given.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_numbers = itertools.count(1)


class Checker(TorchDispatchMode):
    """While it is entered, `problems` collects what is wrong; each once."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.handler = EventHandler()
        self._streams: set[int] = set()
        #: By the identity of a memory: the stream that allocated it, the streams told by `record_stream`, its accesses.
        self._born: dict[int, int] = {}
        self._recorded: dict[int, set[int]] = {}
        self._accesses: dict[int, list[tuple[int, int, str]]] = {}

    def stream_number(self, raw: torch.Stream) -> int:
        number = (raw.device_index + 1) * 1_000_000 + raw.stream_id
        if number not in self._streams:
            self._streams.add(number)
            self.handler._handle_stream_creation(number)
        return number

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._recorded.setdefault(_memory(tensor), set()).add(stream.number)

    def kernel(self, stream: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], name: str) -> None:
        """An operation on a stream. Memory that it is the first to write was allocated for it."""
        written = {_memory(tensor) for tensor in writes}
        read = {_memory(tensor) for tensor in reads} - written
        for error in self.handler._handle_kernel_launch(
            stream, read, written, set(), name, {memory: [] for memory in read | written}
        ):
            before: Any = error
            self._note(f"{name} is not ordered after {str(before.previous_access.operator).split('(')[0]}")
        for memory in read | written:
            self._accesses.setdefault(memory, []).append((stream, self.handler.seq_num, name))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        inputs, outputs = _on_cuda((args, kwargs)), _on_cuda(out)
        is_in_place = function._schema.is_mutable
        known = {_memory(tensor) for tensor in inputs}
        fresh = [tensor for tensor in outputs if _memory(tensor) not in known]
        if not (inputs or outputs) or not (fresh or is_in_place):
            return out  # a view
        writes = fresh + ([args[0]] if is_in_place else [])
        target = writes[0].device
        source = inputs[0].device if inputs else target
        streams = [torch._C._accelerator_getStream(device.index) for device in dict.fromkeys((target, source))]
        numbers = [self.stream_number(raw) for raw in streams]
        for tensor in fresh:
            self._born.setdefault(_memory(tensor), numbers[0])
            weakref.finalize(tensor.untyped_storage(), self._freed, _memory(tensor))
        # A copy between devices runs on the source's stream, and each of the two waits for the other around it.
        if len(numbers) == 2:
            self.wait(numbers[1], numbers[0])
        self.kernel(numbers[-1], inputs, writes, str(function))
        if len(numbers) == 2:
            self.wait(numbers[0], numbers[1])
        return out

    def wait(self, waiting: int, awaited: int) -> None:
        event = next(_numbers)
        self.handler._handle_event_creation(event)
        self.handler._handle_event_record(event, awaited)
        self.handler._handle_event_wait(event, waiting)

    def _freed(self, memory: int) -> None:
        born, recorded = self._born.pop(memory, 0), self._recorded.pop(memory, set())
        for stream, number, name in self._accesses.pop(memory, []):
            if stream == born or stream in recorded or self.handler.syncs.is_ordered_after(born, number, stream):
                continue
            self._note(f"memory is freed while {name} may still use it")
        self.handler._handle_memory_deallocation(memory)

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


class Event:
    """As torch.cuda.Event, and told to the sanitizer."""

    checker: Checker

    def __init__(self, **options: Any) -> None:
        self.number = next(_numbers)
        self.checker.handler._handle_event_creation(self.number)

    def record(self, stream: Stream) -> None:
        self.checker.handler._handle_event_record(self.number, stream.number)


class Stream:
    """As torch.cuda.Stream, and told to the sanitizer."""

    checker: Checker

    def __init__(self, device: Any = None, raw: torch.Stream | None = None) -> None:
        self.raw = raw or torch.Stream(torch.device(device))
        self.number = self.checker.stream_number(self.raw)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.checker.handler._handle_event_wait(event.number, self.number)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def __enter__(self) -> Any:
        return self.raw.__enter__()

    def __exit__(self, *error: Any) -> Any:
        return self.raw.__exit__(*error)


class Work:
    """A message of `Messages`."""

    def __init__(self, device: torch.device, event: Event) -> None:
        self._device, self._event = device, event
        self.has_ended = False

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)  # type: ignore[arg-type]

    def is_completed(self) -> bool:
        if self.has_ended:
            Event.checker.handler._handle_event_synchronization(self._event.number)
        return self.has_ended


class Messages:
    """`isend` and `irecv` in one process: a device sends to another, each on a stream of its own as NCCL does."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker
        self._streams: dict[torch.device, Stream] = {}
        self._sent: deque[torch.Tensor] = deque()
        self.works: list[Work] = []

    def isend(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        work = self._launch(tensor, lambda stream: self._checker.kernel(stream, [tensor], [], "isend"))
        self._sent.append(_bytes(tensor).clone())
        return work

    def irecv(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Work:
        work = self._launch(tensor, lambda stream: self._checker.kernel(stream, [], [tensor], "irecv"))
        _bytes(tensor).copy_(self._sent.popleft())
        return work

    def _launch(self, tensor: torch.Tensor, kernel: Callable[[int], None]) -> Work:
        stream = self._streams.setdefault(tensor.device, Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))  # type: ignore[arg-type]
        kernel(stream.number)
        self.works.append(Work(tensor.device, stream.record_event()))
        return self.works[-1]


@contextmanager
def checking() -> Iterator[tuple[Checker, Messages]]:
    """Context manager that checks operations on emulated devices. For a process of its own: it patches torch."""
    checker = Checker()
    Event.checker = Stream.checker = checker
    messages = Messages(checker)
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = lambda device=None: Stream(
        raw=torch._C._accelerator_getStream(torch.device("cuda" if device is None else device).index or 0)
    )
    cuda.stream = lambda stream: stream
    tensor_class: Any = torch.Tensor
    tensor_class.record_stream = lambda tensor, stream: checker.record_stream(tensor, stream)
    distributed: Any = dist
    distributed.isend, distributed.irecv = messages.isend, messages.irecv
    with checker:
        yield checker, messages


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _on_cuda(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.is_cuda]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a CPU tensor, past the checker."""
    raw = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8)
