"""Weights that are on the host and visit the device of their stage for the runs of its actions.

Each visiting stage has a buffer on its device while it is there. A table lets at most a few stages visit at once
(`hf_gpipe.modes.visits`), mostly two, so the device holds so many buffers of the largest stage's size and no more.

Weights that are not trained, such as those under LoRA adapters, come and are dropped. Of trained ones the gradients go
to the host at the end of a visit, where the optimizer updates the weights. On CUDA the host's memory is pinned, and
streams of their own copy beside the computation. On the CPU the memory is the device, and the host is the mapped file
of the checkpoint.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.routers import is_of_expert
from hf_gpipe.errors import UserError
from hf_gpipe.modes.visits.files import mapped_weights
from hf_gpipe.modes.visits.shared_memory import SharedMemory
from hf_gpipe.runtime.memory import ALIGNMENT, aligned
from hf_gpipe.settings.mode import Visitors


@dataclass(eq=False)
class _Buffer:
    """Memory of a device for the weights of one stage at a time."""

    memory: torch.Tensor
    is_free: torch.cuda.Event | None
    """The event after which the stage before no longer needs the buffer, on CUDA."""


@dataclass(eq=False)
class _Loaded:
    """The weights of a stage that is there."""

    buffer: _Buffer
    homes: dict[nn.Parameter, torch.Tensor]
    """The weights in CPU memory."""
    weights: dict[nn.Parameter, torch.Tensor]
    """The weights in the buffer."""
    earlier: dict[nn.Parameter, torch.Tensor]
    """The gradients that were on the host before, on CUDA or of a shared stage."""
    is_copied: torch.cuda.Event | None = None
    """The event after which all weights have come, on CUDA. None once the device waits for it."""
    has_begun: bool = False
    """Whether the weights are on their way, or there."""
    adds_gradients: bool = False
    """Whether the gradients of a shared stage's earlier visits have come."""


def leave_on_host(
    model: StageModel,
    visitors: Visitors,
    *,
    is_shared: bool = False,
    keeps_shared: bool = False,
    is_pinned: bool = True,
    files: str | os.PathLike[str] | None = None,
) -> None:
    """Move the weights of a stage that visit to the host, where they stay between visits; call it after assembly.

    Those of shared stages, which workers share, are then moved there (`hf_gpipe.modes.visits.shared_memory`). With
    `keeps_shared` weights stay that several stages use, because some of these stages may stay. The host's memory of a
    GPU is pinned, or pageable; then frozen weights that a checkpoint (`files`) has are its mapped files.

    Raises UserError for weights that bitsandbytes has quantised to 8 bits, whose layers keep memory of their own.
    """
    for parameter in _parameters(model):
        if hasattr(parameter, "SCB"):
            raise UserError(
                "offload_weights is given and the model is in 8 bits, whose layers keep the device's memory; quantise "
                "to 4 bits, or leave offload_weights out"
            )
        if model.device.type == "cpu" and not is_shared and parameter.requires_grad:
            # It changes, and must not depend on a file that may be replaced.
            parameter.data = parameter.data.clone()
    if model.device.type != "cpu" and not is_shared:
        visiting = _visiting(model, visitors, keeps_shared=keeps_shared)
        frozen = [parameter for parameter in visiting if not parameter.requires_grad]
        mapped = {} if is_pinned or files is None else mapped_weights(model, files, frozen)
        copied = [parameter for parameter in visiting if parameter not in mapped]
        homes = _host_memory([parameter.data for parameter in copied], is_pinned=is_pinned)
        for parameter, home in zip(copied, homes, strict=True):
            parameter.data = home.copy_(parameter.data)
        for parameter, tensor in mapped.items():
            parameter.data = tensor


class VisitingWeights:
    """The weights of the stages of this process that visit their devices.

    Args:
        models: these stages, by number, after `leave_on_host`.
        visitors: as there.
        memory: of shared stages, all of whose weights visit; None: the stages are this process's own.
        stages: the numbers of those whose weights visit; None: all.
        keeps_shared, is_pinned: as there.

    Attributes:
        hosted_bytes: of these weights, of each stage.
        visiting: the parameters that visit, of each stage, in order.
        parameters: all that visit.
    """

    def __init__(
        self,
        models: Mapping[int, StageModel],
        visitors: Visitors = "frozen",
        memory: SharedMemory | None = None,
        stages: Collection[int] | None = None,
        *,
        keeps_shared: bool = False,
        is_pinned: bool = True,
    ) -> None:
        models = {number: model for number, model in models.items() if stages is None or number in stages}
        if memory is None:
            self.visiting = {
                stage: _visiting(model, visitors, keeps_shared=keeps_shared) for stage, model in models.items()
            }
        else:
            self.visiting = {stage: _parameters(model) for stage, model in models.items()}
        self._memory, self._is_pinned = memory, is_pinned
        #: The shared memory of the gradients of shared stages.
        self._gradients = {} if memory is None else {n: memory.gradients(n, model) for n, model in models.items()}
        self._models = models
        self._devices = {stage: model.device for stage, model in models.items()}
        self.hosted_bytes = {stage: sum(aligned(p.nbytes) for p in own) for stage, own in self.visiting.items()}
        counts: defaultdict[nn.Parameter, int] = defaultdict(int)
        for own in self.visiting.values():
            for parameter in own:
                counts[parameter] += 1
        self.parameters = frozenset(counts)
        # A tied weight is in the buffer of each stage that uses it.
        self._tied = {stage: [p for p in own if counts[p] > 1] for stage, own in self.visiting.items()}
        self._free: defaultdict[torch.device, deque[_Buffer]] = defaultdict(deque)
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
        self._there: dict[int, _Loaded] = {}
        #: The gradients on their way to the host, and the event after which they have left, for each CUDA device.
        self._leaving: dict[torch.device, tuple[list[torch.Tensor], torch.cuda.Event]] = {}
        #: Gradients of earlier steps, to be added to the step's own once these have come.
        self._added: list[tuple[nn.Parameter, torch.Tensor]] = []

    def load(self, stage: int) -> None:
        """L: begin to copy the weights of a stage to its device; on the CPU copy them."""
        device = self._devices[stage]
        # The one that has been free for longest (`Visit.after`).
        buffer = self._free[device].popleft() if self._free[device] else self._new_buffer(device)
        homes = {parameter: parameter.data for parameter in self.visiting[stage]}
        for parameter in self._tied[stage]:
            for other in self._there.values():
                homes[parameter] = other.homes.get(parameter, homes[parameter])
        weights, start = {}, 0
        for parameter, home in homes.items():
            own = buffer.memory[start : start + home.nbytes]
            weights[parameter] = own.view(home.dtype).view(home.shape)
            start += aligned(home.nbytes)
        loaded = self._there[stage] = _Loaded(buffer, homes, weights, earlier := {})
        if buffer.is_free is None or self._is_pinned:
            self._begin(device, loaded)
        if buffer.is_free is not None or self._memory is not None:
            for parameter in homes:
                if parameter.grad is not None:
                    earlier[parameter], parameter.grad = parameter.grad, None
        for parameter, weight in weights.items():
            parameter.data = weight

    def _begin(self, device: torch.device, loaded: _Loaded) -> None:
        """Begin to copy the weights of a stage, once its buffer is free; on the CPU copy them."""
        loaded.has_begun = True
        if loaded.buffer.is_free is None:
            _copy(loaded.weights, loaded.homes)
            return
        stream = self._stream(device, "in")
        stream.wait_event(loaded.buffer.is_free)
        with torch.cuda.stream(stream):
            _copy(loaded.weights, loaded.homes)
            loaded.is_copied = stream.record_event()

    def enter(self, stage: int, *, adds_gradients: bool = False) -> None:
        """Before each action of a stage that is there: its device waits for the weights, once.

        Args:
            adds_gradients: whether the action adds to the gradients of the weights, so that those of earlier visits
                must be there.
        """
        loaded = self._there[stage]
        if not loaded.has_begun:
            # The process waits for a copy of pageable memory. So it comes after all actions of the stage before, which
            # the device has still to run.
            self._begin(self._devices[stage], loaded)
        if adds_gradients and not loaded.adds_gradients and self._memory is not None:
            loaded.adds_gradients = True
            self._fetch_gradients(stage)
        if loaded.is_copied is not None:
            torch.cuda.current_stream(self._devices[stage]).wait_event(loaded.is_copied)
            loaded.is_copied = None
        for parameter in self._tied[stage]:
            parameter.data = loaded.weights[parameter]

    def drop(self, stage: int) -> None:
        """D: the weights of a stage are those on the host again, and another stage may have the buffer.

        Their gradients begin their way to the host; on the CPU they are there. What autocast made of the weights goes
        with them.
        """
        device, loaded = self._devices[stage], self._there.pop(stage)
        if (weight_gradients := self._models[stage].weight_gradients) is not None:
            weight_gradients.forget()
        if self._memory is not None:
            self._give_gradients(stage, loaded)
        elif device.type == "cuda":
            gradients = {p: p.grad for p in loaded.homes if p.grad is not None}
            computed = torch.cuda.current_stream(device).record_event()
            loaded.buffer.is_free = computed
            if gradients:
                stream = self._stream(device, "out")
                stream.wait_event(computed)
                homes = _host_memory(list(gradients.values()), is_pinned=self._is_pinned)
                with torch.cuda.stream(stream):
                    for (parameter, gradient), home in zip(list(gradients.items()), homes, strict=True):
                        gradients[parameter] = home.copy_(gradient, non_blocking=True)
                self._leave(device, [p.grad for p in gradients])
            for parameter, home in loaded.homes.items():
                parameter.grad = None
                parameter.data = home
                parameter.grad = gradients.get(parameter, loaded.earlier.get(parameter))
            self._added += [(p, gradient) for p, gradient in loaded.earlier.items() if p in gradients]
        else:
            for parameter, home in loaded.homes.items():
                parameter.data = home
        self._free[device].append(loaded.buffer)

    def _fetch_gradients(self, stage: int) -> None:
        """Bring the gradients of a shared stage's earlier visits to its device; on the CPU they stay where they are."""
        device, homes = self._devices[stage], self._gradients[stage]
        there = {parameter: home.value for parameter, home in homes.items() if home.is_there}
        if device.type != "cuda":
            for parameter, value in there.items():
                parameter.grad = value
        elif there:
            stream = self._stream(device, "in")
            assert self._memory is not None, "the stage is shared"
            if (given := self._memory.given.get(stage)) is not None:
                stream.wait_event(given)
            for parameter, value in there.items():
                parameter.grad = torch.empty_like(value, device=device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for parameter, value in there.items():
                    assert parameter.grad is not None
                    parameter.grad.copy_(value, non_blocking=True)
            torch.cuda.current_stream(device).wait_stream(stream)

    def _give_gradients(self, stage: int, loaded: _Loaded) -> None:
        """Bring the gradients of a shared stage to their homes, at the end of its visit."""
        device, homes = self._devices[stage], self._gradients[stage]
        gradients = {p: home for p, home in homes.items() if p.grad is not None}
        if device.type == "cuda":
            at_end = torch.cuda.current_stream(device).record_event()
            loaded.buffer.is_free = at_end
            if gradients:
                stream = self._stream(device, "out")
                stream.wait_event(at_end)
                with torch.cuda.stream(stream):
                    for parameter, home in gradients.items():
                        assert parameter.grad is not None
                        home.value.copy_(parameter.grad, non_blocking=True)
                assert self._memory is not None, "the stage is shared"
                self._memory.given[stage] = self._leave(device, [p.grad for p in gradients])
        for parameter, home in gradients.items():
            gradient = parameter.grad
            assert gradient is not None
            if device.type != "cuda" and gradient.data_ptr() != home.value.data_ptr():
                home.value.copy_(gradient)
            home.is_there.fill_(1)
        for parameter, home_weight in loaded.homes.items():
            parameter.grad = None
            parameter.data = home_weight
            parameter.grad = loaded.earlier.get(parameter)

    def _leave(self, device: torch.device, gradients: list[torch.Tensor | None]) -> torch.cuda.Event:
        """Keep gradients until they have been copied to the host; returns when that is.

        The allocator would keep them too, but while the host is ahead of the device it would not give their memory to
        the next visits, so that the peak would depend on how far ahead the host is.
        """
        self._let_go(device)
        has_left = self._stream(device, "out").record_event()
        self._leaving[device] = [gradient for gradient in gradients if gradient is not None], has_left
        return has_left

    def _let_go(self, device: torch.device) -> None:
        """Free the gradients that leave: what the device computes from now on waits until they are on the host."""
        if device in self._leaving:
            _, has_left = self._leaving.pop(device)
            torch.cuda.current_stream(device).wait_event(has_left)

    def wait_for_host(self) -> Callable[[], None] | None:
        """Function that waits until the gradients of the visits that are over are on the host, and that any thread may
        call; None: they are there."""
        leaving = [stream.record_event() for (_, way), stream in self._streams.items() if way == "out"]
        if not leaving:
            return None

        def wait() -> None:
            for event in leaving:
                event.synchronize()

        return wait

    def finish(self) -> None:
        """Wait until the gradients of a step are on the host, and add those that were there before."""
        if (wait := self.wait_for_host()) is not None:
            wait()
        self._leaving.clear()
        for parameter, gradient in self._added:
            assert parameter.grad is not None, "it has come"
            parameter.grad += gradient
        self._added.clear()

    @contextmanager
    def visit(self, stage: int) -> Iterator[None]:
        """Context manager in which the weights of a stage are there, outside of a table. Others always are."""
        if stage not in self.visiting:
            yield
            return
        self.load(stage)
        try:
            self.enter(stage)
            yield
        finally:
            self.drop(stage)

    def reset(self) -> None:
        """End the visits of a failed step."""
        for stage in list(self._there):
            self.drop(stage)
        self.finish()

    def _new_buffer(self, device: torch.device) -> _Buffer:
        size = max(self.hosted_bytes[stage] for stage, own in self._devices.items() if own == device)
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        return _Buffer(memory, torch.cuda.current_stream(device).record_event() if is_cuda else None)

    def _stream(self, device: torch.device, way: str) -> torch.cuda.Stream:
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        return self._streams[device, way]


def keep(model: StageModel) -> None:
    """Let the weights of a stage stay on its device; on the CPU in memory, and not in the checkpoint's files."""
    if model.device.type == "cpu":
        for parameter in _parameters(model):
            parameter.data = parameter.data.clone()


def _visiting(model: StageModel, visitors: Visitors, *, keeps_shared: bool) -> dict[nn.Parameter, None]:
    """The parameters of a stage that visit, in order."""
    shared = {id(model.parameters[name]) for name in model.shared_names}
    experts = {id(parameter) for name, parameter in model.parameters.items() if is_of_expert(name)}

    def visits(parameter: nn.Parameter) -> bool:
        if parameter.requires_grad:
            return visitors == "all" and id(parameter) not in shared
        if visitors == "experts":
            return id(parameter) in experts
        return not (keeps_shared and id(parameter) in shared)

    return {parameter: None for parameter in _parameters(model) if visits(parameter)}


def _parameters(model: StageModel) -> dict[nn.Parameter, None]:
    return dict.fromkeys(p for p in model.model.parameters() if p.device.type != "meta")


def _host_memory(tensors: Sequence[torch.Tensor], *, is_pinned: bool) -> list[torch.Tensor]:
    """CPU memory for the values of some tensors.

    PyTorch rounds each piece of pinned memory up to a power of two. So several tensors share a piece that they fill.
    """
    homes: list[torch.Tensor] = []
    if not is_pinned:
        return [torch.empty_like(tensor, device="cpu") for tensor in tensors]
    while len(homes) < len(tensors):
        sizes = [aligned(tensor.nbytes) for tensor in tensors[len(homes) :]]
        # The largest piece that the rest can fill, and of one tensor at least.
        size = max(1 << sum(sizes).bit_length() - 1, 1 << (sizes[0] - 1).bit_length()) if sizes[0] else ALIGNMENT
        piece, start = torch.empty(size, dtype=torch.uint8, pin_memory=True), 0
        for tensor, own in zip(tensors[len(homes) :], sizes, strict=True):
            if start + own > size:
                break
            homes.append(piece[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            start += own
    return homes


def _copy(weights: Mapping[nn.Parameter, torch.Tensor], homes: Mapping[nn.Parameter, torch.Tensor]) -> None:
    for parameter, weight in weights.items():
        weight.copy_(homes[parameter], non_blocking=True)
