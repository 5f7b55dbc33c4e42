"""Which parameters each layer of a model uses, and which of them several layers share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_gpipe.adapters import Adapter
from hf_gpipe.planner.costs import Parameters


class Weights:
    """The parameters of every layer of an adapter, as `StageModel.parameters` has them.

    Args:
        adapter: the model's adapter.
        model: its modules on the meta device: the adapter's own skeleton, or one with PEFT layers in it.

    Attributes:
        sizes: of each parameter, by Hugging Face name; a tie under its source's.
        own: of each layer, the sum of the parameters that no other layer uses.
        shared: of each layer, the names of those that other layers use too.
        buffer_bytes: of each layer.
        is_trained: of each layer, whether any of its parameters is.
    """

    def __init__(self, adapter: Adapter, model: nn.Module) -> None:
        num_layers = len(adapter.layers)
        ties = adapter.ties
        parameters = dict(model.named_parameters(remove_duplicate=False))
        layer_of = _layer_numbers(adapter, [*parameters, *(name for name, _ in model.named_buffers())])
        used: list[set[str]] = [set() for _ in range(num_layers)]
        for name in parameters:
            used[layer_of[name]].add(ties.get(name, name))
        number = {layer.name: index for index, layer in enumerate(adapter.layers)}
        for stack in adapter.stacks:
            prefixes = tuple(f"{table}." for table in adapter.tables[stack.name])
            tables = {name for name in parameters if prefixes and name.startswith(prefixes)}
            for block in stack.blocks:
                used[number[block]] |= tables
        users: dict[str, int] = {}
        for names in used:
            for name in names:
                users[name] = users.get(name, 0) + 1
        self.sizes = {name: size_of(parameters[name]) for name in users}
        self.own = [sum((self.sizes[n] for n in names if users[n] == 1), start=Parameters()) for names in used]
        self.shared = [tuple(sorted(n for n in names if users[n] > 1)) for names in used]
        self.buffer_bytes = [0] * num_layers
        for name, buffer in model.named_buffers():
            self.buffer_bytes[layer_of[name]] += buffer.nbytes
        self.is_trained = [adapter.is_trained(layer, model) for layer in adapter.layers]
        self._adapter = adapter

    def wants_gradient(self, boundary: int) -> Mapping[str, bool]:
        """For each tensor that crosses a boundary, whether any layer that it depends on is trained."""
        return self._adapter.wants_gradient(boundary, self.is_trained)


def size_of(parameter: torch.Tensor) -> Parameters:
    """What one parameter adds to a process that holds it."""
    count, num_bytes = parameter.numel(), parameter.nbytes
    return Parameters(count, num_bytes, *((count, num_bytes) if parameter.requires_grad else (0, 0)))


def _layer_numbers(adapter: Adapter, names: list[str]) -> dict[str, int]:
    """`Adapter.layer_of` for many names at once."""
    of_module = {module: index for index, layer in enumerate(adapter.layers) for module in layer.all_modules}
    numbers = {}
    for name in names:
        path = name
        while path and path not in of_module:
            path = path.rpartition(".")[0]
        numbers[name] = of_module[path] if path else adapter.layer_of(name)
    return numbers
