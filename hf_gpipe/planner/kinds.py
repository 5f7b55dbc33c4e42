"""Which layers of a model are alike, so that each kind is costed once; and deep models from short ones.

Two layers are alike when their modules, the shapes of their weights and the plain values that their code reads are, and
the configuration says the same of both. A model of more blocks than `FEW_BLOCKS` is not built at all where a short one
tells everything: GPipe's Transformer of 1663 layers takes 7 seconds to build, without weights, and 8 layers of it none.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe.adapters import Adapter, Autocast, adapter_for
from hf_gpipe.adapters.layers import LayerKind, StackName

#: A short model has this many blocks a stack, and so does the longest that is built as it is.
FEW_BLOCKS = 8

_BLOCK_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
#: Attributes that number a block and change nothing else.
_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")


@dataclass(frozen=True)
class Place:
    """A layer of the whole model, and the number of the layer in the adapter at hand that is like it."""

    name: str
    kind: LayerKind
    stack: StackName
    like: int


def open_model(config: PreTrainedConfig, dtype: torch.dtype, *args: Any, **options: Any) -> tuple[Adapter, list[Place]]:
    """An adapter to measure on, and the layers of the whole model. Arguments are those of `adapter_for`."""
    short = _shortened(config)
    if short is not None:
        adapter = adapter_for(short, dtype, *args, **options)
        places = _extended(adapter, config)
        if places is not None:
            return adapter, places
    adapter = adapter_for(config, dtype, *args, **options)
    return adapter, places_of(adapter)


def reopen(adapter: Adapter) -> tuple[Adapter, list[Place]]:
    """`open_model` for a model that has its adapter."""
    if len(adapter.layers) <= 2 * FEW_BLOCKS:
        return adapter, places_of(adapter)
    autocast: Autocast | None = adapter.autocast
    short = _shortened(adapter.given_config)
    if short is not None:
        shorter = type(adapter)(
            short,
            adapter.dtype,
            adapter.attn_implementation,
            adapter.model_class,
            trust_remote_code=adapter.trust_remote_code,
            autocast=autocast,
        )
        places = _extended(shorter, adapter.given_config)
        if places is not None and [place.name for place in places] == [layer.name for layer in adapter.layers]:
            return shorter, places
    return adapter, places_of(adapter)


def places_of(adapter: Adapter, model: nn.Module | None = None) -> list[Place]:
    """Every layer with the first layer that is like it.

    Args:
        adapter: of the whole model.
        model: its modules, where they are not the adapter's own, such as with PEFT layers.
    """
    first: dict[Any, int] = {}
    alike = [first.setdefault(key, index) for index, key in enumerate(_keys(adapter, model or adapter.reference))]
    return [Place(layer.name, layer.kind, layer.stack, like) for layer, like in zip(adapter.layers, alike, strict=True)]


def _keys(adapter: Adapter, model: nn.Module) -> list[Any]:
    """What each layer is made of; equal for layers that are alike."""
    keys = []
    for layer in adapter.layers:
        modules = tuple(_signature(model.get_submodule(name)) for name in layer.all_modules)
        said: tuple[Any, ...] = ()
        if layer.kind == "block":
            stack = next(stack for stack in adapter.stacks if layer.name in stack.blocks)
            index = stack.blocks.index(layer.name)
            # The first block may make for the others what they share.
            said = (
                index == 0 and bool(adapter.tables[stack.name]),
                *_said_of(adapter.config, index, len(stack.blocks)),
            )
        keys.append((layer.stack, layer.kind, said, modules if layer.kind == "block" else layer.name))
    return keys


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


def _said_of(config: PreTrainedConfig, index: int, num_blocks: int) -> tuple[Any, ...]:
    """The entries of one block in the configuration's lists that have one for each block."""
    lists = _block_lists(config, num_blocks)
    return tuple((name, repr(entries[index])) for name, entries in sorted(lists.items()))


def _block_lists(config: PreTrainedConfig, num_blocks: int) -> dict[str, list[Any]]:
    return {name: v for name, v in vars(config).items() if isinstance(v, list) and len(v) == num_blocks}


def _shortened(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The configuration with `FEW_BLOCKS` blocks a stack; None where it has no more, or they follow no simple rule."""
    if any(isinstance(value, PreTrainedConfig) for value in vars(config).values()):
        return None
    counts = _counts(config)
    if not counts or max(counts.values()) <= FEW_BLOCKS:
        return None
    short = copy.deepcopy(config)
    for name, count in counts.items():
        if count <= FEW_BLOCKS:
            continue
        for list_name, entries in _block_lists(config, count).items():
            if len({repr(entry) for entry in entries}) > 1:
                return None
            setattr(short, list_name, entries[:FEW_BLOCKS])
        setattr(short, name, FEW_BLOCKS)
    return short


def _counts(config: PreTrainedConfig) -> dict[str, int]:
    """The fields that say how many blocks a stack has, by their own names."""
    names = dict.fromkeys(config.attribute_map.get(name, name) for name in _BLOCK_COUNTS)
    return {name: value for name in names if isinstance(value := vars(config).get(name), int)}


def _extended(adapter: Adapter, config: PreTrainedConfig) -> list[Place] | None:
    """The layers of the long model of `config`, from its short one; None where the short one's blocks do not tell."""
    if adapter.routers:
        return None
    places = places_of(adapter)
    lengths = _lengths(adapter, config)
    if lengths is None:
        return None
    extended: list[Place] = []
    for (kind, stack), group in groupby(places, key=lambda place: (place.kind, place.stack)):
        members = list(group)
        if kind != "block" or lengths[stack] == len(members):
            extended += members
            continue
        if any(place.like != members[1].like for place in members[1:]):
            return None
        path = members[0].name.rpartition(".")[0]
        likes = [members[0].like, *[members[1].like] * (lengths[stack] - 1)]
        extended += [Place(f"{path}.{index}", kind, stack, like) for index, like in enumerate(likes)]
    return extended


def _lengths(adapter: Adapter, config: PreTrainedConfig) -> dict[str, int] | None:
    """How many blocks each stack of the long model has; None where the configuration's fields do not tell."""
    counts = _counts(config)
    if not config.is_encoder_decoder:
        return {"decoder": max(counts.values())} if len(set(counts.values())) == 1 else None
    encoder = next((counts[n] for n in ("encoder_layers", "num_encoder_layers", "num_layers") if n in counts), None)
    decoder = next((counts[n] for n in ("decoder_layers", "num_decoder_layers", "num_layers") if n in counts), None)
    if encoder is None or decoder is None:
        return None
    short = {stack.name: len(stack.blocks) for stack in adapter.stacks}
    expected = {"encoder": min(encoder, FEW_BLOCKS), "decoder": min(decoder, FEW_BLOCKS)}
    return {"encoder": encoder, "decoder": decoder} if short == expected else None
