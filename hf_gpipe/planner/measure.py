"""The costs of a model's layers from its configuration: no weights, no accelerator, seconds for any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_gpipe.adapters import Adapter, Autocast, StageModel
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.planner.costs import LayerCost, ModelCosts, SharedParameter
from hf_gpipe.planner.kinds import Place, open_model, places_of, reopen
from hf_gpipe.planner.tracing import Trace, trace_stage
from hf_gpipe.planner.weights import Weights
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.loss import PLAIN, TokenLoss


def model_costs(
    config: PreTrainedConfig,
    workload: Workload,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    model_class: type[PreTrainedModel] | None = None,
    *,
    trust_remote_code: bool = False,
    autocast: Autocast | None = None,
    loss: TokenLoss = PLAIN,
    as_on_gpu: bool = False,
) -> ModelCosts:
    """What each layer costs for one micro-batch; nothing is measured, so no seconds are known.

    Args:
        config: the model's; further arguments are those of `adapter_for`.
        workload: the micro-batch.
        loss: of the target tokens.
        as_on_gpu: whether the stages will run on GPUs, whose attention keeps less.

    Raises:
        UnsupportedModelError: the family cannot be split exactly.
    """
    adapter, places = open_model(
        config, dtype, attn_implementation, model_class, trust_remote_code=trust_remote_code, autocast=autocast
    )
    opened = Opened(adapter, places, Weights(adapter, adapter.reference))
    return costs_of_opened(opened, workload, loss=loss, as_on_gpu=as_on_gpu)


def costs_of(
    adapter: Adapter,
    workload: Workload,
    *,
    peft: PeftAdapter | None = None,
    loss: TokenLoss = PLAIN,
    as_on_gpu: bool = False,
) -> ModelCosts:
    """`model_costs` of a model that has its adapter, and perhaps PEFT layers to be trained alone."""
    return costs_of_opened(Opened.of(adapter, peft), workload, loss=loss, as_on_gpu=as_on_gpu)


@dataclass(frozen=True)
class Opened:
    """A model to measure on: shorter than the whole one where that tells everything.

    Attributes:
        adapter: of the model at hand.
        places: the layers of the whole model, and the layer at hand that each is like.
        weights: of the model at hand.
        peft: PEFT layers to put into each stage.
    """

    adapter: Adapter
    places: Sequence[Place]
    weights: Weights
    peft: PeftAdapter | None = None

    @classmethod
    def of(cls, adapter: Adapter, peft: PeftAdapter | None = None) -> Opened:
        """A model that has its adapter."""
        if peft is None:
            short, places = reopen(adapter)
            return cls(short, places, Weights(short, short.reference))
        whole = adapter.skeleton()
        peft.inject(whole)
        return cls(adapter, places_of(adapter, whole), Weights(adapter, whole), peft)

    @property
    def alike(self) -> list[int]:
        """For each layer at hand, the first one that is like it."""
        return [place.like for place in places_of(self.adapter)]


def costs_of_opened(
    opened: Opened, workload: Workload, *, loss: TokenLoss = PLAIN, as_on_gpu: bool = False
) -> ModelCosts:
    """The costs of all layers of a model from those of each kind."""
    adapter, places, weights = opened.adapter, opened.places, opened.weights
    workload = workload.within(adapter)
    tracer = _Tracer(opened, workload, loss, as_on_gpu)
    measured = {like: tracer.cost(like) for like in dict.fromkeys(place.like for place in places)}
    first: dict[str, int] = {}
    for index, place in enumerate(places):
        for name in weights.shared[place.like]:
            first.setdefault(name, index)
    # The boundaries of a short model are those of a long one; in a whole model every one may be another.
    is_whole = len(places) == len(adapter.layers)
    layers = []
    for index, place in enumerate(places):
        input_bytes, gradient_bytes = tracer.boundary(index if is_whole else place.like)
        shared = tuple(SharedParameter(name, weights.sizes[name], first[name]) for name in weights.shared[place.like])
        layers.append(
            replace(
                measured[place.like],
                name=place.name,
                shared=shared,
                input_bytes=input_bytes,
                gradient_input_bytes=gradient_bytes,
            )
        )
    compute = adapter.dtype if adapter.autocast is None else adapter.autocast.dtype
    return ModelCosts(
        layers=tuple(layers),
        workload=workload,
        micro_batch_bytes=sum(tensor.nbytes for tensor in tracer.inputs.values()),
        dtype=_name(adapter.dtype),
        compute_dtype=_name(compute),
    )


@dataclass(frozen=True)
class _Kept:
    """A layer as a stage of its own; of the bytes that its graph keeps, those of the layer and those of the stage."""

    trace: Trace
    own: int
    of_stage: int


class _Tracer:
    """Traces one layer of each kind as a stage of its own."""

    def __init__(self, opened: Opened, workload: Workload, loss: TokenLoss, as_on_gpu: bool) -> None:
        self.adapter = opened.adapter
        self.weights = opened.weights
        self.inputs = workload.inputs(opened.adapter)
        self._peft = opened.peft
        self._loss = loss
        self._as_on_gpu = as_on_gpu
        self._recomputes_blocks = self._can_recompute_blocks()

    def boundary(self, index: int) -> tuple[int, int]:
        """Bytes of what crosses the boundary before a layer, and of what comes back."""
        if index == 0:
            return 0, 0
        wanted = self.weights.wants_gradient(index)
        sizes = self._input_bytes(index)
        return sum(sizes.values()), sum(size for name, size in sizes.items() if wanted[name])

    def _input_bytes(self, index: int) -> dict[str, int]:
        shapes = self.adapter.carry_shapes(index, self.inputs) if index else {}
        return {n: prod(shape) * self.adapter.carry_dtype(index, n).itemsize for n, shape in shapes.items()}

    def cost(self, index: int) -> LayerCost:
        """A layer's costs; its name, its shared parameters and its boundary are filled in for each layer like it."""
        layer = self.adapter.layers[index]
        full = self._kept(index, recompute_blocks=False)
        block = self._kept(index, recompute_blocks=True) if layer.kind == "block" and self._recomputes_blocks else full
        sizes = self._input_bytes(index)
        hidden = sizes.get("hidden", 0)
        # The decoder's blocks read the encoder's output until the last of them is done.
        entrance = sizes["encoder_hidden"] if layer.kind == "embedding" and "encoder_hidden" in sizes else 0
        return LayerCost(
            name=layer.name,
            kind=layer.kind,
            stack=layer.stack,
            parameters=self.weights.own[index],
            shared=(),
            buffer_bytes=self.weights.buffer_bytes[index],
            forward_flops=full.trace.forward_flops,
            backward_flops=full.trace.backward_flops,
            input_bytes=0,
            gradient_input_bytes=0,
            saved_bytes=full.own,
            saved_input_bytes=entrance or (hidden if full.trace.saves_hidden else 0),
            stage_saved_bytes=full.of_stage,
            block_saved_bytes=block.own,
            block_saved_input_bytes=entrance or (hidden if full.trace.saves_hidden or layer.kind == "block" else 0),
            block_stage_saved_bytes=block.of_stage,
            forward_working_bytes=full.trace.forward_peak,
            forward_only_working_bytes=full.trace.forward_only_peak + sum(sizes.values()),
            backward_working_bytes=full.trace.backward_peak,
            block_backward_working_bytes=block.trace.backward_peak,
        )

    def _kept(self, index: int, *, recompute_blocks: bool) -> _Kept:
        """What a layer's graph keeps, apart from what is made once for all layers of the stage."""
        trace = self._trace(index, index + 1, recompute_blocks=recompute_blocks)
        own = trace.saved - trace.saved_outside
        if (second := self._second_of_shared_tables(index)) is None:
            return _Kept(trace, own, trace.saved_outside)
        # The first block of a stage makes the bias, and the others are handed it.
        pair = self._trace(second - 1, second + 1, recompute_blocks=recompute_blocks, window_from=second)
        own = pair.saved - pair.saved_outside
        between = self._input_bytes(second).get("hidden", 0)
        return _Kept(trace, own, max(trace.saved - own, pair.saved - between - 2 * own, 0))

    def _second_of_shared_tables(self, index: int) -> int | None:
        """Number of the second block of a stack whose first block makes something for all of them, as T5's bias."""
        layer = self.adapter.layers[index]
        stack = next(stack for stack in self.adapter.stacks if stack.name == layer.stack)
        if layer.kind != "block" or not self.adapter.tables[stack.name]:
            return None
        return next(i for i, layer in enumerate(self.adapter.layers) if layer.name == stack.blocks[1])

    def _trace(self, start: int, stop: int, *, recompute_blocks: bool = False, window_from: int | None = None) -> Trace:
        def build() -> StageModel:
            stage_model = StageModel(self.adapter, start, stop)
            if self._peft is not None:
                self._peft.inject(stage_model.model)
            if recompute_blocks:
                stage_model.checkpoint_blocks()
            return stage_model

        return trace_stage(
            build,
            self.inputs,
            self.weights.wants_gradient,
            loss=self._loss,
            as_on_gpu=self._as_on_gpu,
            window_from=window_from,
        )

    def _can_recompute_blocks(self) -> bool:
        """Whether the family's blocks know how; others keep what they keep."""
        try:
            StageModel(self.adapter, 1, 2).checkpoint_blocks()
        except (AttributeError, ValueError):
            return False
        return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
