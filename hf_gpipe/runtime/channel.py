"""One direction of an edge between two neighbouring stages: activations go down, gradients come back up.

The executor names the micro-batch and the channel sends its tensors, to a stage of this process or of another one. The
receiver computes every shape from the batch before the message arrives, so shapes are not sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping

import torch
import torch.distributed as dist

from hf_gpipe.errors import HfGpipeError

Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]
Key = Hashable
"""The name of a message, such as the number of its micro-batch: no two on their way have the same."""


class Channel(ABC):
    """Messages of named tensors from one stage to its neighbour; they arrive in the order in which they were sent."""

    #: The type in which wider floating-point tensors travel, and the own type of a tensor by its name; None: their own.
    narrow: tuple[torch.dtype, Callable[[str], torch.dtype]] | None = None

    def send(self, key: Key, tensors: Tensors, shapes: Shapes) -> None:
        """Send without waiting. Raises an error if the tensors have not `shapes`, which the receiver expects."""
        check_shapes(tensors, shapes)
        if self.narrow is not None:
            tensors = {name: tensor.to(narrowed(tensor.dtype, self.narrow[0])) for name, tensor in tensors.items()}
        self._send(key, tensors, shapes)

    @abstractmethod
    def _send(self, key: Key, tensors: Tensors, names: Iterable[str]) -> None: ...

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
    """Between two stages of one process.

    Args:
        target: the receiver's device.
    """

    def __init__(self, target: torch.device) -> None:
        self._target = target
        self._messages: dict[Key, dict[str, torch.Tensor]] = {}

    def _send(self, key: Key, tensors: Tensors, names: Iterable[str]) -> None:
        self._messages[key] = {name: tensor.to(self._target) for name, tensor in tensors.items()}

    def _receive(self, key: Key) -> dict[str, torch.Tensor]:
        return self._messages.pop(key)

    def reset(self) -> None:
        self._messages.clear()


class DeviceChannel(Channel):
    """Between two stages of one process on two CUDA devices.

    Messages are copied on separate streams, so that neither device waits for a copy: it starts when the sender's stream
    has computed the tensors, and the receiver's stream waits for it only before it uses them.
    """

    def __init__(self, source: torch.device, target: torch.device) -> None:
        self._source, self._target = source, target
        self._streams = torch.cuda.Stream(source), torch.cuda.Stream(target)
        self._messages: dict[Key, tuple[dict[str, torch.Tensor], torch.cuda.Event]] = {}

    def _send(self, key: Key, tensors: Tensors, names: Iterable[str]) -> None:
        leaving, arriving = self._streams
        leaving.wait_stream(torch.cuda.current_stream(self._source))
        with torch.cuda.stream(arriving), torch.cuda.stream(leaving):
            copies = {name: tensor.to(self._target, non_blocking=True) for name, tensor in tensors.items()}
        for tensor in tensors.values():
            # Its memory must not be reused before the copy is done.
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
    """Between two processes, by torch.distributed: gloo on the CPU, NCCL on CUDA.

    Args:
        peer: rank of the other process.
        tag: number of this channel, which on gloo separates channels between the same two processes.
        group: the channel's own two-rank communicator on NCCL; on gloo that of all processes.
        device: where tensors are received.
        dtype_of: type of a carried tensor by its name.
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
        #: The tensors of each message are kept until it was sent.
        self._sent: dict[Key, list[tuple[dist.Work, torch.Tensor]]] = {}
        self._expected: dict[Key, list[tuple[str, torch.Tensor, dist.Work]]] = {}
        self._has_failed = False

    def _send(self, key: Key, tensors: Tensors, names: Iterable[str]) -> None:
        for oldest in list(self._sent):
            if not all(work.is_completed() for work, _ in self._sent[oldest]):
                break
            del self._sent[oldest]
        message = self._sent.setdefault(key, [])
        for name in names:
            tensor = tensors[name].contiguous()
            if tensor.dtype != self._dtype_of(name):
                raise HfGpipeError(f"{name!r} is {tensor.dtype}; the other stage expects {self._dtype_of(name)}")
            work = dist.isend(tensor, self._peer, group=self._group, tag=self._tag)
            assert work is not None, "this process is neither sender nor receiver"
            message.append((work, tensor))

    def expect(self, key: Key, shapes: Shapes) -> None:
        message = []
        for name, shape in shapes.items():
            buffer = torch.empty(shape, dtype=self._dtype_of(name), device=self._device)
            work = dist.irecv(buffer, self._peer, group=self._group, tag=self._tag)
            assert work is not None, "this process is neither sender nor receiver"
            message.append((name, buffer, work))
        self._expected[key] = message

    def _receive(self, key: Key) -> dict[str, torch.Tensor]:
        message = self._expected.pop(key)
        for _, _, work in message:
            work.wait()
        return {name: buffer for name, buffer, _ in message}

    def arrived(self, key: Key) -> None:
        # gloo frees nothing before it is waited for, and says of nothing that it is completed. On CUDA the stream would
        # wait.
        if self._device.type == "cpu":
            self._wait(key)

    def flush(self) -> None:
        for key in list(self._sent):
            self._wait(key)

    def _wait(self, key: Key) -> None:
        for sent, _ in self._sent.pop(key, ()):
            sent.wait()

    def reset(self) -> None:
        # A message under way cannot be taken back: it keeps its tensors, and the other process may take part in it yet.
        self._has_failed = True

    def check(self) -> None:
        if self._has_failed:
            raise HfGpipeError(
                "a step failed in this process, and its messages to and from other processes cannot be taken back; "
                "correct the cause, and start all processes again, from the last checkpoint where there is one"
            )


def narrowed(dtype: torch.dtype, sent: torch.dtype | None) -> torch.dtype:
    """The type in which a tensor of type `dtype` is sent, where `sent` is that of wider floating-point numbers."""
    is_wider = sent is not None and dtype.is_floating_point and dtype.itemsize > sent.itemsize
    return sent if sent is not None and is_wider else dtype


def check_shapes(tensors: Tensors, shapes: Shapes) -> None:
    """Raise an error if a message has not the shapes that its receiver expects."""
    sent = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if sent != dict(shapes):
        raise HfGpipeError(f"the tensors to send have the shapes {sent}; the next stage expects {dict(shapes)}")
