"""Mini-batches of an iterable dataset: it is read in pools, which are cut into mini-batches like an epoch's rows.

What a pool holds follows from where its first row stands in the dataset. So a place in the data is the dataset's own
state at the start of a pool and the number of that pool's mini-batches that are done, and a training that resumes there
reads this one pool again and nothing before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.adapters.text_entries import IDS, has_ids, token_ids
from hf_gpipe.checkpoint.state import Place
from hf_gpipe.data.batches import POOL_BATCHES, cut_evenly, num_token_batches
from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.stream import has_state, is_of_datasets
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.recipe.batch_size import BatchSize

# The most rows and target tokens of a pool, about, or one mini-batch: it is in memory as Python objects.
_MOST_ROWS, _MOST_TOKENS = 2**15, 2**20

#: The datasets of the library `datasets` that were sent to a place.
_sent: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class Pools:
    """Cuts the rows of an iterable dataset into pools and mini-batches.

    Attributes:
        size: the size of a mini-batch.
        by_length: whether rows of similar length share a mini-batch. Otherwise a pool is one mini-batch.
        seed: the seed of the order of a pool's mini-batches.
    """

    size: BatchSize
    by_length: bool
    seed: int

    def read(self, rows: Iterator[Any]) -> list[Any]:
        """The rows of the next pool; empty at the end."""
        pool: list[Any] = []
        done, num_tokens = 0, self.size.tokens
        size, most = (self.size.rows, _MOST_ROWS) if num_tokens is None else (num_tokens, _MOST_TOKENS)
        enough = size * (max(1, min(POOL_BATCHES, most // size)) if self.by_length else 1)
        for row in rows:
            pool.append(row)
            done += 1 if num_tokens is None else target_tokens(row)
            if done >= enough:
                break
        return pool

    def cut(self, pool: Sequence[Any], epoch: int, number: int) -> list[list[Any]]:
        """The mini-batches of a pool, whose first mini-batch has this `number` in the epoch."""
        order = list(range(len(pool)))
        if self.by_length:
            lengths = [row_length(row) for row in pool]
            order.sort(key=lengths.__getitem__)
        num_rows, num_tokens = self.size.rows, self.size.tokens
        if num_tokens is None:
            batches = [order[start : start + num_rows] for start in range(0, len(order), num_rows)]
        else:
            tokens = [target_tokens(row) for row in pool]
            batches = cut_evenly(order, tokens, num_token_batches(tokens, num_tokens))
        if self.by_length:
            stable_random("pool", self.seed, epoch, number).shuffle(batches)
        return [[pool[index] for index in batch] for batch in batches]


class DataPositions:
    """The places where the pools of an epoch begin, as far as they have been read: reading may be ahead of training.

    Args:
        dataset: the dataset, whose state is asked for where it has a state.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._starts: list[tuple[int, Any]] = []

    def begin(self, start: int, place: Place | None) -> int:
        """Send the dataset to the pool of a `place`, or leave it at the beginning of its epoch.

        Args:
            start: the mini-batch that comes next.
            place: the result of `at` for that mini-batch; None: nothing is known.

        Returns:
            The number of the first mini-batch that will be read.

        Raises:
            DataError: the dataset does not understand the place.
        """
        state, done = (None, start) if place is None else (place["state"], place["done"])
        if state is not None:
            if not has_state(self._dataset):
                raise DataError(
                    "the checkpoint says where its dataset stood, and this one has no load_state_dict; resume with the "
                    "same data, or use ignore_data_skip=True to begin them anew"
                )
            try:
                self._dataset.load_state_dict(state)
            except UserError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise DataError(
                    f"the place in the data that the checkpoint has does not fit this dataset: {error!r}; resume with "
                    "the same data, or use ignore_data_skip=True to begin them anew"
                ) from error
            if is_of_datasets(self._dataset):
                _sent.add(self._dataset)
        elif is_of_datasets(self._dataset) and self._dataset in _sent:
            # Otherwise every later epoch would begin at this place.
            self._dataset.load_state_dict(None)
        self._starts = [(start - done, state)]
        return start - done

    def pool_ends(self, number: int) -> None:
        """Note that the pool before mini-batch `number` has been read, and no row after it."""
        if has_state(self._dataset):
            self._starts.append((number, self._dataset.state_dict()))

    def at(self, number: int) -> Place | None:
        """The place of mini-batch `number`, in a form that JSON can hold; earlier positions are forgotten.

        None where only reading from the beginning leads there.
        """
        if not has_state(self._dataset):
            return None
        while len(self._starts) > 1 and self._starts[1][0] <= number:
            del self._starts[0]
        first, state = self._starts[0]
        return {"state": state, "done": number - first}


def has_index(dataset: Any) -> bool:
    """Whether rows can be asked for by number. Torch's iterable datasets inherit the method, which raises an error."""
    has_methods = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return has_methods and not isinstance(dataset, IterableDataset)


def target_tokens(row: Any) -> int:
    """The number of labels of a row that count, or of ids where a row has no labels: a collator makes them of the ids.

    Raises DataError for a row without labels and ids.
    """
    labels: Any = row.get("labels") if isinstance(row, Mapping) else None
    if hasattr(labels, "__len__"):
        return len(labels) - _values(labels).count(IGNORED_LABEL)
    return len(_ids(row))


def row_length(row: Any) -> int:
    """The number of tokens of source and target. Raises DataError for a row without `input_ids`."""
    ids, labels = _ids(row), row.get("labels")
    return len(ids) + (len(labels) if hasattr(labels, "__len__") else 0)


def _ids(row: Any) -> Any:
    if not has_ids(row):
        kind = f"the entries {', '.join(map(str, row))}" if isinstance(row, Mapping) else f"a {type(row).__name__}"
        raise DataError(
            f"a training row is {kind}; batch_tokens and train_sampling_strategy='group_by_length' need rows with "
            f"{IDS!r} and 'labels'"
        )
    return token_ids(row)


def _values(labels: Iterable[Any]) -> list[Any]:
    return labels if isinstance(labels, list) else labels.tolist() if hasattr(labels, "tolist") else list(labels)
