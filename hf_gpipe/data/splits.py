"""A corpus: pairs, documents, conversations or other items in three splits; how items are put into them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

from hf_gpipe.data.deterministic import SPLITS, split_of, stable_random
from hf_gpipe.data.files import files_of, is_local, suffixes_of
from hf_gpipe.data.formats import Row, rows_of_file
from hf_gpipe.errors import DataError
from hf_gpipe.progress import progress
from hf_gpipe.recipe import DataSection

Item = TypeVar("Item")
#: Pairs or documents that a tokenizer is trained on at most, unless told: with more, SentencePiece takes minutes and
#: gigabytes, and finds nearly the same pieces.
MAX_TOKENIZER_EXAMPLES = 250_000


@dataclass(frozen=True)
class Corpus(Generic[Item]):
    """Items of any kind in three splits.

    Attributes:
        train: the items to train on; those of a stream have no number.
        validation, test: the items to evaluate on.
        languages: of pairs, in the order of the recipe.
        target_tags: the tags that sources of pairs may have.
        texts_of: the texts of an item that a tokenizer may be trained on.
    """

    train: Any
    validation: Sequence[Item]
    test: Sequence[Item]
    languages: list[str] = field(default_factory=list)
    target_tags: list[str] = field(default_factory=list)
    texts_of: Callable[[Item], Iterable[str]] = field(default=lambda item: (), compare=False)

    def texts(self, max_items: int | None = None) -> Iterator[str]:
        """The texts of training items, to train a tokenizer on.

        Args:
            max_items: how many are sampled where there are more; None: `MAX_TOKENIZER_EXAMPLES`.
        """
        most = max_items or MAX_TOKENIZER_EXAMPLES
        return chain.from_iterable(map(self.texts_of, drawn(self.train, most, "texts", most)))


def read_splits(
    data: DataSection,
    *,
    of_rows: Callable[[Iterable[Row]], Iterable[Item]],
    text_of: Callable[[Item], str],
    texts_of: Callable[[Item], Iterable[str]],
    what: str,
    evaluated: Collection[str] = ("validation", "test"),
) -> Corpus[Item]:
    """Read `data.path`: local files, otherwise a data set of the Hub or a directory in its form.

    A data set's own splits "validation" and "test" are kept. A split that it has not is cut off from the training items
    by a hash of each. `data.max_examples` items are drawn from those to train on, or to split, and keep their order.

    Args:
        data: the section.
        of_rows: the items of rows.
        text_of: text by which an item is put into a split.
        texts_of: the texts of an item that a tokenizer may be trained on.
        what: the items, in messages.
        evaluated: the splits to evaluate on; of a data set's own splits the others are left empty.

    Raises:
        DataError: no such files or data set, or nothing to train on.
    """
    path = data.path or ""
    own: dict[str, list[Item]] = {}
    if is_local(path, data.kind):
        if data.subset is not None or data.revision is not None:
            key, value = ("subset", data.subset) if data.subset is not None else ("revision", data.revision)
            raise DataError(f"data.{key} is {value!r}, and {path} are files of this machine; leave data.{key} out")
        files = (
            rows_of_file(file, suffixes_of(data.kind), what, data.text_field) for file in files_of(path, data.kind)
        )
        rows: Iterable[Row] = chain.from_iterable(files)
    else:
        from hf_gpipe.data.hub import hub_part  # its library takes a second to import

        part = hub_part(path, data.subset, data.revision)
        rows = part.train()
        own = {
            name: list(progress(of_rows(open_rows()), f"reading {name}", what)) if name in evaluated else []
            for name, open_rows in part.held_out.items()
        }
    read = list(progress(of_rows(rows), f"reading {path}", what))
    parts = split_beside(own, read, data, text_of, what) | own
    return Corpus(parts["train"], parts["validation"], parts["test"], texts_of=texts_of)


def split_beside(
    own: Collection[str], items: Sequence[Item], data: DataSection, text_of: Callable[[Item], str], what: str
) -> dict[str, list[Item]]:
    """Distribute `data.max_examples` of the items over the splits; those whose names are in `own` get none.

    It is by a hash of their text, so that equal ones are in the same split. The split does not depend on a seed or on
    other items, so it stays when the corpus grows, and a model trained on one corpus has never seen the test texts of
    another. The fractions are met on average.

    Raises DataError if there is nothing to train on.
    """
    fractions = held_out_of(own, data)
    items = drawn(items, data.max_examples, "max_examples", data.seed)
    splits: dict[str, list[Item]] = {name: [] for name in SPLITS}
    if not any(fractions):
        splits["train"] = list(items)
    else:
        for item in items:
            splits[split_of(text_of(item), *fractions)].append(item)
    check_training({name: len(own) for name, own in splits.items()}, what)
    return splits


def held_out_of(own: Collection[str], data: DataSection) -> tuple[float, float]:
    """The shares of training items that are held out for validation and test: 0 of a split that the data have."""
    fractions = {"validation": data.validation_fraction, "test": data.test_fraction}
    validation, test = (0.0 if split in own else fraction for split, fraction in fractions.items())
    return validation, test


def check_training(counts: Mapping[str, int], what: str) -> None:
    """Raise DataError if the training split has no items, given the number in each split."""
    if not counts["train"]:
        raise DataError(
            f"there are no {what} to train on ({counts['validation']} for validation, {counts['test']} for test); give "
            "more, or smaller validation_fraction and test_fraction"
        )


def drawn(items: Sequence[Item], count: int | None, *seed: object) -> Sequence[Item]:
    """Sample at most `count` of the items and keep their order."""
    if count is None or count >= len(items):
        return items
    chosen = stable_random(*seed).sample(range(len(items)), count)
    return [items[index] for index in sorted(chosen)]
