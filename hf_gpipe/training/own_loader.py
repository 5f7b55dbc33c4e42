"""The mini-batches of a loader that a subclass of the trainer gives in place of the trainer's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_gpipe.adapters.modules.dropout import mix
from hf_gpipe.errors import UserError
from hf_gpipe.training.loader import Batch, MiniBatches, checked_batch, seed_generators


@dataclass(frozen=True)
class OwnLoader:
    """A foreign loader, each of whose items is a mini-batch of all rows.

    Generators of random numbers are seeded for each epoch and each mini-batch, and a training that resumes reads the
    mini-batches of its epoch from the first one on, so it goes on with the mini-batches that it would have had. A
    generator that the loader or its sampler was given begins an epoch with its own seed.

    Args:
        loader: an iterable of mini-batches, such as a torch DataLoader; its length, if it has one, is that of an epoch.
        seed: the seed of the order and of random transforms.
    """

    loader: Any
    seed: int

    def __iter__(self) -> Iterator[Batch]:
        """The mini-batches of the first epoch."""
        return self.epoch(0)

    def count(self) -> int | None:
        """The number of mini-batches of an epoch; None if only reading tells."""
        try:
            return len(self.loader)
        except TypeError:
            return None

    def epoch(self, epoch: int, start: int = 0, place: Mapping[str, Any] | None = None) -> Iterator[Batch]:
        """The mini-batches of an epoch from number `start` on; those before are read and left out.

        Raises DataError where an item is no mini-batch.
        """
        parts = self._parts()
        generators = [g for part in parts if isinstance(g := getattr(part, "generator", None), torch.Generator)]
        own_seeds = [generator.initial_seed() for generator in generators]
        try:
            for part in parts:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            for generator, own_seed in zip(generators, own_seeds, strict=True):
                generator.manual_seed(mix(own_seed, epoch) if epoch else own_seed)
            seed_generators(mix(self.seed, epoch, 0))
            for number, batch in enumerate(self.loader):
                if number >= start:
                    yield checked_batch(batch, "data loader")
                seed_generators(mix(self.seed, epoch, number + 1))
        finally:
            # `manual_seed` replaces the initial seed, from which the next epoch's seed follows.
            for generator, own_seed in zip(generators, own_seeds, strict=True):
                generator.manual_seed(own_seed)

    def _parts(self) -> list[Any]:
        """The objects that decide about the order and the rows of an epoch, each once."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        parts = [self.loader, getattr(self.loader, "dataset", None), getattr(self.loader, "sampler", None)]
        parts += [batch_sampler, getattr(batch_sampler, "sampler", None)]
        return list({id(part): part for part in parts}.values())

    def whole(self) -> Batch:
        """The first mini-batch, which is taken to have all of its rows."""
        return next(self.epoch(0))

    def place(self, number: int) -> None:
        """None: a foreign loader is read from its beginning."""


def batches_of_loader(loader: Any, method: str, seed: int) -> MiniBatches | OwnLoader:
    """The mini-batches of what a subclass's method returned. Raises UserError where it is no loader."""
    if isinstance(loader, MiniBatches | OwnLoader):
        return loader
    if not hasattr(loader, "__iter__"):
        raise UserError(
            f"{method} returned {'None' if loader is None else f'a {type(loader).__name__}'}; let it return a loader "
            "of mini-batches, such as a torch DataLoader"
        )
    return OwnLoader(loader, seed)
