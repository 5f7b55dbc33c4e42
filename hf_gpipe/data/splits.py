"""Documents or conversations in three splits, from local files or a data set of the Hub."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from hf_gpipe.data.deterministic import stable_random
from hf_gpipe.data.fields import PairFields
from hf_gpipe.data.files import SUFFIXES, files_of, held_out_beside_others
from hf_gpipe.data.formats import Row
from hf_gpipe.data.pairs import SPLITS, split_of
from hf_gpipe.data.progress import progress
from hf_gpipe.errors import DataError
from hf_gpipe.recipe import DataSection

Item = TypeVar("Item")


@dataclass(frozen=True)
class Splits(Generic[Item]):
    """A corpus without languages."""

    train: list[Item]
    validation: list[Item]
    test: list[Item]
    languages: list[str] = field(default_factory=list)
    target_tags: list[str] = field(default_factory=list)


def read_splits(
    data: DataSection,
    *,
    of_file: Callable[[Path], Iterable[Item]],
    of_rows: Callable[[Iterable[Row]], Iterable[Item]],
    text_of: Callable[[Item], str],
    what: str,
    evaluated: Collection[str] = ("validation", "test"),
) -> tuple[list[Item], list[Item], list[Item]]:
    """Read `data.path`: local files, otherwise a data set of the Hub or a directory in its form.

    A data set's own splits "validation" and "test" are kept. A split that it has not is cut off from the training items
    by a hash of each. `data.max_examples` items are drawn from those to train on, or to split, and keep their order.

    Args:
        data: the section.
        of_file: the items of a file.
        of_rows: the items of a data set's rows.
        text_of: text by which an item is put into a split.
        what: the items, in messages.
        evaluated: the splits to evaluate on; of a data set's own splits the others are left empty.

    Returns:
        The items of the training, validation and test splits.

    Raises:
        DataError: no such files or data set, or nothing to train on.
    """
    path = data.path or ""
    own: dict[str, list[Item]] = {}
    if is_local(path, data.kind):
        if data.subset is not None or data.revision is not None:
            key, value = ("subset", data.subset) if data.subset is not None else ("revision", data.revision)
            raise DataError(f"data.{key} is {value!r}, and {path} are files of this machine; leave data.{key} out")
        items: Iterable[Item] = (item for file in files_of(path, data.kind) for item in of_file(file))
    else:
        from hf_gpipe.data.hub import hub_parts  # its library takes a second to import

        (part,) = hub_parts(data, PairFields.of(data))
        items = of_rows(part.train())
        held_out = {"validation": part.validation, "test": part.test}
        own = {
            name: list(progress(of_rows(rows()), f"reading {name}", what)) if name in evaluated else []
            for name, rows in held_out.items()
            if rows
        }
    read = list(progress(items, f"reading {path}", what))
    splits = split(
        drawn(read, data.max_examples, "max_examples", data.seed),
        text_of,
        what,
        validation_fraction=0.0 if "validation" in own else data.validation_fraction,
        test_fraction=0.0 if "test" in own else data.test_fraction,
    )
    splits |= own
    return splits["train"], splits["validation"], splits["test"]


def split(
    items: Iterable[Item],
    text_of: Callable[[Item], str],
    what: str,
    *,
    validation_fraction: float,
    test_fraction: float,
) -> dict[str, list[Item]]:
    """Distribute items over the splits by a hash of their text, so that equal ones are in the same split.

    The split does not depend on other items, so it stays when the corpus grows. The fractions are met on average.

    Raises DataError if there is nothing to train on.
    """
    splits: dict[str, list[Item]] = {name: [] for name in SPLITS}
    for item in items:
        splits[split_of(text_of(item), validation_fraction, test_fraction)].append(item)
    if not splits["train"]:
        raise DataError(
            f"there are no {what} to train on ({len(splits['validation'])} for validation, {len(splits['test'])} for "
            "test); give more, or smaller validation_fraction and test_fraction"
        )
    return splits


def is_local(path: str, kind: str) -> bool:
    """Whether `path` means files of this machine that have documents or conversations, there or not."""
    if glob.has_magic(path) or path.endswith(SUFFIXES[kind]):
        return True
    try:
        place = Path(path).expanduser()
        files = [file for file in place.iterdir() if _is_of(file, kind)] if place.is_dir() else []
    except (OSError, ValueError):  # a name that no file can have
        return False
    # A directory with splits has the form of a data set, unless its documents are paragraphs, of which `datasets` knows
    # nothing.
    has_splits = bool(held_out_beside_others(files)) and not any(".txt" in file.name for file in files)
    return place.is_file() or (bool(files) and not has_splits)


def _is_of(path: Path, kind: str) -> bool:
    """Whether a file's name ends as those that are read."""
    return path.name.endswith(SUFFIXES[kind]) and path.is_file()


def drawn(items: list[Item], count: int | None, *seed: object) -> list[Item]:
    """Sample at most `count` of the items and keep their order."""
    if count is None or count >= len(items):
        return items
    chosen = stable_random(*seed).sample(range(len(items)), count)
    return [items[index] for index in sorted(chosen)]
