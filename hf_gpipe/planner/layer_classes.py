"""A model's layers as the planner sees them: the parameters that each uses, and which layers are alike.

Two layers are alike when their modules, the shapes of their weights and the plain values that their code reads are, and
the configuration says the same of both. Of layers that are alike one is run, so the costs of a model are those of a few
layers. Each run makes the whole model without memory, which for a thousand blocks takes seconds. So a deep model's
layers are run in a short one, where it has a layer of every class.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.peft import PeftAdapter
from hf_gpipe.planner.costs import Parameters

#: A short model has this many blocks per stack.
FEW_BLOCKS = 8

#: Fields of configurations that say how many blocks a stack has.
_BLOCK_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
#: Attributes that number a block and change nothing else.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")


class ModelLayers:
    """The layers of a model with what the planner needs to know before any of them runs.

    Args:
        adapter: the model's.
        peft: PEFT layers that are put into each stage and alone are trained.

    Attributes:
        sizes: of each parameter, by Hugging Face name; a tie under its source's.
        own: of each layer, the sum of the parameters that no other layer uses.
        shared: of each layer, the names of those that other layers use too.
        buffer_bytes: of each layer.
        classes: of each layer, what it is made of; equal for layers that are alike.
    """

    def __init__(self, adapter: Adapter, peft: PeftAdapter | None = None) -> None:
        self.adapter = adapter
        self.peft = peft
        model: nn.Module = adapter.reference
        if peft is not None:
            model = adapter.skeleton()
            peft.inject(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        used = _used_parameters(adapter, parameters)
        users: dict[str, int] = {}
        for names in used:
            for name in names:
                users[name] = users.get(name, 0) + 1
        self.sizes = {name: size_of(parameters[name]) for name in users}
        self.own = [sum((self.sizes[n] for n in names if users[n] == 1), start=Parameters()) for names in used]
        self.shared = [tuple(sorted(n for n in names if users[n] > 1)) for names in used]
        self.buffer_bytes = [0] * len(adapter.layers)
        for name, buffer in model.named_buffers():
            self.buffer_bytes[adapter.layer_of(name)] += buffer.nbytes
        self.classes = _classes(adapter, model)
        self._trained = frozenset(layer for layer in adapter.layers if adapter.is_trained(layer, model))

    def first_alike(self, whole: ModelLayers | None = None) -> list[int]:
        """For each layer, of `whole` or of this model, the first layer of this model that is like it.

        Raises:
            KeyError: this model has none.
        """
        first: dict[Any, int] = {}
        for index, made_of in enumerate(self.classes):
            first.setdefault(made_of, index)
        return [first[made_of] for made_of in (whole or self).classes]

    def wants_gradient(self, boundary: int) -> Mapping[str, bool]:
        """For each tensor that crosses a boundary, whether any layer that it depends on is trained."""
        sources = self.adapter.sources(boundary)
        return {name: not self._trained.isdisjoint(layers) for name, layers in sources.items()}


def to_run(whole: ModelLayers) -> tuple[ModelLayers, Sequence[int]]:
    """The model whose layers are run for those of `whole`, and for each layer of `whole` the one that is like it."""
    short = _short_adapter(whole.adapter) if whole.peft is None else None
    if short is not None:
        few = ModelLayers(short)
        try:
            return few, few.first_alike(whole)
        except KeyError:
            pass  # a class of layers begins further down
    return whole, whole.first_alike()


def size_of(parameter: torch.Tensor) -> Parameters:
    """The size that one parameter adds to a process that holds it."""
    count, num_bytes = parameter.numel(), parameter.nbytes
    return Parameters(count, num_bytes, *((count, num_bytes) if parameter.requires_grad else (0, 0)))


def _used_parameters(adapter: Adapter, names: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """For each layer the names of the parameters that it uses, of a tie its source's."""
    used: list[set[str]] = [set() for _ in adapter.layers]
    ties = adapter.ties
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
    """The class of each layer. Layers that are not blocks are alike where their names are."""
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
    """The adapter of the same model with fewer blocks; None where it has few, or where its blocks depend on more."""
    config = adapter.given_config
    is_deep = max(len(stack.blocks) for stack in adapter.stacks) > FEW_BLOCKS
    is_nested = any(isinstance(value, PreTrainedConfig) for value in vars(config).values())
    if not is_deep or is_nested or adapter.routers:
        return None
    short = copy.deepcopy(config)
    for name in dict.fromkeys(config.attribute_map.get(name, name) for name in _BLOCK_COUNTS):
        count = vars(config).get(name)
        if isinstance(count, int) and count > FEW_BLOCKS:
            setattr(short, name, FEW_BLOCKS)
            for list_name, entries in _block_lists(config, count).items():
                setattr(short, list_name, entries[:FEW_BLOCKS])
    return type(adapter)(
        short,
        adapter.dtype,
        adapter.attn_implementation,
        adapter.model_class,
        trust_remote_code=adapter.trust_remote_code,
        autocast=adapter.autocast,
    )
