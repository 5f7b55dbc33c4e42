"""Data sets of the Hugging Face Hub, or directories of the same form, as parts of a corpus."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import datasets

from hf_gpipe.data.deterministic import SPLITS, stable_random
from hf_gpipe.data.formats import Row
from hf_gpipe.data.parts import PLACEHOLDER, Part, Rows, check_count
from hf_gpipe.errors import DataError, listed, nearest, one_line
from hf_gpipe.libraries.datasets import fingerprint_of
from hf_gpipe.libraries.huggingface_hub import showing_downloads


def _subset_of(
    path: str, subset: str | Sequence[str] | Mapping[str, str] | None, language: str | None, revision: str | None
) -> str | None:
    """The name of a language's subset."""
    if subset is None:
        return None
    if isinstance(subset, Mapping):
        if language is None or language not in subset:
            raise DataError(
                f"data.subset names no subset for the language {language!r}; it has {', '.join(subset)}: add the "
                "language, or take it out of languages"
            )
        wanted = [subset[language]]
    else:
        templates = [subset] if isinstance(subset, str) else list(subset)
        wanted = [name.replace(PLACEHOLDER, language or "") for name in templates]
    known = _subsets(path, revision)
    for name in wanted:
        if name in known:
            return name
    raise DataError(
        f"data.subset: {path} has no subset {' or '.join(map(repr, wanted))}{nearest(wanted[0], known)}; it has "
        f"{listed(known)}"
    )


@functools.lru_cache(maxsize=8)
def _subsets(path: str, revision: str | None) -> list[str]:
    return list(asked(path, None, lambda: datasets.get_dataset_config_names(path, revision=revision)))


def hub_part(
    path: str, subset: Any, revision: str | None, language: str | None = None, *, streaming: bool = False
) -> Part:
    """A data set, or its part of one language; the arguments are keys of the section `data`.

    Raises DataError where the data set, the subset or the training split does not exist; names those that do.
    """
    subset = _subset_of(path, subset, language, revision)
    splits = asked(path, subset, lambda: datasets.load_dataset(path, subset, revision=revision, streaming=streaming))
    name = f"{path}, {subset}" if subset else path
    if "train" not in splits:
        raise DataError(f"{name} has no split 'train'; its splits are {', '.join(map(str, splits))}")
    opened = {split: _opener(name, split, splits[split]) for split in SPLITS if split in splits}
    train = splits["train"]
    known = (train.info.splits or {}).get("train") if streaming else None
    num_rows = len(train) if not streaming else known.num_examples if known is not None else None
    return Part(
        name,
        language,
        opened.pop("train"),
        opened,
        num_rows or None,
        identity=lambda: {split: fingerprint_of(splits[split]) for split in SPLITS if split in splits},
    )


def _opener(name: str, split: str, rows: Any) -> Callable[[], Rows]:
    where = f"{name}, split {split}"
    # No one reads images and sound here, and `datasets` would open the files that a row names, wherever they are.
    if not isinstance(rows, datasets.IterableDataset):
        rows = rows.with_format("arrow")
    elif rows.features is not None and (features := without_media(rows.features)) != rows.features:
        rows = rows.decode(False).cast(features)
    # Iterating changes an IterableDataset, so two readers of one object would disturb each other.
    return lambda: HubRows(where, copy.deepcopy(rows) if isinstance(rows, datasets.IterableDataset) else rows)


def without_media(features: Any) -> Any:
    """Features of which `datasets` decodes no images, sound and other files, whose paths may lead anywhere."""

    def visit(feature: Any) -> None:
        if isinstance(feature, dict | list | tuple):
            for inner in feature.values() if isinstance(feature, dict) else feature:
                visit(inner)
        elif hasattr(feature, "feature"):
            visit(feature.feature)
        elif hasattr(feature, "decode") and type(feature).__name__ != "Json":
            feature.decode = False

    kept = features.copy()  # a deep one
    visit(kept)
    return datasets.Features(dict(kept))  # which finds out anew what to decode


class HubRows:
    """The rows of a split, shard after shard; in epochs after 0 the shards are in another order.

    The library can shuffle shards only together with a buffer, whose rows it loses on resuming.

    Args:
        where: the name of the rows in messages.
        rows: a `datasets.Dataset` in the format of Arrow, or an `IterableDataset` that is not shuffled, so that its
            state is exact.
    """

    def __init__(self, where: str, rows: Any) -> None:
        self._where, self._rows = where, rows
        self._num_shards = rows.num_shards if isinstance(rows, datasets.IterableDataset) else 1
        self._features = None if rows.features is None else without_media(rows.features)
        self._epoch, self._done = 0, 0
        self._shard: Any = None
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Row]:
        count = self._num_shards
        order = list(range(count))
        if self._epoch:
            stable_random("shards", self._epoch).shuffle(order)
        while self._done < count:
            self._shard = self._rows if count == 1 else self._rows.shard(count, order[self._done])
            if self._state is not None:
                self._shard.load_state_dict(self._state)
            rows = iter(self._shard)
            while (row := self._next(rows)) is not None:
                yield self._where, row
            self._done, self._shard, self._state = self._done + 1, None, None

    def _next(self, rows: Iterator[Any]) -> Mapping[str, Any] | None:
        """The next row; None at the end."""
        try:
            row = next(rows, None)
            if row is None or isinstance(row, Mapping):
                return row
            assert self._features is not None
            example: dict[str, Any] = self._features.decode_example(row.to_pylist()[0])
            return example
        except Exception as error:  # the network, the file system and the file formats raise many classes
            raise DataError(
                f"{self._where} cannot be read: {one_line(str(error) or type(error).__name__, 300)}"
            ) from error

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the shards; epoch 0 keeps the original order."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row: how many shards are done, and the library's state of the current one."""
        rows = self._state if self._shard is None else self._shard.state_dict()
        return {"done": self._done, "shards": self._num_shards, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. Raises CheckpointError if the data set then had another number of shards."""
        check_count(state.get("shards"), self._num_shards, "shards", self._where)
        self._done, self._state = state["done"], state["rows"]


def asked(path: str, subset: str | None, ask: Callable[[], Any]) -> Any:
    """Call the library and return its result; raise DataError in place of any of its errors."""
    name = f"{path}, subset {subset!r}" if subset else path
    absent = "" if os.path.exists(path) else f" (and {os.getcwd()} has no such file or directory)"
    were_disabled = datasets.are_progress_bars_disabled()
    try:
        datasets.disable_progress_bars()
        with showing_downloads():
            return ask()
    except Exception as error:  # of a data set's files and of the network the library raises many classes
        raise DataError(
            f"data.path: no data set can be read at {name}{absent}: {one_line(str(error) or type(error).__name__, 300)}"
        ) from error
    finally:
        if not were_disabled:
            datasets.enable_progress_bars()
