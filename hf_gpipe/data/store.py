"""The cache of prepared data: memory-mapped Arrow files in the cache of `datasets`.

An entry's name is a hash of all that its content depends on, so an entry is never changed. It is written under another
name and renamed at the end: processes that prepare the same entry at once do not disturb each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pyarrow  # type: ignore[import-untyped]

from hf_gpipe.errors import DataError

T = TypeVar("T")

#: To be raised when the same inputs give another content.
VERSION = 1
#: The content of smaller files is hashed; of a larger one, its path, size and time of writing identify it.
_HASHED_BYTES = 16 * 2**20
#: Rows of a batch in a file, which is what is decoded at a time.
BATCH_ROWS = 1000


def fingerprint(*parts: Any) -> str:
    """A hash of JSON values."""
    text = json.dumps([VERSION, *parts], sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def identity_of(file: Path) -> list[Any]:
    """JSON values that identify the content of a file. Raises DataError if the file cannot be read."""
    try:
        found = file.stat()
        if found.st_size > _HASHED_BYTES:
            return [str(file.resolve()), found.st_size, found.st_mtime_ns]
        return [str(file.resolve()), hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()]
    except OSError as error:
        raise DataError(f"data file {file} cannot be read: {error}") from error


def cached(name: str, key: str, write: Callable[[Path], None]) -> Path:
    """The folder of an entry.

    Args:
        name: the first part of the folder's name, for people.
        key: a fingerprint of what the content depends on.
        write: fills an empty folder; called if the entry does not exist yet.

    Raises:
        DataError: the cache cannot be written, or any error of `write`.
    """
    import datasets  # it takes half a second, and only the main process prepares data

    root = Path(datasets.config.HF_DATASETS_CACHE) / "hf_gpipe"
    entry = root / f"{name}-{key}"
    if entry.is_dir():
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    except OSError as error:
        raise DataError(
            f"the cache directory {root} cannot be written ({error.strerror}); set HF_DATASETS_CACHE to one that can"
        ) from error
    try:
        write(made)
        os.rename(made, entry)
    except OSError as error:
        if not entry.is_dir():  # otherwise another process was faster
            raise DataError(
                f"the cache directory {root} cannot be written ({error.strerror}); make room there, or set "
                "HF_DATASETS_CACHE to another one"
            ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return entry


def write_table(path: Path, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch]) -> None:
    """Write an Arrow file, batch by batch."""
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_table(path: Path) -> pyarrow.Table:
    """The table in an Arrow file, memory-mapped: only what is accessed is read."""
    with pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) as reader:
        return reader.read_all()


def in_blocks(items: Sequence[T], size: int = BATCH_ROWS) -> Iterator[Sequence[T]]:
    """The items in slices of `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
