"""The costs of a model's layers without weights and without an accelerator, in seconds for any size.

One layer of each class runs as a stage of its own on fake tensors (tracing.py); no time is measured.

Two layers are alike when their modules, the shapes of their weights and the plain values that their code reads are, and
the configuration says the same of both. Only one of several layers that are alike is run, so the costs of a model are
the costs of a few layers. Each run makes the whole model without memory, which for a thousand blocks takes seconds. So
a deep model's layers are run in a short model, where the short model has a layer of every class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.modules.quantised import size_of_quantised
from hf_gpipe.adapters.observation.tiny import BLOCK_COUNTS
from hf_gpipe.adapters.routers import is_of_expert
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.losses.loss import PLAIN, Loss, whole_logits
from hf_gpipe.planner.costs.model_costs import GraphCost, LayerCost, ModelCosts, SharedParameter
from hf_gpipe.planner.costs.tracing import StageTracer, Trace
from hf_gpipe.planner.parameters import Parameters
from hf_gpipe.planner.workload import Workload
from hf_gpipe.registry import parts_of_modes
from hf_gpipe.settings.division import Division
from hf_gpipe.settings.optimizers import LEAST_8_BIT_ELEMENTS

Inputs = Mapping[str, torch.Tensor]

#: The number of blocks per stack of a short model.
FEW_BLOCKS = 8

#: The fewest rows that are traced: a single row is not padded, and there may be no mask.
FEWEST_ROWS = 2

Numbers = TypeVar("Numbers", bound=tuple[Any, ...])
"""A tuple of whole numbers and of such tuples."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
#: Attributes that number a block and change nothing else.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")


class ModelLayers:
    """The layers of a model with what the planner needs to know before any of them runs.

    Args:
        division: how the layers are divided; the sizes count one rank's part.

    Attributes:
        sizes: the size of each parameter, by Hugging Face name; a tied parameter has its source's name.
        own: the total size of the parameters that no other layer uses, for each layer.
        shared: the names of the parameters that other layers use too, for each layer.
        experts: the part of `own` that is of the experts of a mixture.
        buffer_bytes: the bytes of the buffers of each layer.
        classes: the class of each layer: what it is made of; equal for layers that are alike.
    """

    def __init__(self, adapter: Adapter, division: Division = Division()) -> None:
        self.adapter, self.division = adapter, division
        model = adapter.reference
        if adapter.quantisation is not None or adapter.peft is not None:
            model = adapter.skeleton()
            adapter.lay_out(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if not division.is_whole:
            # The first part is the longest, where parts differ.
            for mode in parts_of_modes("stages").values():
                parameters |= mode.parts(adapter, parameters, division.num_ranks)
        used = _used_parameters(adapter, parameters, model.all_tied_weights_keys)
        users: dict[str, int] = {}
        for names in used:
            for name in names:
                users[name] = users.get(name, 0) + 1
        embeddings = (path for path, module in model.named_modules() if isinstance(module, nn.Embedding))
        embedded = {model.all_tied_weights_keys.get(name, name) for name in (f"{path}.weight" for path in embeddings)}
        self.sizes = {name: size_of(parameters[name], is_embedding=name in embedded) for name in users}
        self.own = [sum((self.sizes[n] for n in names if users[n] == 1), start=Parameters()) for names in used]
        self.shared = [tuple(sorted(n for n in names if users[n] > 1)) for names in used]
        self.experts = [sum((self.sizes[n] for n in names if is_of_expert(n)), start=Parameters()) for names in used]
        self.buffer_bytes = [0] * len(adapter.layers)
        for name, buffer in model.named_buffers():
            self.buffer_bytes[adapter.layer_of(name)] += buffer.nbytes
        self._trained = frozenset(layer for layer in adapter.layers if adapter.is_trained(layer, model))
        # The backward computes no gradient of a layer's input where no earlier layer is trained.
        wanted = [index > 0 and any(self.wants_gradient(index).values()) for index in range(len(adapter.layers))]
        self.classes = list(zip(wanted, _classes(adapter, model), strict=True))

    def first_alike(self, whole: ModelLayers | None = None) -> list[int]:
        """Find, for each layer of `whole` or of this model, the first layer of this model that is like it.

        Raises:
            KeyError: this model has no such layer.
        """
        first: dict[Any, int] = {}
        for index, made_of in enumerate(self.classes):
            first.setdefault(made_of, index)
        return [first[made_of] for made_of in (whole or self).classes]

    def wants_gradient(self, boundary: int) -> Mapping[str, bool]:
        """Whether a trained layer affects each tensor that crosses a boundary, by the tensor's name."""
        sources = self.adapter.sources(boundary)
        return {name: not self._trained.isdisjoint(layers) for name, layers in sources.items()}


class LayerTracer:
    """Traces the layers of one model.

    Args:
        as_on_gpu: whether the stages will run on GPUs, whose attention keeps less.

    Attributes:
        layers: the layers of the model.
        run: the model whose layers are run in place of the model's.
        representative_layer: the number of the layer that is run in place of each layer of the model.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        loss: Loss = PLAIN,
        as_on_gpu: bool = False,
        division: Division = Division(),
    ) -> None:
        self.layers = ModelLayers(adapter, division)
        self.run, self.representative_layer = to_run(self.layers)
        self._loss = loss
        #: first layer, end, whether blocks are recomputed -> these layers of the model that is run, as a stage.
        self._stage = cache(
            lambda start, stop, recompute_blocks: StageTracer(
                self.run.adapter,
                range(start, stop),
                self.run.wants_gradient,
                loss=loss,
                recompute_blocks=recompute_blocks,
                as_on_gpu=as_on_gpu,
                division=division,
            )
        )
        #: The traces of these stages, for micro-batches that differ in rows, or in the member of a group, alone.
        self._by_rows: dict[tuple[int, int, bool, Workload], Callable[[int], Any]] = {}

    def costs(self, workload: Workload) -> ModelCosts:
        """Return the costs of each layer for one micro-batch."""
        adapter, layers = self.layers.adapter, self.layers
        workload = workload.within(adapter)
        inputs = workload.micro_batch(adapter).inputs
        if workload.entries:
            self._loss.check_inputs(adapter, inputs)
        traced = {index: self._traced(index, workload, inputs) for index in dict.fromkeys(self.representative_layer)}
        owner: dict[str, int] = {}
        for index, names in enumerate(layers.shared):
            for name in names:
                owner.setdefault(name, index)
        costs = []
        for index, layer in enumerate(adapter.layers):
            sizes = boundary_bytes(adapter, index, inputs)
            wanted = layers.wants_gradient(index) if index else {}
            costs.append(
                LayerCost(
                    **traced[self.representative_layer[index]],
                    name=layer.name,
                    kind=layer.kind,
                    stack=layer.stack,
                    parameters=layers.own[index],
                    experts=layers.experts[index],
                    shared=tuple(SharedParameter(n, layers.sizes[n], owner[n]) for n in layers.shared[index]),
                    buffer_bytes=layers.buffer_bytes[index],
                    input_bytes=sum(sizes.values()),
                    gradient_input_bytes=sum(size for name, size in sizes.items() if wanted[name]),
                )
            )
        compute = adapter.dtype if adapter.autocast is None else adapter.autocast.dtype
        return ModelCosts(
            layers=tuple(costs),
            workload=workload,
            micro_batch_bytes=sum(tensor.nbytes for tensor in inputs.values()),
            dtype=_name(adapter.dtype),
            compute_dtype=_name(compute),
            whole_logits=whole_logits(adapter, self._loss),
        )

    def _traced(self, index: int, workload: Workload, inputs: Inputs) -> dict[str, Any]:
        """Trace a layer of the model that is run: the fields of its cost but what it holds, and its place."""
        layer = self.run.adapter.layers[index]
        sizes = boundary_bytes(self.run.adapter, index, inputs)
        hidden = sizes.get("hidden", 0)
        trace = block = self._trace(index, workload)
        saved_input = saved_block_input = hidden if trace.saves_hidden else 0
        if layer.kind == "block":
            saved_block_input = hidden
            block = self._trace(index, workload, recompute_blocks=True)
        if layer.kind == "embedding" and "encoder_hidden" in sizes:
            # The decoder's blocks read the encoder's output until the last of them is done.
            saved_input = saved_block_input = sizes["encoder_hidden"]
        graph = partial(self._graph_cost, index, workload, inputs)
        return {
            "forward": trace.forward,
            "backward": trace.backward,
            "outside": trace.outside,
            "weight_flops": 0 if layer.kind == "head" else trace.weight_flops,
            "forward_working_bytes": max((0, *trace.forward_levels)),
            "forward_only_working_bytes": max((0, *trace.forward_only_levels)) + sum(sizes.values()),
            "plain": graph(trace, saved_input, recompute_blocks=False),
            "block": graph(block, saved_block_input, recompute_blocks=block is not trace),
            "deferred_bytes": trace.deferred,
            "row_bytes": trace.row,
            "converted_bytes": trace.converted,
            "sums_beside": trace.sums_beside,
        }

    def _graph_cost(
        self, index: int, workload: Workload, inputs: Inputs, trace: Trace, saved_input: int, *, recompute_blocks: bool
    ) -> GraphCost:
        """The bytes that a layer's graph keeps, apart from what is made once for all layers of the stage."""
        own, outside, adapter = trace.saved - trace.saved_outside, trace.saved_outside, self.run.adapter
        layer = adapter.layers[index]
        stack = next((stack for stack in adapter.stacks if stack.name == layer.stack), None)
        if layer.kind == "block" and stack is not None and adapter.tables[stack.name]:
            # The first block of a stage makes something for all blocks, as T5's bias: the other ones are handed it.
            second = next(i for i, layer in enumerate(adapter.layers) if layer.name == stack.blocks[1])
            pair = second - 1, second + 1, recompute_blocks
            saved, saved_before = self._of_stage(*pair, workload, StageTracer.saved_bytes, second)
            own = saved - saved_before
            between = boundary_bytes(adapter, second, inputs).get("hidden", 0)
            outside = max(trace.saved - own, saved - between - 2 * own, 0)
        return GraphCost(own, saved_input, outside, max(trace.backward_levels))

    def _trace(self, index: int, workload: Workload, *, recompute_blocks: bool = False) -> Trace:
        if index and workload.row_images is not None:
            # The first layer turns images into states of tokens, so the other layers cost as much as with text.
            workload = replace(workload, row_images=None)
        return self._of_stage(index, index + 1, recompute_blocks, workload, StageTracer.trace)

    def _of_stage(
        self,
        start: int,
        stop: int,
        recompute_blocks: bool,
        workload: Workload,
        run: Callable[..., Numbers],
        *args: int,
    ) -> Numbers:
        """The result of `run`, a method of `StageTracer`, for these layers as a stage and a micro-batch.

        It may be computed from the results of other numbers of rows, or of other members of a group, where these are
        equally long: each attends to the tokens of one member more than the member before it.
        """
        is_cut = workload.groups.size > 1
        key = start, stop, recompute_blocks, replace(workload, member=0) if is_cut else replace(workload, rows=1)
        if key not in self._by_rows:
            # The head takes some positions at a time, however many there are, and packed rows attend to each other.
            has_head = self.run.adapter.layers[stop - 1].kind == "head"
            is_bent = (has_head and not is_cut) or workload.is_packed or bool(workload.groups.taper)
            stage = self._stage(start, stop, recompute_blocks)

            def compute(number: int) -> Numbers:
                shape = replace(workload, member=number - 1) if is_cut else replace(workload, rows=number)
                return run(stage, shape.micro_batch(self.run.adapter), *args)

            # The numbers of a stage that runs on real tensors depend on values.
            self._by_rows[key] = by_rows(compute, lambda: not (is_bent or stage.is_real))
        numbers: Numbers = self._by_rows[key](workload.member + 1 if is_cut else workload.rows)
        return numbers


def boundary_bytes(adapter: Adapter, index: int, inputs: Inputs) -> dict[str, int]:
    """The bytes of each tensor that crosses the boundary before a layer."""
    shapes = adapter.carry_shapes(index, inputs) if index else {}
    return {name: prod(shape) * adapter.carry_dtype(index, name).itemsize for name, shape in shapes.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_run(whole: ModelLayers) -> tuple[ModelLayers, Sequence[int]]:
    """The model whose layers are run for `whole`, and the number of its layer that is like each layer of `whole`."""
    if (short := _short_adapter(whole.adapter)) is not None:
        few = ModelLayers(short, whole.division)
        with suppress(KeyError):  # a class of layers begins further down
            return few, few.first_alike(whole)
    return whole, whole.first_alike()


def size_of(parameter: torch.Tensor, *, is_embedding: bool = False) -> Parameters:
    """The size that one parameter adds to a process that holds it."""
    count, num_bytes = size_of_quantised(parameter)
    if not parameter.requires_grad:
        return Parameters(count, num_bytes)
    is_exact = is_embedding or count < LEAST_8_BIT_ELEMENTS
    return Parameters(count, num_bytes, count, num_bytes, count if is_exact else 0)


def _used_parameters(adapter: Adapter, names: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> list[set[str]]:
    """The names of the parameters that each layer uses; a tied parameter has its source's name."""
    used: list[set[str]] = [set() for _ in adapter.layers]
    for name in names:
        used[adapter.layer_of(name)].add(ties.get(name, name))
    number = {layer.name: index for index, layer in enumerate(adapter.layers)}
    for stack in adapter.stacks:
        prefixes = tuple(f"{table}." for table in adapter.tables[stack.name])
        tables = {name for name in names if prefixes and name.startswith(prefixes)}
        for block in stack.blocks:
            used[number[block]] |= tables
    return used


def _classes(adapter: Adapter, model: nn.Module) -> list[Any]:
    """The class of each layer. Layers that are not blocks are alike where their names are equal."""
    made_of: list[Any] = [(layer.stack, layer.kind, layer.name) for layer in adapter.layers]
    number = {layer.name: index for index, layer in enumerate(adapter.layers)}
    for stack in adapter.stacks:
        lists = _block_lists(adapter.config, len(stack.blocks))
        for index, block in enumerate(stack.blocks):
            layer = adapter.layers[number[block]]
            modules = tuple(_signature(model.get_submodule(name)) for name in layer.all_modules)
            said = tuple((name, repr(entries[index])) for name, entries in sorted(lists.items()))
            # The first block may make for the others what they share.
            makes_tables = index == 0 and bool(adapter.tables[stack.name])
            made_of[number[block]] = (layer.stack, layer.kind, makes_tables, said, modules)
    return made_of


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """The module's class, weights, plain attributes and children."""
    weights: list[tuple[Any, ...]]
    weights = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters(recurse=False)]
    weights += [(name, tuple(b.shape), b.dtype, None) for name, b in module.named_buffers(recurse=False)]
    plain = [
        (name, value)
        for name, value in sorted(vars(module).items())
        if name not in _NUMBERS and not name.startswith("_") and isinstance(value, _PLAIN)
    ]
    children = tuple((name, _signature(child)) for name, child in module.named_children())
    return type(module).__qualname__, tuple(weights), tuple(plain), children


def _block_lists(config: PreTrainedConfig, num_blocks: int) -> dict[str, list[Any]]:
    """The configuration's lists that have an entry for each block."""
    return {name: v for name, v in vars(config).items() if isinstance(v, list) and len(v) == num_blocks}


def _short_adapter(adapter: Adapter) -> Adapter | None:
    """The adapter of the model with fewer blocks; None: the model has few, or blocks depend on how many there are."""
    if not isinstance(adapter, TextAdapter):
        return None
    config = adapter.given_config
    is_deep = max(len(stack.blocks) for stack in adapter.stacks) > FEW_BLOCKS
    is_nested = any(isinstance(value, PreTrainedConfig) for value in vars(config).values())
    if not is_deep or is_nested or adapter.routers:
        return None
    short = copy.deepcopy(config)
    for name in dict.fromkeys(config.attribute_map.get(name, name) for name in BLOCK_COUNTS):
        count = vars(config).get(name)
        if isinstance(count, int) and count > FEW_BLOCKS:
            setattr(short, name, FEW_BLOCKS)
            for list_name, entries in _block_lists(config, count).items():
                setattr(short, list_name, entries[:FEW_BLOCKS])
    few = type(adapter)(replace(adapter.blueprint, config=short), adapter.autocast, adapter.quantisation)
    # A function or an adapter on the head may have changed it.
    few.projection, few.peft = adapter.projection, adapter.peft
    return few


def by_rows(compute: Callable[[int], Numbers], can_be_linear: Callable[[], bool]) -> Callable[[int], Numbers]:
    """A function of the number of rows that is computed for few of them.

    The size of a layer's tensor and the operations of a product either do not depend on the rows of a micro-batch or
    are proportional to them. So every number of a trace lies on a line over the rows, and so do the bytes that are
    alive after each new tensor; only their maximum, the peak, may bend. Three numbers of rows show whether this is so.
    If all that was traced between two numbers of rows lies on the line, what is not traced between them does too.

    Args:
        compute: number of rows -> the value.
        can_be_linear: whether the values may lie on a line; asked after the first value was computed.
    """
    computed: dict[int, Numbers] = {}

    def value(rows: int) -> Numbers:
        if rows in computed:
            return computed[rows]
        known = sorted(number for number in computed if number >= FEWEST_ROWS)
        if len(known) >= 3 and known[0] < rows < known[-1] and can_be_linear():
            ends = [(number, computed[number]) for number in (known[0], known[-1])]
            is_line = all(_at(number, *ends) == computed[number] for number in known[1:-1])
            if is_line and (on_line := _at(rows, *ends)) is not None:
                return cast(Numbers, on_line)
        if len(computed) == 1 and rows > FEWEST_ROWS and can_be_linear():
            # Where several sizes are asked for, the next ones lie between this size and the largest.
            computed.setdefault(FEWEST_ROWS, compute(FEWEST_ROWS))
        return computed.setdefault(rows, compute(rows))

    return value


def _at(rows: int, first: tuple[int, Any], last: tuple[int, Any]) -> Any:
    """The value at `rows` on the line through two (rows, value); None where it has no slope in whole numbers."""
    (low, start), (high, end) = first, last
    if isinstance(start, tuple):
        if len(start) != len(end):
            return None
        values = [_at(rows, (low, first_value), (high, other)) for first_value, other in zip(start, end, strict=True)]
        return None if None in values else start._make(values) if hasattr(start, "_make") else tuple(values)
    if start == end:
        return start
    slope, rest = divmod(end - start, high - low)
    return None if rest else start + slope * (rows - low)
