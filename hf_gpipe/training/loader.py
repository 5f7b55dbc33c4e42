"""Mini-batches of a dataset. The content of a mini-batch depends on (seed, epoch, number) only.

Only the main process reads. Random transforms and collators (masking, sampling) draw from generators that are seeded
for each mini-batch, so a run that resumes, or that loads with another number of workers, gets equal mini-batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from hf_gpipe.adapters.modules.dropout import mix
from hf_gpipe.adapters.text_entries import IDS, token_ids
from hf_gpipe.checkpoint.state import Place
from hf_gpipe.data.batches import (
    distinct_batches,
    drawn_batches,
    length_bucketed_batches,
    mixed_batches,
    num_token_batches,
    shuffled_batches,
    token_batches,
)
from hf_gpipe.data.encoded import SeveralDatasets
from hf_gpipe.data.sampling import epoch_rows
from hf_gpipe.errors import DataError, UserError, listed
from hf_gpipe.recipe.batch_size import BatchSize
from hf_gpipe.training.pools import DataPositions, Pools, has_index, target_tokens

logger = transformers.logging.get_logger(__name__)

Batch = Mapping[str, torch.Tensor]
Collate = Callable[[list[Any]], Batch]
#: Columns of rows that become `labels`.
LABEL_COLUMNS = frozenset({"label", "label_ids", "labels"})


@dataclass(frozen=True)
class MiniBatches:
    """The mini-batches of each epoch of a dataset.

    Attributes:
        dataset: map-style (a length, and rows by index) or iterable; or `SeveralDatasets`, of which a mini-batch has
            rows of one.
        collate: rows -> a mini-batch.
        size: the size of a mini-batch. The last of an epoch may have fewer rows. With a size in tokens, all epochs of a
            map-style dataset have as many mini-batches as the rows of the first epoch make.
        order: "sequential", "random", "group_by_length" (rows of similar length share a mini-batch), or "no_duplicates"
            (rows that share one of the dataset's `keys` do not). An iterable dataset has its own order; by length, it
            is sorted in pools of what has been read.
        seed: the seed of the order and of random transforms.
        drop_last: whether a mini-batch with fewer rows is left out.
        columns: the entries of a row to keep; None: all.
        length_column: the column of a datasets.Dataset that holds the rows' lengths, for "group_by_length".
        workers: the options of torch's DataLoader for loading in other processes; empty: this process loads.
        temperature: T by which languages are drawn (hf_gpipe.data.sampling); 1: every row once an epoch.
    """

    dataset: Any
    collate: Collate
    size: BatchSize
    order: str = "sequential"
    seed: int = 0
    drop_last: bool = False
    columns: Collection[str] | None = None
    length_column: str = "length"
    workers: Mapping[str, Any] | None = None
    temperature: float = 1.0
    _positions: list[DataPositions] = field(default_factory=list, init=False, repr=False, compare=False)
    _rows: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __iter__(self) -> Iterator[Batch]:
        """The mini-batches of the first epoch."""
        return self.epoch(0)

    def __len__(self) -> int:
        """The number of mini-batches of an epoch. Raises TypeError if only reading the dataset tells."""
        if (count := self.count()) is None:
            raise TypeError("the number of mini-batches is not known before they are read")
        return count

    @property
    def is_iterable(self) -> bool:
        """Whether the rows have no index."""
        return not has_index(self.dataset)

    def count(self) -> int | None:
        """The number of mini-batches of an epoch; None if only reading the dataset tells."""
        if isinstance(self.dataset, SeveralDatasets):
            counts = self._counts
            return min(counts) * len(counts) if self.dataset.in_turn else sum(counts)
        if not hasattr(self.dataset, "__len__"):
            return None
        if (size := self.size.known_rows) is None:
            return None if self.is_iterable else self._num_token_batches
        whole, rest = divmod(len(self.dataset), size)
        return whole + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, start: int = 0, place: Place | None = None) -> Iterator[Batch]:
        """The mini-batches of an epoch from number `start` on. A map-style dataset does not load those before.

        Args:
            epoch: the epoch, counted from 0.
            start: the number of the first mini-batch, counted from 0.
            place: the result of the method `place` for `start`, so that an iterable dataset is not read from its
                beginning.

        Raises:
            DataError: the length, target tokens or language of rows is needed and unknown, or rows cannot be collated.
        """
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        if self.is_iterable:
            return self._read(epoch, start, place)
        batches = self._plan(epoch)
        numbers = range(start, len(batches))
        load = _Loaded(self, epoch, batches)
        if self.workers is None:
            return (load[number] for number in numbers)
        return iter(DataLoader(load, batch_size=None, sampler=numbers, **self.workers))

    def whole(self) -> Batch:
        """A mini-batch of the first epoch that has all of its rows, of which one of an epoch may have fewer."""
        first = list(islice(self.epoch(0), 2))
        # Prompts have no labels before they are answered.
        return max(first, key=lambda batch: len(next(iter(batch.values())))) if self.size.known_rows else first[0]

    def place(self, number: int) -> Place | None:
        """The place of mini-batch `number` in the epoch being read, for `epoch` of another run, as JSON values.

        None for a map-style dataset, whose mini-batches have an index, and for an iterable dataset without `state_dict`
        and `load_state_dict`, which is read from its beginning.
        """
        return self._positions[0].at(number) if self._positions else None

    def _plan(self, epoch: int) -> list[list[int]]:
        """The rows of each mini-batch, by index."""
        if isinstance(self.dataset, SeveralDatasets):
            return self._mixed(self.dataset, epoch)
        size, drawn = self.size.known_rows, self._drawn(epoch)
        if self.order == "no_duplicates":
            keys, count = self._keys, self.count()
            assert size is not None  # `_keys` refuses a size in tokens
            assert count is not None
            batches = distinct_batches([keys[row] for row in drawn], size, count, self.seed, epoch)
            return [drawn[batch].tolist() for batch in batches]
        lengths = None
        if self.order == "group_by_length":
            lengths = np.asarray(self._lengths())[drawn]
        if size is None:
            tokens = self._target_tokens[drawn]
            is_shuffled = self.order != "sequential"
            batches = token_batches(tokens, self._num_token_batches, self.seed, epoch, lengths, shuffled=is_shuffled)
        elif lengths is not None:
            batches = length_bucketed_batches(lengths, size, self.seed, epoch)
        elif self.order == "random":
            batches = shuffled_batches(len(drawn), size, self.seed, epoch)
        else:
            batches = [list(range(i, min(i + size, len(drawn)))) for i in range(0, len(drawn), size)]
        return [drawn[batch].tolist() for batch in self._without_rest(batches)]

    @property
    def _parts(self) -> list[MiniBatches]:
        """The mini-batches of each of several datasets."""
        return [replace(self, dataset=dataset) for dataset in self.dataset.datasets.values()]

    @cached_property
    def _counts(self) -> list[int]:
        """The number of mini-batches of each of several datasets."""
        return list(map(len, self._parts))

    def _mixed(self, several: SeveralDatasets, epoch: int) -> list[list[int]]:
        generator, size = torch.Generator().manual_seed(self.seed + epoch), self.size.known_rows
        if self.order == "random" and self.temperature == 1 and size is not None:
            drawn = [len(dataset) for dataset in several.datasets.values()]
            plans: list[Any] = [drawn_batches(count, size, generator, drop_last=self.drop_last) for count in drawn]
        else:
            plans = [part._plan(epoch) for part in self._parts]
        return [*mixed_batches(plans, self._counts, several.starts, generator, in_turn=several.in_turn)]

    def _without_rest(self, batches: list[list[Any]]) -> list[list[Any]]:
        """Drop the last mini-batch, where it has fewer rows and is left out."""
        size = self.size.known_rows if self.drop_last else None
        return [batch for batch in batches if size in (None, len(batch))]

    def _drawn(self, epoch: int) -> np.ndarray:
        """The rows of an epoch, by index; kept until another epoch is asked for."""
        if epoch not in self._rows:
            self._rows.clear()
            self._rows[epoch] = (
                np.arange(len(self.dataset))
                if self.temperature == 1
                else np.array(epoch_rows(self._languages, self.temperature, self.seed, epoch))
            )
        return self._rows[epoch]

    @cached_property
    def _keys(self) -> Sequence[Collection[int]]:
        """The keys of each row."""
        if self.size.known_rows is None:
            raise UserError(
                "train_sampling_strategy='no_duplicates' needs mini-batches of so many rows; leave batch_tokens out"
            )
        keys: Sequence[Collection[int]] | None = getattr(self.dataset, "keys", None)
        if keys is None:
            raise DataError(
                "train_sampling_strategy='no_duplicates' needs the texts of each row, which a dataset of "
                f"EmbeddingExamples has, and a {type(self.dataset).__name__} has not; use random"
            )
        return keys

    @cached_property
    def _num_token_batches(self) -> int:
        """The number of mini-batches of every epoch, which the first epoch decides."""
        assert self.size.tokens is not None
        return num_token_batches(self._target_tokens[self._drawn(0)], self.size.tokens)

    @cached_property
    def _target_tokens(self) -> np.ndarray:
        """The number of target tokens of each row."""
        if hasattr(self.dataset, "target_tokens"):
            return np.asarray(self.dataset.target_tokens)
        return np.array([target_tokens(self.dataset[index]) for index in range(len(self.dataset))], dtype=np.int64)

    @cached_property
    def _languages(self) -> Sequence[str]:
        """The language of each row."""
        if hasattr(self.dataset, "languages"):
            return list(self.dataset.languages)
        if "language" in (getattr(self.dataset, "column_names", None) or ()):
            return list(self.dataset["language"])
        raise DataError(
            f"sampling_temperature={self.temperature} needs the language of each row: a dataset with an attribute "
            "`languages`, or with a column 'language'"
        )

    def _lengths(self) -> Sequence[int]:
        if hasattr(self.dataset, "lengths"):
            return list(self.dataset.lengths)
        if self.length_column in getattr(self.dataset, "column_names", ()):
            return list(self.dataset[self.length_column])
        try:
            return [len(token_ids(self.dataset[index])) for index in range(len(self.dataset))]
        except (KeyError, TypeError) as error:
            raise DataError(
                "train_sampling_strategy='group_by_length' needs the length of each row: a row with token ids, a "
                f"column {self.length_column!r}, or a dataset with an attribute `lengths`"
            ) from error

    def _read(self, epoch: int, start: int, place: Place | None) -> Iterator[Batch]:
        """Read the mini-batches of an iterable dataset. Without a place, those before `start` are read and skipped."""
        if self.workers is not None:
            raise UserError("dataloader_num_workers: an iterable dataset is read by the main process; use 0")
        if self.order == "no_duplicates":
            raise UserError(
                "train_sampling_strategy='no_duplicates': an iterable dataset draws its rows itself; use random"
            )
        if self.temperature != 1:
            raise UserError(
                f"sampling_temperature={self.temperature}: an iterable dataset draws its rows itself; use 1 here"
            )
        pools = Pools(self.size, self.order == "group_by_length", self.seed)
        positions = DataPositions(self.dataset)
        number = positions.begin(start, place)
        self._positions[:] = [positions]
        return self._read_pools(epoch, start, number, pools, positions)

    def _read_pools(
        self, epoch: int, start: int, number: int, pools: Pools, positions: DataPositions
    ) -> Iterator[Batch]:
        rows, done = iter(self.dataset), number * (self.size.known_rows or 0)
        length = None if self.count() is None else len(self.dataset)
        while True:
            seed_generators(mix(self.seed, epoch, number))
            done += len(pool := pools.read(rows))
            batches = self._without_rest(pools.cut(pool, epoch, number))
            if length is not None and (done > length or (not batches and done < length)):
                logger.warning_once(
                    f"the length of the dataset, a {type(self.dataset).__name__}, is {length}, and it gives "
                    f"{'more' if done > length else done} rows: epochs, steps and the learning rate follow from the "
                    "length; correct its __len__, or leave that out and give max_steps"
                )
            if not batches:
                return
            positions.pool_ends(number + len(batches))
            for index, batch in enumerate(batches, start=number):
                if index > number:
                    seed_generators(mix(self.seed, epoch, index))
                if index >= start:
                    yield self._collated(batch)
            number += len(batches)

    def _check_columns(self, row: Any) -> None:
        """Raise DataError for a row that has no entry that the model reads."""
        if not isinstance(row, Mapping) or self.columns is None or {*row} & {*self.columns} - LABEL_COLUMNS:
            return
        columns = listed(list(map(str, row)))
        if any(name in row for name in ("messages", "conversations", "prompt", "completion", "text")):
            advice = "they are not tokenised: give the dataset to PipelineSFTTrainer with a PipelineSFTConfig"
            if "chosen" in row:
                advice = "they are not tokenised: give the dataset to PipelineDPOTrainer with a PipelineDPOConfig"
        else:
            advice = f"name them as the arguments of its forward ({IDS!r} and 'labels' of text)"
        raise DataError(
            f"the rows have the columns {columns}, and none that the model takes; {advice}, or set "
            "remove_unused_columns=False where the data_collator reads them"
        )

    def _collated(self, rows: list[Any]) -> Batch:
        if self.columns is not None:
            self._check_columns(rows[0])
            rows = [
                {k: v for k, v in row.items() if k in self.columns} if isinstance(row, Mapping) else row for row in rows
            ]
        return checked_batch(self.collate(rows), "data collator")


class _Loaded(Dataset[Batch]):
    """The mini-batches of one epoch by number, in a form that workers of torch's DataLoader understand."""

    def __init__(self, source: MiniBatches, epoch: int, batches: Sequence[Sequence[int]]) -> None:
        self._source = replace(source, workers=None)
        self._epoch, self._batches = epoch, batches

    def __getitem__(self, number: int) -> Batch:
        source = self._source
        seed_generators(mix(source.seed, self._epoch, number))
        indices = list(self._batches[number])
        many = getattr(source.dataset, "__getitems__", None)
        return source._collated(many(indices) if many else [source.dataset[index] for index in indices])


def checked_batch(batch: Any, source: str) -> Batch:
    """A mini-batch as a dict. Raises DataError, which names its source, where it is none."""
    if not isinstance(batch, Mapping):
        raise DataError(
            f"the {source} returned a {type(batch).__name__}; a mini-batch is a dict of tensors, such as "
            f"{{{IDS!r}: ..., 'labels': ...}}: let it return that"
        )
    return dict(batch)


def seed_generators(seed: int) -> None:
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
