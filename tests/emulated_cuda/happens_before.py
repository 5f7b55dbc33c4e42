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
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_numbers = itertools.count(1)


class Checker(TorchDispatchMode):
    """While it is entered, `problems` collects what is wrong; each once.

    Args:
        has_peer_access: whether a device can read another one's memory. Otherwise a strided copy between two takes
            three kernels, as in torch's copy_kernel_cuda.
    """

    def __init__(self, has_peer_access: bool = True) -> None:
        super().__init__()
        self._has_peer_access = has_peer_access
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
        changed = _changed(function, args, kwargs or {})
        known = {_memory(tensor) for tensor in inputs}
        fresh = [tensor for tensor in outputs if _memory(tensor) not in known]
        writes = fresh + changed
        if not writes:
            if function is torch.ops.aten.copy_.default and inputs:  # to the host
                raw = torch._C._accelerator_getStream(inputs[0].device.index)
                self.kernel(self.stream_number(raw), inputs, [], str(function))
            return out  # else a view, or a value for the host
        target = writes[0].device
        given = [tensor for tensor in inputs if not any(tensor is one for one in changed)]
        source = given[0].device if given else target
        streams = [torch._C._accelerator_getStream(device.index) for device in dict.fromkeys((target, source))]
        numbers = [self.stream_number(raw) for raw in streams]
        for tensor in fresh:
            self._born.setdefault(_memory(tensor), numbers[0])
            weakref.finalize(tensor.untyped_storage(), self._freed, _memory(tensor))
        if len(numbers) == 1:
            self.kernel(numbers[0], inputs, writes, str(function))
            return out
        # A copy between devices runs on the source's stream, and each of the two waits for the other around it.
        result = writes[0]
        is_strided = not self._has_peer_access and given[0].stride() != result.stride()
        if is_strided and not given[0].is_contiguous():
            self.kernel(numbers[1], given, [], f"{function} to contiguous memory")
        self.wait(numbers[1], numbers[0])
        self.kernel(numbers[1], inputs, writes, str(function))
        self.wait(numbers[0], numbers[1])
        if is_strided and not result.is_contiguous():
            self.kernel(numbers[0], [], writes, f"{function} from contiguous memory")
        return out

    def is_behind(self, device: torch.device, name: str) -> bool:
        """Whether the current stream of a device has waited for the operations of this name."""
        here = self.stream_number(torch._C._accelerator_getStream(device.index))
        found = [one for accesses in self._accesses.values() for one in accesses if name in one[2]]
        assert found, f"there was no {name}"
        return all(self.handler.syncs.is_ordered_after(here, number, stream) for stream, number, _ in found)

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
        self._raw = stream.raw.record_event()

    def synchronize(self) -> None:
        self.checker.handler._handle_event_synchronization(self.number)
        self._raw.synchronize()


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
        # The device is told too: what a stream waits for has ended in pinned memory.
        self.raw.wait_event(event._raw)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.checker.handler._handle_stream_synchronization(self.number)
        self.raw.synchronize()

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
def checking(*, has_peer_access: bool = True) -> Iterator[tuple[Checker, Messages]]:
    """Context manager that checks operations on emulated devices. For a process of its own: it patches torch."""
    checker = Checker(has_peer_access)
    Event.checker = Stream.checker = checker
    messages = Messages(checker)
    # Nobody reads which lines of code an operation came from, and to find them takes longer than all else.
    sanitizer: Any = _sanitizer
    sanitizer.traceback = SimpleNamespace(
        StackSummary=SimpleNamespace(extract=lambda stack, lookup_lines: []), walk_stack=lambda frame: None
    )
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


def _changed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    if not function._schema.is_mutable:
        return []
    given = {one.name: value for one, value in zip(function._schema.arguments, args, strict=False)} | kwargs
    return _on_cuda(
        [given.get(one.name) for one in function._schema.arguments if one.alias_info and one.alias_info.is_write]
    )


def _on_cuda(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.is_cuda]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a CPU tensor, past the checker."""
    raw = (ctypes.c_byte * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=torch.uint8)
