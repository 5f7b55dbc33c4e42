"""One stage's forward and backward without memory: what they keep, how far they rise, how much they multiply.

The stage runs on fake tensors: PyTorch passes shapes, types and kernels along and computes nothing. So the numbers
are those of the code that will run, of any family, and a layer of a hundred gigabytes costs milliseconds. A few
families decide by values what they do next, such as which experts to run; their layers run in earnest, on the CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.dropout import default_generator
from hf_gpipe.checkpoint.hub import initialise
from hf_gpipe.runtime.custom_loss import Loss
from hf_gpipe.runtime.loss import PLAIN
from hf_gpipe.runtime.micro_batch import Context, MicroBatch
from hf_gpipe.runtime.stage import Stage

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
CPU = torch.device("cpu")
_Result = TypeVar("_Result")
#: The last is a module that fake tensors cannot convert to another type.
_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException, RuntimeError)


@dataclass(frozen=True)
class Trace:
    """One micro-batch on one stage; bytes unless said otherwise.

    Attributes:
        saved: what the graph keeps, its received input apart.
        saved_outside: the part of it that was made before the first own layer was called.
        saves_hidden: whether the graph keeps the received hidden states.
        forward_peak: of a forward with a graph, above what was there before it.
        forward_only_peak: of a forward without one.
        backward_peak: above `saved`, the gradient that comes in included.
        deferred: of blocks that are not recomputed, what I keeps for W where the backward is split.
        forward_flops, backward_flops: of matrix products, numbers.
        weight_flops: of the backward's matrix products those for the weights of linear layers.
        stage_calls, forward_calls, backward_calls: numbers of operations: of the forward those before the first own
            layer was called, the others, and the backward's. Views are not counted.
    """

    saved: int
    saved_outside: int
    saves_hidden: bool
    forward_peak: int
    forward_only_peak: int
    backward_peak: int
    deferred: int
    forward_flops: int
    backward_flops: int
    weight_flops: int
    stage_calls: int
    forward_calls: int
    backward_calls: int


@dataclass
class Phase:
    """A part of a run under a `Tracker`.

    Attributes:
        start_bytes: what was alive when it began.
        peak_bytes: the most that was alive beyond that.
        flops: of its matrix products, 2 for a multiplication and its addition.
        linear_flops: the part of them that has the form of a linear layer.
        calls: operations, views apart.
        calls_before: those of them before the first own layer was called.
        is_inside: whether an own layer was called, so that what is made from now on is the layers'.
    """

    start_bytes: int
    peak_bytes: int = 0
    flops: int = 0
    linear_flops: int = 0
    calls: int = 0
    calls_before: int = 0
    is_inside: bool = False

    def enter_layers(self, *_: Any) -> None:
        """As a hook of the first own layer."""
        if not self.is_inside:
            self.is_inside, self.calls_before = True, self.calls


class Tracker(TorchDispatchMode):
    """Follows every tensor's memory from the operation that makes it until it is freed.

    Attributes:
        live_bytes: what was made while the mode was on and is still alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self._phase: Phase | None = None
        self._known: dict[int, tuple[weakref.ref[Any], int, Phase | None, bool]] = {}

    def ignore(self, tensors: Any) -> None:
        """Count these tensors' memory never: it was there before."""
        for tensor in tensors:
            self._note(tensor, is_counted=False)

    @contextmanager
    def phase(self) -> Iterator[Phase]:
        """Context manager that notes what runs in it."""
        self._phase = Phase(self.live_bytes)
        try:
            yield self._phase
        finally:
            self._phase = None

    def bytes_outside(self, phase: Phase) -> int:
        """The bytes that a phase made before its first own layer was called, and that are still alive."""
        return sum(size for _, size, made_in, is_inside in self._known.values() if made_in is phase and not is_inside)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # more than half of all calls
        kwargs = kwargs or {}
        if self._phase is not None and not func.is_view:
            self._phase.calls += 1
        # A product by 4-bit weights converts them back first, as its backward does.
        is_quantised = func.name() == _QUANTISED
        weights = args[0].new_empty(args[2]) if is_quantised else None
        if weights is not None:
            self._note(weights)
        is_grouped = func._overloadpacket is _aten._grouped_mm and isinstance(args[0], FakeTensor)
        result = _grouped_output(*args, **kwargs) if is_grouped else func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor)
        formula = _quantised if is_quantised else _FLOPS.get(func._overloadpacket)
        if formula is not None and self._phase is not None:
            flops = int(formula(*args, **kwargs, out_val=result))
            self._phase.flops += flops
            if is_quantised or func._overloadpacket in _LINEAR:
                self._phase.linear_flops += flops
        return result

    def _note(self, tensor: torch.Tensor, *, is_counted: bool = True) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._known:
            return
        size = storage.nbytes() if is_counted else 0
        phase = self._phase
        is_inside = phase is not None and phase.is_inside
        self._known[number] = (weakref.ref(storage, lambda _: self._forget(number)), size, phase, is_inside)
        self.live_bytes += size
        if phase is not None:
            phase.peak_bytes = max(phase.peak_bytes, self.live_bytes - phase.start_bytes)

    def _forget(self, number: int) -> None:
        self.live_bytes -= self._known.pop(number)[1]


def _attention(query: Any, key: Any, value: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _grouped_output(left: torch.Tensor, right: torch.Tensor, ends: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    """The result of a product of groups of rows with a matrix each; PyTorch's own rule allows only bfloat16."""
    if left.dim() == right.dim() == 2:
        return left.new_empty((ends.shape[0], left.shape[0], right.shape[1]))
    return left.new_empty((*left.shape[:-1], right.shape[-1]))


def _grouped(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    """Products of groups of rows with a matrix each: every row, or every column of a gradient, is multiplied once."""
    return int(2 * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _quantised(inputs: Any, weight: Any, shape: Any, *args: Any, **kwargs: Any) -> int:
    """A product by 4-bit weights of this shape."""
    return int(2 * inputs.numel() * shape[0])


#: The operation of bitsandbytes' 4-bit layers.
_QUANTISED = "bitsandbytes::gemm_4bit"
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._grouped_mm: _grouped,
}
#: The products of linear layers and experts. Those of attention have a batch.
_LINEAR = {_aten.mm, _aten.addmm, _aten.addmm_, _aten._grouped_mm}


class _AttentionOfAGpu(TorchFunctionMode):
    """The kernels of attention on a GPU draw dropout inside of them, which the CPU's cannot: there it costs memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def trace_stage(
    build: Callable[[], StageModel],
    inputs: Mapping[str, torch.Tensor],
    wants_gradient: Callable[[int], Mapping[str, bool]],
    *,
    loss: Loss = PLAIN,
    as_on_gpu: bool = False,
    is_real: bool = False,
) -> Trace:
    """Run a stage once forward and once backward on fake tensors, or where these will not do on real ones.

    Args:
        build: makes the stage, without weights.
        inputs: what `Adapter.prepare` made of a micro-batch.
        wants_gradient: boundary -> for each tensor that crosses it, whether its gradient is wanted.
        loss: of the micro-batch.
        as_on_gpu: count attention as a GPU's kernels do it.
        is_real: whether to run on real tensors at once.
    """
    return _on_fake_tensors(
        build,
        inputs,
        lambda model, given: _trace(Stage(model, wants_gradient, loss), given, as_on_gpu=as_on_gpu),
        is_real=is_real,
    )


def saved_bytes(
    build: Callable[[], StageModel],
    inputs: Mapping[str, torch.Tensor],
    wants_gradient: Callable[[int], Mapping[str, bool]],
    first_layer: int,
    *,
    loss: Loss = PLAIN,
    as_on_gpu: bool = False,
) -> tuple[int, int]:
    """Run a stage forward only: the graph's `saved`, and of it what was made before a layer was called.

    Args:
        first_layer: number of that layer.
    The other arguments are those of `trace_stage`.
    """

    def run(model: StageModel, given: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        stage = Stage(model, wants_gradient, loss)
        context, tracker = _prepare(stage, given)
        with _kernels(as_on_gpu), tracker:
            forward = _forward(stage, context, tracker, first_layer)
        return forward.saved, forward.outside

    return _on_fake_tensors(build, inputs, run)


def _on_fake_tensors(
    build: Callable[[], StageModel],
    inputs: Mapping[str, torch.Tensor],
    run: Callable[[StageModel, Mapping[str, torch.Tensor]], _Result],
    *,
    is_real: bool = False,
) -> _Result:
    generator = default_generator(CPU)
    state = generator.get_state()

    def run_real() -> _Result:
        stage_model = build()
        initialise(stage_model, CPU, seed=0)
        stage_model.seal(CPU)
        return run(stage_model, inputs)

    try:
        if is_real:
            return run_real()
        stage_model = build()
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.device(CPU):
            materialise(stage_model)
            stage_model.seal(CPU)
            return run(stage_model, {name: mode.from_tensor(tensor) for name, tensor in inputs.items()})
    except _DEPENDS_ON_VALUES:
        return run_real()
    finally:
        generator.set_state(state)


def _trace(stage: Stage, inputs: Mapping[str, torch.Tensor], *, as_on_gpu: bool) -> Trace:
    context, tracker = _prepare(stage, inputs)
    with _kernels(as_on_gpu), tracker:
        with tracker.phase() as forward_only:
            stage.forward(context, keep_graph=False)
        stage.reset()
        forward = _forward(stage, context, tracker, stage.model.start)
        with tracker.phase() as backward:
            stage.backward(0, forward.gradients)
        deferred = _deferred_bytes(stage, context, forward.gradients)
    return Trace(
        saved=forward.saved,
        saved_outside=forward.outside,
        saves_hidden=forward.saves_hidden,
        forward_peak=forward.phase.peak_bytes,
        forward_only_peak=forward_only.peak_bytes,
        backward_peak=backward.peak_bytes + forward.incoming,
        deferred=deferred,
        forward_flops=forward.phase.flops,
        backward_flops=backward.flops,
        # A linear layer's gradient of its input takes as many operations as its forward; the rest is for the weights.
        weight_flops=max(backward.linear_flops - forward.phase.linear_flops, 0),
        stage_calls=forward.phase.calls_before,
        forward_calls=forward.phase.calls - forward.phase.calls_before,
        backward_calls=backward.calls,
    )


def _prepare(stage: Stage, inputs: Mapping[str, torch.Tensor]) -> tuple[Context, Tracker]:
    """A micro-batch for the stage, and a tracker that counts nothing of what is there now."""
    context = context_of(stage.model, inputs)
    model, tracker = stage.model.model, Tracker()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    tracker.ignore([*model.parameters(), *model.buffers(), *context.micro_batch.inputs.values()])
    tracker.ignore(p.grad for p in model.parameters() if p.grad is not None)
    tracker.ignore(context.carry.values())
    return context, tracker


@dataclass(frozen=True)
class _Forward:
    """A forward with a graph.

    Attributes:
        phase: what ran.
        gradients: for the outputs, of the next stage.
        incoming: their bytes.
        saved, outside, saves_hidden: as in `Trace`.
    """

    phase: Phase
    gradients: Mapping[str, torch.Tensor]
    incoming: int
    saved: int
    outside: int
    saves_hidden: bool


def _forward(stage: Stage, context: Context, tracker: Tracker, first_layer: int) -> _Forward:
    saved_storages: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved_storages.add(tensor.untyped_storage()._cdata)
        return tensor

    layer = stage.model.adapter.layers[first_layer]
    with (
        tracker.phase() as phase,
        stage.model.model.get_submodule(layer.modules[0]).register_forward_pre_hook(phase.enter_layers),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        outputs = stage.forward(context, keep_graph=True)
    gradients = {name: torch.empty_like(outputs[name]) for name, wanted in stage.trainable_outputs.items() if wanted}
    incoming = sum(gradient.untyped_storage().nbytes() for gradient in gradients.values())
    del outputs
    hidden = context.carry.get("hidden")
    saved = tracker.live_bytes - phase.start_bytes - incoming
    return _Forward(
        phase,
        gradients,
        incoming,
        saved=saved,
        outside=min(tracker.bytes_outside(phase), saved),
        saves_hidden=hidden is not None and hidden.untyped_storage()._cdata in saved_storages,
    )


def _deferred_bytes(stage: Stage, context: Context, gradients: Mapping[str, torch.Tensor]) -> int:
    """What I keeps. Without a block it is nothing, and of recomputed blocks the same: nothing is run again for it."""
    is_recomputed = any(getattr(module, "gradient_checkpointing", False) for module in stage.model.model.modules())
    if is_recomputed or all(layer.kind != "block" for layer in stage.model.layers):
        return 0
    stage.model.defer_weight_gradients()
    stage.forward(context, keep_graph=True)
    stage.input_backward(0, gradients)
    return stage.deferred_bytes(0)


@contextmanager
def _kernels(as_on_gpu: bool) -> Iterator[None]:
    if not as_on_gpu:
        yield
        return
    with _AttentionOfAGpu():
        yield


def materialise(stage_model: StageModel) -> None:
    """Give the stage's tensors memory of torch's default device without any values; ties stay ties."""
    memory: dict[torch.Tensor, torch.Tensor] = {}
    for module in stage_model.model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in memory:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                memory[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            setattr(module, name, memory[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    if stage_model.adapter.quantisation is not None:
        stage_model.adapter.quantisation.lay_out(stage_model.model, CPU)


def context_of(stage_model: StageModel, inputs: Mapping[str, torch.Tensor]) -> Context:
    """The record of one micro-batch with an arbitrary carry, on torch's default device."""
    adapter = stage_model.adapter
    carry = {}
    if not stage_model.is_first:
        # T5's head has weights of N(0, 1). With inputs of N(0, 1) its probabilities would be subnormal numbers, with
        # which a CPU computes ten times more slowly.
        carry = {
            name: torch.randn(shape, dtype=adapter.carry_dtype(stage_model.start, name)).mul_(shape[-1] ** -0.5)
            for name, shape in adapter.carry_shapes(stage_model.start, inputs).items()
        }
    num_targets = inputs["labels"].numel() if "labels" in inputs else 1
    return Context(MicroBatch(0, inputs, seed=0, num_units=num_targets, num_micro_batches=1), carry)
