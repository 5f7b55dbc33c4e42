"""Dropout, and noise on embeddings, that do not depend on how the model is split.

Every layer that draws random numbers seeds the device's default generator from (seed, step, micro-batch, name of
the layer) just before it runs. Then it makes no difference on which process the layer runs, what ran there before it,
and whether it runs for the first time or again in recomputation.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return a 64-bit hash of integers, the same on every machine. SplitMix64's finaliser runs after each integer."""
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


@contextmanager
def keeping_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Context manager after which the devices' generators are as before."""
    generators = {default_generator(device) for device in devices}
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


class NoisyRows(NamedTuple):
    """The rows of a micro-batch, as the noise on their embeddings follows from them.

    Attributes:
        seeds: the seed of each row; packed documents are one row.
        num_tokens: the number of tokens of a row of the whole mini-batch with its padding, or of all its documents if
            they are packed.
        width: the number of tokens of a row for which noise is drawn. The micro-batch has some of them.
        start: the first of these tokens that the micro-batch has.
    """

    seeds: tuple[int, ...] = ()
    num_tokens: int = 0
    width: int = 0
    start: int = 0


class DropoutSeeds:
    """The seeds of one micro-batch on one stage. Each layer calls `plant` when it starts."""

    def __init__(
        self,
        generator: torch.Generator,
        layer_keys: dict[str, int],
        micro_batch_seed: int,
        rows: NoisyRows = NoisyRows(),
    ) -> None:
        self._generator = generator
        self._layer_keys = layer_keys
        self._micro_batch_seed = micro_batch_seed
        self._rows = rows

    def plant(self, layer_name: str) -> None:
        self._generator.manual_seed(mix(self._micro_batch_seed, self._layer_keys[layer_name]))

    def noise(self, embedded: torch.Tensor, alpha: float) -> torch.Tensor:
        """Noise on the embeddings (B, T, D) of the rows: uniform, at most alpha / sqrt(`num_tokens` D)."""
        rows, size = self._rows, embedded.shape[2]
        bound = alpha / math.sqrt(rows.num_tokens * size)
        noise = torch.empty_like(embedded)
        for row, seed in zip(noise, rows.seeds, strict=True):
            self._generator.manual_seed(seed)
            whole = row.new_empty(rows.width, size).uniform_(-bound, bound)
            row.copy_(whole[rows.start : rows.start + len(row)])
        return noise


def masks_of(config: Any) -> dict[str, float]:
    """Return the probabilities of dropout above 0 in a configuration and the ones inside of it, by their paths."""
    masks: dict[str, float] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            masks |= {f"{name}.{path}": probability for path, probability in masks_of(value).items()}
        elif "drop" in name and isinstance(value, float) and value:
            masks[name] = value
    return masks
