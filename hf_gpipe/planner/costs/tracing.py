"""Traces a stage's forward and backward without memory: the bytes that they keep and move, and their operations.

The stage runs on fake tensors: PyTorch passes shapes, types and kernels along and computes nothing. So the numbers come
from the code that will run, for any family, and a layer of a hundred gigabytes costs milliseconds. A few families
decide by values what they do next, such as which experts to run; their layers run with real values, on the CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.attention.known_mask import KnownMask
from hf_gpipe.adapters.modules.autocast import keeping_weights
from hf_gpipe.adapters.modules.dropout import keeping_random_numbers
from hf_gpipe.adapters.parts.ranks import Ranks
from hf_gpipe.adapters.stubs import EmbeddingStub
from hf_gpipe.libraries.torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    storage_id,
)
from hf_gpipe.libraries.transformers import rows_of_one_text
from hf_gpipe.losses.loss import PLAIN, Loss
from hf_gpipe.model.assembly import assemble
from hf_gpipe.planner.costs.gpu_attention import AttentionOfAGpu
from hf_gpipe.planner.costs.model_costs import NO_OPERATIONS, NO_SUMS, Operations, SumBeside, SumsOverRanks
from hf_gpipe.planner.costs.tracker import Phase, Tracker
from hf_gpipe.runtime.micro_batch import Context, MicroBatch
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.settings.division import Division

CPU = torch.device("cpu")
_Result = TypeVar("_Result")
#: The errors of layers that cannot run on fake tensors. The last: fake tensors cannot convert a module's type.
_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException, RuntimeError)


class Trace(NamedTuple):
    """The memory and the operations of a stage for one micro-batch, in bytes unless said otherwise.

    Attributes:
        converted: the weights that autocast converts, once for all micro-batches of a step. No other field counts them.
        saved: the tensors that the graph keeps, without its received input.
        saved_outside: the part of `saved` that was made before the first own layer was called.
        saves_hidden: whether the graph keeps the received hidden states.
        forward_levels: the memory after each new tensor of a forward with a graph, above the memory before it.
        forward_only_levels: the memory of a forward without a graph, likewise; empty for recomputed blocks alone.
        backward_levels: the memory of the backward above `saved`, the gradient that comes in included.
        deferred: the tensors that I keeps for W where the backward is split, of blocks that are not recomputed.
        row: the keys and values of the whole rows of a group, and their gradients.
        weight_flops: the operations of the backward's products for the weights of linear layers.
        outside, forward, backward: the operations of the forward before the first own layer was called, without
            products; the other operations of the forward; and the operations of the backward.
        sums_beside: the sums of the backward that run beside products.
    """

    converted: int
    saved: int
    saved_outside: int
    saves_hidden: bool
    forward_levels: tuple[int, ...]
    forward_only_levels: tuple[int, ...]
    backward_levels: tuple[int, ...]
    deferred: int
    row: int
    weight_flops: int
    outside: Operations = NO_OPERATIONS
    forward: Operations = NO_OPERATIONS
    backward: Operations = NO_OPERATIONS
    sums_beside: tuple[SumBeside, ...] = ()


class TracedRanks(Ranks):
    """The first rank of a worker, which counts the sums over all ranks and computes none.

    Attributes:
        phase: the phase that runs now; its products between the beginning and the end of a sum are counted.
        beside: the sums that have had products in between.
    """

    def __init__(self, division: Division) -> None:
        self.division, self.place = division, 0
        self._sums = self._none = SumsOverRanks(size=self.size)
        self.phase: Phase | None = None
        self.beside: list[SumBeside] = []

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        self._sums = self._sums.and_one(tensor.nbytes)
        return tensor.detach().clone()

    largest = total

    def begin_total(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._begun(self.total(tensor), tensor.nbytes)

    def _begun(self, result: torch.Tensor, num_bytes: int) -> Callable[[], torch.Tensor]:
        phase, before = self.phase, 0 if self.phase is None else self.phase.flops

        def end() -> torch.Tensor:
            if phase is not None and phase.flops > before:
                self.beside.append(SumBeside(self._none.and_one(num_bytes), phase.flops - before))
            return result

        return end

    def gathered(self, part: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        shape = list(part.shape)
        shape[dim] = sum(lengths)
        whole = part.new_empty(shape)
        # It sends half of what a sum does. Its latency counts whole.
        self._sums = self._sums.and_one(whole.nbytes // 2)
        return whole

    def take(self) -> SumsOverRanks:
        """Return the sums since the last call."""
        sums, self._sums = self._sums, self._none
        return sums


class StageTracer:
    """Runs a stage on micro-batches of any shape, on fake tensors, or where these will not do on real ones.

    On fake tensors the stage is made once: that takes longer than to run it.

    Args:
        layers: the numbers of the stage's layers.
        wants_gradient: boundary -> whether the gradient of each tensor that crosses it is wanted, by name.
        recompute_blocks: whether each block is recomputed in the backward.
        as_on_gpu: count attention as a GPU's kernels do it.
        is_real: whether to run on real tensors at once.

    Attributes:
        is_real: whether the stage runs on real tensors; known after the first run.
    """

    def __init__(
        self,
        adapter: Adapter,
        layers: range,
        wants_gradient: Callable[[int], Mapping[str, bool]],
        *,
        loss: Loss = PLAIN,
        recompute_blocks: bool = False,
        as_on_gpu: bool = False,
        is_real: bool = False,
        division: Division = Division(),
    ) -> None:
        self._ranks = None if division.is_whole else TracedRanks(division)
        if (autocast := adapter.autocast) is not None:
            # The CPU's, since a GPU's autocast changes no operation of these tensors.
            adapter = copy.copy(adapter)
            adapter.autocast = replace(autocast, device=CPU)
        self._adapter, self._layers, self._recompute_blocks = adapter, layers, recompute_blocks
        self._wants_gradient, self._loss = wants_gradient, loss
        self._as_on_gpu, self.is_real = as_on_gpu, is_real
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        #: The stage on fake tensors; None: it was not made yet.
        self._stage: Stage | None = None

    def trace(self, micro_batch: MicroBatch) -> Trace:
        """Run the stage once forward and once backward on a micro-batch, or on a member of its group."""
        return self._run(micro_batch, partial(_trace, ranks=self._ranks))

    def saved_bytes(self, micro_batch: MicroBatch, first_layer: int) -> tuple[int, int]:
        """Run the stage forward only, and return the graph's `saved`, and its part made before a layer was called.

        Args:
            micro_batch: the micro-batch that runs.
            first_layer: the number of that layer.
        """

        def run(stage: Stage, context: Context, tracker: Tracker) -> tuple[int, int]:
            forward = _forward(stage, context, tracker, first_layer)
            return forward.saved, forward.outside

        return self._run(micro_batch, run)

    def _run(self, micro_batch: MicroBatch, run: Callable[[Stage, Context, Tracker], _Result]) -> _Result:
        with keeping_random_numbers([CPU]):
            if not self.is_real:
                try:
                    self._stage = self._stage or self._made(self._mode)
                    # Under a mode for the device each call and each attribute takes longer.
                    with self._mode, nullcontext() if torch.get_default_device() == CPU else CPU:
                        return self._run_fake(self._stage, micro_batch, run)
                except _DEPENDS_ON_VALUES:
                    self.is_real, self._stage = True, None
            return self._tracked(self._made(None), micro_batch, run)

    def _run_fake(
        self, stage: Stage, micro_batch: MicroBatch, run: Callable[[Stage, Context, Tracker], _Result]
    ) -> _Result:
        stage.reset()
        # No fake tensor can be a mask that knows its answer: without a mask nothing is padded either.
        fake = {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            for name, tensor in micro_batch.inputs.items()
            if not isinstance(tensor, KnownMask) or tensor.is_padded
        }
        with rows_of_one_text() if "position_ids" not in fake else nullcontext():
            return self._tracked(stage, replace(micro_batch, inputs=fake), run)

    def _made(self, weights: FakeTensorMode | None) -> Stage:
        stage_model = assemble(self._adapter, self._layers, weights, CPU, ranks=self._ranks)
        stage_model.overlap_sums()
        if self._recompute_blocks:
            stage_model.checkpoint_blocks()
        return Stage(stage_model, self._wants_gradient)

    def _tracked(
        self, stage: Stage, micro_batch: MicroBatch, run: Callable[[Stage, Context, Tracker], _Result]
    ) -> _Result:
        context = context_of(stage.model, replace(micro_batch, loss=self._loss))
        tracker = Tracker(as_on_gpu=self._as_on_gpu)
        _ignore(tracker, stage, context)
        autocast = stage.model.adapter.autocast
        with AttentionOfAGpu() if self._as_on_gpu else nullcontext(), keeping_weights(autocast), tracker:
            if autocast is not None:
                stage.forward(context, keep_graph=True)
                stage.give(0)
            return run(stage, context, tracker)


def _trace(stage: Stage, context: Context, tracker: Tracker, ranks: TracedRanks | None) -> Trace:
    converted = tracker.live_bytes
    row = sum(tensor.nbytes for shared in stage.shared.values() for tensor in shared.tensors()) // 2
    with tracker.phase() as forward_only:
        # Nobody asks for this peak of recomputed blocks. But what a loss makes once is there after the forward.
        if stage.model.is_last or not stage.model.recomputes_blocks:
            stage.forward(context, keep_graph=False)
    sums = [NO_SUMS if ranks is None else ranks.take()]
    forward = _forward(stage, context, tracker, stage.model.start)
    phase = forward.phase
    sums.append(NO_SUMS if ranks is None else ranks.take())
    with tracker.phase() as backward:
        if ranks is not None:
            ranks.phase, ranks.beside = backward, []
        stage.backward(0, forward.gradients)
    sums.append(NO_SUMS if ranks is None else ranks.take())
    return Trace(
        converted=converted,
        saved=forward.saved,
        saved_outside=forward.outside,
        saves_hidden=forward.saves_hidden,
        forward_levels=tuple(phase.levels),
        forward_only_levels=tuple(forward_only.levels),
        backward_levels=tuple(level + forward.incoming for level in (0, *backward.levels)),
        deferred=_deferred_bytes(stage, context, forward.gradients),
        row=row,
        outside=Operations(moved=phase.moved_before, calls=phase.calls_before),
        forward=Operations(phase.flops, phase.moved - phase.moved_before, phase.calls - phase.calls_before, sums[1]),
        backward=Operations(backward.flops, backward.moved, backward.calls, sums[2]),
        # A linear layer's gradient of its input takes as many operations as its forward; the rest is for the weights.
        weight_flops=max(backward.linear_flops - phase.linear_flops, 0),
        sums_beside=() if ranks is None else tuple(ranks.beside),
    )


def _ignore(tracker: Tracker, stage: Stage, context: Context) -> None:
    """Let a tracker count nothing of what is there before a stage runs."""
    model, micro_batch = stage.model.model, context.micro_batch
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    tracker.ignore([*model.parameters(), *model.buffers(), *micro_batch.inputs.values()])
    tracker.ignore(p.grad for p in model.parameters() if p.grad is not None)
    tracker.ignore(context.carry.values())
    tracker.ignore(module.blank for module in model.modules() if isinstance(module, EmbeddingStub))
    if micro_batch.group_size > 1:
        # What is kept of whole rows: the first forward makes it.
        stage.forward(context, keep_graph=False)
        for shared in stage.shared.values():
            tracker.ignore(shared.tensors())


class _Forward(NamedTuple):
    """A forward with a graph, whose last fields are those of a `Trace`."""

    phase: Phase
    gradients: Mapping[str, torch.Tensor]
    """The gradients of the outputs, as the next stage sends them."""
    incoming: int
    """The bytes of these gradients."""
    saved: int
    outside: int
    saves_hidden: bool


def _forward(stage: Stage, context: Context, tracker: Tracker, first_layer: int) -> _Forward:
    saved_storages: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved_storages.add(storage_id(tensor.untyped_storage()))
        return tensor

    layer = stage.model.adapter.layers[first_layer]
    with (
        tracker.phase() as phase,
        stage.model.model.get_submodule(layer.modules[0]).register_forward_pre_hook(phase.enter_layers),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        outputs = stage.forward(context, keep_graph=True)
    wanted = [name for name, is_wanted in stage.trainable_outputs.items() if is_wanted and name in outputs]
    gradients = {name: torch.empty_like(outputs[name]) for name in wanted}
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
        saves_hidden=hidden is not None and storage_id(hidden.untyped_storage()) in saved_storages,
    )


def _deferred_bytes(stage: Stage, context: Context, gradients: Mapping[str, torch.Tensor]) -> int:
    """The bytes that I keeps for W: none without a block. Recomputed blocks keep as many: I does not run them again."""
    model = stage.model
    if model.recomputes_blocks or all(layer.kind != "block" for layer in model.layers):
        return 0
    classes, before = {module: type(module) for module in model.model.modules()}, model.weight_gradients
    # Linear layers give their weight gradients away; afterwards they are as before.
    model.defer_weight_gradients()
    try:
        stage.forward(context, keep_graph=True)
        stage.input_backward(0, gradients)
        return stage.deferred_bytes(0)
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
        model.weight_gradients = before
        if before is not None:
            before.is_of_all = False


def context_of(stage_model: StageModel, micro_batch: MicroBatch) -> Context:
    """The record of one micro-batch with an arbitrary carry, on torch's default device."""
    adapter = stage_model.adapter
    carry = {}
    if not stage_model.is_first:
        # T5's head has weights of N(0, 1). With inputs of N(0, 1) its probabilities would be subnormal numbers, with
        # which a CPU computes ten times more slowly.
        carry = {
            name: torch.randn(shape, dtype=adapter.carry_dtype(stage_model.start, name)).mul_(shape[-1] ** -0.5)
            for name, shape in adapter.carry_shapes(stage_model.start, micro_batch.inputs).items()
        }
    return Context(micro_batch, carry)
