"""Mini-batches of held-out rows, which the main process has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.loader import Batch


class Dataset(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def held_out(
    pipe: Pipeline,
    make_rows: Callable[[], Dataset],
    collate: Callable[[list[Any]], Batch],
    batch_size: int,
    max_rows: int | None = None,
) -> tuple[int, Iterator[Batch] | None]:
    """The number of rows to evaluate, and in the main process their mini-batches. Every process calls it.

    Args:
        pipe: what evaluates them.
        make_rows: returns a dataset; called in the main process only.
        collate: makes a mini-batch of some of its rows.
        batch_size: rows of a mini-batch.
        max_rows: how many to take, the first ones; None: all.

    Raises:
        DataError: on every process, what `make_rows` raises in the main one.
    """
    made: list[Dataset] = []

    def prepare() -> int:
        made.append(make_rows())
        return min(len(made[0]), max_rows or len(made[0]))

    num_rows = pipe.world.from_reader(prepare, takes_long=True)
    if not made:
        return num_rows, None
    starts = range(0, num_rows, batch_size)
    return num_rows, (
        collate([made[0][index] for index in range(start, min(start + batch_size, num_rows))]) for start in starts
    )
