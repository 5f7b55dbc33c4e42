"""The costs of a model's layers without weights and without an accelerator, in seconds for any size.

One layer of each class runs as a stage of its own on fake tensors (tracing.py). No time is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.planner.costs import GraphCost, LayerCost, ModelCosts, SharedParameter
from hf_gpipe.planner.layer_classes import ModelLayers, to_run
from hf_gpipe.planner.tracing import Trace, trace_stage
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.loss import PLAIN, TokenLoss

Inputs = Mapping[str, torch.Tensor]


def trace_costs(
    adapter: Adapter,
    workload: Workload,
    *,
    peft: PeftAdapter | None = None,
    loss: TokenLoss = PLAIN,
    as_on_gpu: bool = False,
) -> ModelCosts:
    """Return the costs of each layer of a model for one micro-batch. For several sizes a `LayerTracer` is quicker.

    Args:
        adapter: the model's.
        workload: the micro-batch.
        peft: PEFT layers that alone are trained.
        loss: of the target tokens.
        as_on_gpu: whether the stages will run on GPUs, whose attention keeps less.
    """
    return LayerTracer(adapter, peft=peft, loss=loss, as_on_gpu=as_on_gpu).costs(workload)


class LayerTracer:
    """Traces the layers of one model. Arguments are those of `trace_costs`.

    Attributes:
        layers: of the model.
        run: the model whose layers are run for it.
        like: for each layer of the model, the number of the one that is run for it.
        loss: of the target tokens.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        peft: PeftAdapter | None = None,
        loss: TokenLoss = PLAIN,
        as_on_gpu: bool = False,
    ) -> None:
        self.layers = ModelLayers(adapter, peft)
        self.run, self.like = to_run(self.layers)
        self.loss = loss
        self._as_on_gpu = as_on_gpu
        self._recomputes_blocks = self._can_recompute_blocks()

    def costs(self, workload: Workload) -> ModelCosts:
        """Return the costs of each layer for one micro-batch."""
        adapter, layers = self.layers.adapter, self.layers
        workload = workload.within(adapter)
        inputs = workload.inputs(adapter)
        traced = {index: self._traced(index, inputs) for index in dict.fromkeys(self.like)}
        owner: dict[str, int] = {}
        for index, names in enumerate(layers.shared):
            for name in names:
                owner.setdefault(name, index)
        costs = []
        for index, layer in enumerate(adapter.layers):
            one = traced[self.like[index]]
            sizes = boundary_bytes(adapter, index, inputs)
            wanted = layers.wants_gradient(index) if index else {}
            costs.append(
                LayerCost(
                    name=layer.name,
                    kind=layer.kind,
                    stack=layer.stack,
                    parameters=layers.own[index],
                    shared=tuple(SharedParameter(n, layers.sizes[n], owner[n]) for n in layers.shared[index]),
                    buffer_bytes=layers.buffer_bytes[index],
                    forward_flops=one.trace.forward_flops,
                    backward_flops=one.trace.backward_flops,
                    input_bytes=sum(sizes.values()),
                    gradient_input_bytes=sum(size for name, size in sizes.items() if wanted[name]),
                    forward_working_bytes=one.trace.forward_peak,
                    forward_only_working_bytes=one.trace.forward_only_peak + one.received_bytes,
                    plain=one.plain,
                    block=one.block,
                )
            )
        compute = adapter.dtype if adapter.autocast is None else adapter.autocast.dtype
        return ModelCosts(
            layers=tuple(costs),
            workload=workload,
            micro_batch_bytes=sum(tensor.nbytes for tensor in inputs.values()),
            dtype=_name(adapter.dtype),
            compute_dtype=_name(compute),
        )

    def _traced(self, index: int, inputs: Inputs) -> _Traced:
        """A layer of the model that is run."""
        layer = self.run.adapter.layers[index]
        sizes = boundary_bytes(self.run.adapter, index, inputs)
        hidden = sizes.get("hidden", 0)
        trace = self._trace(index, index + 1, inputs)
        saved_input = hidden if trace.saves_hidden else 0
        block, saved_block_input = trace, saved_input
        if layer.kind == "block":
            saved_block_input = hidden
            if self._recomputes_blocks:
                block = self._trace(index, index + 1, inputs, recompute_blocks=True)
        if layer.kind == "embedding" and "encoder_hidden" in sizes:
            # The decoder's blocks read the encoder's output until the last of them is done.
            saved_input = saved_block_input = sizes["encoder_hidden"]
        return _Traced(
            trace,
            self._graph_cost(index, inputs, trace, saved_input, recompute_blocks=False),
            self._graph_cost(index, inputs, block, saved_block_input, recompute_blocks=block is not trace),
            sum(sizes.values()),
        )

    def _graph_cost(
        self, index: int, inputs: Inputs, trace: Trace, saved_input: int, *, recompute_blocks: bool
    ) -> GraphCost:
        """The bytes that a layer's graph keeps, apart from what is made once for all layers of the stage."""
        own, outside = trace.saved - trace.saved_outside, trace.saved_outside
        if (second := self._second_of_shared_tables(index)) is not None:
            # The first block of a stage makes the bias, and the others are handed it.
            pair = self._trace(second - 1, second + 1, inputs, recompute_blocks=recompute_blocks, window_from=second)
            own = pair.saved - pair.saved_outside
            between = boundary_bytes(self.run.adapter, second, inputs).get("hidden", 0)
            outside = max(trace.saved - own, pair.saved - between - 2 * own, 0)
        return GraphCost(own, saved_input, outside, trace.backward_peak)

    def _second_of_shared_tables(self, index: int) -> int | None:
        """Number of the second block of a stack whose first block makes something for all of them, as T5's bias."""
        adapter = self.run.adapter
        layer = adapter.layers[index]
        stack = next(stack for stack in adapter.stacks if stack.name == layer.stack)
        if layer.kind != "block" or not adapter.tables[stack.name]:
            return None
        return next(i for i, layer in enumerate(adapter.layers) if layer.name == stack.blocks[1])

    def _trace(
        self, start: int, stop: int, inputs: Inputs, *, recompute_blocks: bool = False, window_from: int | None = None
    ) -> Trace:
        def build() -> StageModel:
            stage_model = StageModel(self.run.adapter, start, stop)
            if self.run.peft is not None:
                self.run.peft.inject(stage_model.model)
            if recompute_blocks:
                stage_model.checkpoint_blocks()
            return stage_model

        return trace_stage(
            build,
            inputs,
            self.run.wants_gradient,
            loss=self.loss,
            as_on_gpu=self._as_on_gpu,
            window_from=window_from,
        )

    def _can_recompute_blocks(self) -> bool:
        """Whether the family's blocks know how; others keep what they keep."""
        try:
            StageModel(self.run.adapter, 1, 2).checkpoint_blocks()
        except (AttributeError, ValueError):
            return False
        return True


@dataclass(frozen=True)
class _Traced:
    """A layer that was run as a stage of its own."""

    trace: Trace
    plain: GraphCost
    block: GraphCost
    received_bytes: int


def boundary_bytes(adapter: Adapter, index: int, inputs: Inputs) -> dict[str, int]:
    """The bytes of each tensor that crosses the boundary before a layer."""
    shapes = adapter.carry_shapes(index, inputs) if index else {}
    return {name: prod(shape) * adapter.carry_dtype(index, name).itemsize for name, shape in shapes.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
