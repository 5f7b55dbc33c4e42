"""Mini-batches of a dataset: what is in one is a function of (seed, epoch, number), whoever asks, and whenever.

Only the main process reads. Random transforms and collators (masking, sampling) draw from generators that are seeded
for each mini-batch, so a run that resumes, or that loads with another number of workers, gets the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from hf_gpipe.adapters.dropout import mix
from hf_gpipe.data.batches import length_bucketed_batches, shuffled_batches
from hf_gpipe.errors import DataError, UserError

Batch = Mapping[str, torch.Tensor]
Collate = Callable[[list[Any]], Batch]


@dataclass(frozen=True)
class MiniBatches:
    """The mini-batches of each epoch of a dataset.

    Attributes:
        dataset: map-style (a length, and rows by index) or iterable.
        collate: rows to a mini-batch.
        batch_size: rows of a mini-batch; the last one of an epoch may have fewer.
        order: "sequential", "random", or "group_by_length" (rows of similar length share a mini-batch). An iterable
            dataset has its own order.
        seed: of the order and of random transforms.
        drop_last: whether a mini-batch with fewer rows is left out.
        columns: entries of a row to keep; None: all.
        length_column: column of a datasets.Dataset that holds the rows' lengths, for "group_by_length".
        workers: options of torch's DataLoader for loading in other processes; none: this process loads.
    """

    dataset: Any
    collate: Collate
    batch_size: int
    order: str = "sequential"
    seed: int = 0
    drop_last: bool = False
    columns: Collection[str] | None = None
    length_column: str = "length"
    workers: Mapping[str, Any] | None = None

    @property
    def is_iterable(self) -> bool:
        """Whether the rows have no index."""
        return not (hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__"))

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; None where only reading them tells."""
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    def count(self) -> int | None:
        """Mini-batches of an epoch; None where only reading them tells."""
        if self.num_rows is None:
            return None
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The mini-batches of an epoch from number `start` on; of a map-style dataset, those before are not loaded.

        Raises:
            DataError: rows whose length is not known, for "group_by_length"; rows that cannot be collated.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if self.is_iterable:
            return self._read(epoch, start)
        batches = self._plan(epoch)
        numbers = range(start, len(batches))
        load = _Loaded(self, epoch, batches)
        if self.workers is None:
            return (load[number] for number in numbers)
        return iter(DataLoader(load, batch_size=None, sampler=numbers, **self.workers))

    def _plan(self, epoch: int) -> list[list[int]]:
        """The rows of each mini-batch, by index."""
        size = self.batch_size
        if self.order == "random":
            batches = shuffled_batches(len(self.dataset), size, self.seed, epoch)
        elif self.order == "group_by_length":
            batches = length_bucketed_batches(self._lengths(), size, self.seed, epoch)
        else:
            batches = [list(range(i, min(i + size, len(self.dataset)))) for i in range(0, len(self.dataset), size)]
        return [batch for batch in batches if len(batch) == size or not self.drop_last]

    def _lengths(self) -> Sequence[int]:
        if hasattr(self.dataset, "lengths"):
            return list(self.dataset.lengths)
        if self.length_column in getattr(self.dataset, "column_names", ()):
            return list(self.dataset[self.length_column])
        try:
            return [len(self.dataset[index]["input_ids"]) for index in range(len(self.dataset))]
        except (KeyError, TypeError) as error:
            raise DataError(
                "train_sampling_strategy='group_by_length' needs the length of each row: a row with 'input_ids', a "
                f"column {self.length_column!r}, or a dataset with an attribute `lengths`"
            ) from error

    def _read(self, epoch: int, start: int) -> Iterator[Batch]:
        """The mini-batches of an iterable dataset; those before `start` are read, for only reading them moves on."""
        if self.workers is not None:
            raise UserError("dataloader_num_workers: an iterable dataset is read by the main process; use 0")
        rows = iter(self.dataset)
        number = 0
        while True:
            _seed_generators(mix(self.seed, epoch, number))
            batch = [row for _, row in zip(range(self.batch_size), rows, strict=False)]
            if not batch or (len(batch) < self.batch_size and self.drop_last):
                return
            if number >= start:
                yield self._collated(batch)
            number += 1

    def _collated(self, rows: list[Any]) -> Batch:
        if self.columns is not None:
            rows = [
                {k: v for k, v in row.items() if k in self.columns} if isinstance(row, Mapping) else row for row in rows
            ]
        batch = self.collate(rows)
        if not isinstance(batch, Mapping):
            raise DataError(f"the data collator returned a {type(batch).__name__}; a mini-batch is a dict of tensors")
        return dict(batch)


class _Loaded(Dataset[Batch]):
    """The mini-batches of one epoch by number, in a form that workers of torch's DataLoader understand."""

    def __init__(self, source: MiniBatches, epoch: int, batches: Sequence[Sequence[int]]) -> None:
        self._source = replace(source, workers=None)
        self._epoch, self._batches = epoch, batches

    def __getitem__(self, number: int) -> Batch:
        source = self._source
        _seed_generators(mix(source.seed, self._epoch, number))
        indices = list(self._batches[number])
        many = getattr(source.dataset, "__getitems__", None)
        return source._collated(many(indices) if many else [source.dataset[index] for index in indices])


def _seed_generators(seed: int) -> None:
    """Seed the generators that transforms and collators draw from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def in_groups(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Consecutive lists of `size` mini-batches, the last one possibly shorter: what one step accumulates."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
