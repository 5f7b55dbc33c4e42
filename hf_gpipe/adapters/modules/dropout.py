"""Dropout that does not depend on how the model is split.

Every layer that draws random numbers seeds the device's default generator from (seed, step, micro-batch, name of
the layer) just before it runs. Then it makes no difference on which process the layer runs, what ran there before it,
and whether it runs for the first time or again in recomputation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash of integers (the finaliser of SplitMix64 after each), the same on every machine."""
    state = 0
    for value in values:
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def key(name: str) -> int:
    """A 64-bit integer for a layer's or a parameter's name, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.nn.functional.dropout` draws from on this device.

    It is seeded directly, because `torch.manual_seed` seeds every backend and takes a hundred times as long.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


class DropoutSeeds:
    """The seeds of one micro-batch on one stage. Each layer calls `plant` when it starts."""

    def __init__(
        self,
        generator: torch.Generator,
        layer_keys: dict[str, int],
        micro_batch_seed: int,
        row_seeds: Sequence[int] = (),
    ) -> None:
        self._generator = generator
        self._layer_keys = layer_keys
        self._micro_batch_seed = micro_batch_seed
        self._row_seeds = row_seeds

    def plant(self, layer_name: str) -> None:
        self._generator.manual_seed(mix(self._micro_batch_seed, self._layer_keys[layer_name]))

    def of_each_row(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """The rows of a tensor one by one, each with its own seed planted; the whole tensor where rows have none."""
        if not self._row_seeds:
            yield tensor
            return
        for row, seed in zip(tensor, self._row_seeds, strict=True):
            self._generator.manual_seed(seed)
            yield row


def masks_of(config: Any) -> dict[str, float]:
    """The probabilities of dropout above 0 in a configuration and those in it, by their paths."""
    masks: dict[str, float] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            masks |= {f"{name}.{path}": probability for path, probability in masks_of(value).items()}
        elif "drop" in name and isinstance(value, float) and value:
            masks[name] = value
    return masks
