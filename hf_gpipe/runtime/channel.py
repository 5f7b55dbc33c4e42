"""One direction of an edge between two neighbouring stages: activations go down, gradients come back up.

The executor names the micro-batch, and the channel sends its tensors to a stage of the same process or of another. The
receiver computes every shape from the mini-batch before the message arrives, so shapes are not sent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from itertools import chain

import torch
import torch.distributed as dist

from hf_gpipe.errors import HfGpipeError

Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]
#: Fewer small tensors of a message travel one by one: joining two of them took longer than it saved.
FEWEST_JOINED = 4
Key = Hashable
"""Identifies a message, for example by its micro-batch's number: no two messages under way have the same key."""


class Channel(ABC):
    """Messages of named tensors from one stage to its neighbour; they arrive in the order in which they were sent."""

    #: The dtype in which wider floating-point tensors are sent, and a function from a tensor's name to the dtype that
    #: the receiver restores. None: tensors are sent in their own dtype.
    narrow: tuple[torch.dtype, Callable[[str], torch.dtype]] | None = None

    def send(self, key: Key, tensors: Tensors, shapes: Shapes) -> None:
        """Send without waiting. Raises an error if the tensors do not have `shapes`, which the receiver expects."""
        check_shapes(tensors, shapes)
        if self.narrow is not None:
            tensors = {name: tensor.to(narrowed(tensor.dtype, self.narrow[0])) for name, tensor in tensors.items()}
        self._send(key, tensors, shapes)

    @abstractmethod
    def _send(self, key: Key, tensors: Tensors, shapes: Shapes) -> None: ...

    def expect(self, key: Key, shapes: Shapes) -> None:  # noqa: B027  # inside of a process there is nothing to do
        """Announce the next message, so that it can arrive while this process computes."""

    def receive(self, key: Key) -> dict[str, torch.Tensor]:
        """Wait for a message that was announced."""
        received = self._receive(key)
        if self.narrow is None:
            return received
        return {name: tensor.to(self.narrow[1](name)) for name, tensor in received.items()}

    @abstractmethod
    def _receive(self, key: Key) -> dict[str, torch.Tensor]: ...

    def arrived(self, key: Key) -> None:  # noqa: B027  # inside of a process there is nothing to do
        """Free the tensors of a message that the other stage has received."""

    def flush(self) -> None:  # noqa: B027  # inside of a process there is nothing to do
        """Wait until all messages have been sent."""

    @abstractmethod
    def reset(self) -> None:
        """End unfinished messages after a failed step."""

    def check(self) -> None:  # noqa: B027  # inside of a process there is nothing to do
        """Raise an error if no message can be sent or received any more, after a failed step."""


class LocalChannel(Channel):
    """A channel between two stages of one process.

    Args:
        target: the receiver's device.
    """

    def __init__(self, target: torch.device) -> None:
        self._target = target
        self._messages: dict[Key, dict[str, torch.Tensor]] = {}

    def _send(self, key: Key, tensors: Tensors, shapes: Shapes) -> None:
        self._messages[key] = {name: tensor.to(self._target) for name, tensor in tensors.items()}

    def _receive(self, key: Key) -> dict[str, torch.Tensor]:
        return self._messages.pop(key)

    def reset(self) -> None:
        self._messages.clear()


class DeviceChannel(Channel):
    """A channel between two stages of one process on two CUDA devices.

    Separate streams copy the messages, so that neither device waits for a copy. A copy starts when the sender's stream
    has computed the tensors, and the receiver's stream waits for the copy only before it uses them.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._streams = torch.cuda.Stream(source), torch.cuda.Stream(target)
        self._messages: dict[Key, tuple[dict[str, torch.Tensor], torch.cuda.Event]] = {}

    def _send(self, key: Key, tensors: Tensors, shapes: Shapes) -> None:
        leaving, arriving = self._streams
        leaving.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(arriving), torch.cuda.stream(leaving):
            copies = {name: tensor.to(self._target, non_blocking=True) for name, tensor in tensors.items()}
        for tensor in tensors.values():
            # The allocator must not reuse the tensor's memory before the copy is done.
            tensor.record_stream(leaving)
        self._messages[key] = copies, arriving.record_event()

    def _receive(self, key: Key) -> dict[str, torch.Tensor]:
        copies, arrived = self._messages.pop(key)
        stream = torch.cuda.current_stream(self._target)
        stream.wait_event(arrived)
        for copy in copies.values():
            copy.record_stream(stream)
        return copies

    def reset(self) -> None:
        self._messages.clear()


class RemoteChannel(Channel):
    """A channel between two processes, by torch.distributed: gloo on the CPU, NCCL on CUDA.

    Args:
        peer: rank of the other process.
        tag: tag of the channel's messages, which on gloo separates the channels between the same two processes.
        group: on NCCL the channel's own two-rank communicator; on gloo the communicator of all processes.
        device: the device on which tensors are received.
        dtype_of: function from a tensor's name to the dtype in which it is sent.
    """

    def __init__(
        self,
        peer: int,
        tag: int,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype_of: Callable[[str], torch.dtype],
    ) -> None:
        self._peer, self._tag, self._group = peer, tag, group
        self._device, self._dtype_of = device, dtype_of
        #: The tensors of each message, which are kept until the message has been sent.
        self._sent: dict[Key, list[tuple[dist.Work, torch.Tensor]]] = {}
        self._expected: dict[Key, tuple[list[dist.Work], dict[str, torch.Tensor]]] = {}
        self._has_failed = False

    def _send(self, key: Key, tensors: Tensors, shapes: Shapes) -> None:
        for oldest in list(self._sent):
            if not all(work.is_completed() for work, _ in self._sent[oldest]):
                break
            del self._sent[oldest]
        for name, tensor in tensors.items():
            if tensor.dtype != self._dtype_of(name):
                raise HfGpipeError(f"{name!r} is {tensor.dtype}; the other stage expects {self._dtype_of(name)}")
        message = self._sent.setdefault(key, [])
        for names in _parts(shapes, self._dtype_of):
            first, *others = (tensors[name] for name in names)
            joined = torch.cat([part.flatten() for part in (first, *others)]) if others else first.contiguous()
            work = dist.isend(joined, self._peer, group=self._group, tag=self._tag)
            assert work is not None, "this process is neither sender nor receiver"
            message.append((work, joined))

    def expect(self, key: Key, shapes: Shapes) -> None:
        works, received = [], dict[str, torch.Tensor]()
        for names in _parts(shapes, self._dtype_of):
            sizes = [math.prod(shapes[name]) for name in names]
            buffer = torch.empty(sum(sizes), dtype=self._dtype_of(names[0]), device=self._device)
            work = dist.irecv(buffer, self._peer, group=self._group, tag=self._tag)
            assert work is not None, "this process is neither sender nor receiver"
            works.append(work)
            for name, values in zip(names, buffer.split(sizes), strict=True):
                # Without `.data` an operation in place on one of them would count as a change of all.
                received[name] = values.view(shapes[name]).data
        self._expected[key] = works, received

    def _receive(self, key: Key) -> dict[str, torch.Tensor]:
        works, received = self._expected.pop(key)
        for work in works:
            work.wait()
        return received

    def arrived(self, key: Key) -> None:
        # gloo frees a message's tensors only in `wait`, and `is_completed` stays false until then. On CUDA, `wait`
        # would make the stream wait, and `_send` finds completed messages.
        if self._device.type == "cpu":
            self._wait(key)

    def flush(self) -> None:
        for key in list(self._sent):
            self._wait(key)

    def _wait(self, key: Key) -> None:
        for sent, _ in self._sent.pop(key, ()):
            sent.wait()

    def reset(self) -> None:
        # A message under way cannot be cancelled: the other process may still complete it, so its tensors stay alive.
        self._has_failed = True

    def check(self) -> None:
        if self._has_failed:
            raise HfGpipeError(
                "a step failed in this process, and its messages to and from other processes cannot be taken back; "
                "correct the cause, and start all processes again, from the last checkpoint where there is one"
            )


def _parts(shapes: Shapes, dtype_of: Callable[[str], torch.dtype]) -> list[list[str]]:
    """The names of the tensors of a message that travel in one piece; sender and receiver find the same.

    The largest travels alone, since joining it would be a copy. Small ones of one dtype are joined where they are many,
    as the router logits of a mixture of experts are: 32 of them took 0.9 to 1.7 ms on gloo, and joined 0.2 to 0.7 ms.
    """
    if len(shapes) <= FEWEST_JOINED:
        return [[name] for name in shapes]
    largest = max(shapes, key=lambda name: math.prod(shapes[name]))
    parts: dict[object, list[str]] = {}
    for name in shapes:
        parts.setdefault(name if name == largest else dtype_of(name), []).append(name)
    pieces = ([names] if len(names) >= FEWEST_JOINED else [[name] for name in names] for names in parts.values())
    return [*chain.from_iterable(pieces)]


def narrowed(dtype: torch.dtype, sent: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor of `dtype` is sent: `sent` for wider floating-point types, otherwise its own."""
    is_wider = sent is not None and dtype.is_floating_point and dtype.itemsize > sent.itemsize
    return sent if sent is not None and is_wider else dtype


def check_shapes(tensors: Tensors, shapes: Shapes) -> None:
    """Raise an error if the tensors of a message do not have the shapes that its receiver expects."""
    sent = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if sent != dict(shapes):
        raise HfGpipeError(f"the tensors to send have the shapes {sent}; the next stage expects {dict(shapes)}")
