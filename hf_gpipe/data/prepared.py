"""The cache of prepared data: memory-mapped Arrow files in the cache of `datasets`.

An entry's name is a hash of all that its content depends on, so an entry is never changed. It is written under another
name and renamed at the end: processes that prepare the same entry at once do not disturb each other. Digests of its
files, as a checkpoint has, are checked before it is used; a damaged entry is made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

import pyarrow  # type: ignore[import-untyped]
from pydantic import Field

from hf_gpipe import strict_json
from hf_gpipe.checkpoint import digests
from hf_gpipe.checkpoint.digests import DIGESTS_FILE, Digests
from hf_gpipe.errors import CheckpointError, DataError, one_line
from hf_gpipe.libraries.datasets import cache_folders

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Counts = Annotated[list[strict_json.Number], Field(min_length=2, max_length=2)]

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
        status = file.stat()
        if status.st_size > _HASHED_BYTES:
            return [str(file.resolve()), status.st_size, status.st_mtime_ns]
        return [str(file.resolve()), hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()]
    except OSError as error:
        raise DataError(f"data file {file} cannot be read: {error}") from error


def cached(name: str, key: str, write: Callable[[Path], None]) -> Path:
    """The folder of an entry, every byte of which was checked. One that is damaged is made again, and a line says so.

    Args:
        name: the first part of the folder's name, for people.
        key: a fingerprint of what the content depends on.
        write: fills an empty folder; called if the entry does not exist yet, or is damaged.

    Raises:
        DataError: the cache cannot be written, or any error of `write`.
    """
    root = Path(cache_folders()[0]) / "hf_gpipe"
    entry = root / f"{name}-{key}"
    problem = damage(entry)
    if problem is None:
        return entry
    if problem:
        logger.warning("the prepared data in %s is damaged, and is made again (%s)", entry, problem)
    # Not by tempfile, whose directories nobody else may read: a cache may serve all users of a machine.
    made = root / f".{name}-{uuid4().hex}"
    try:
        made.mkdir(parents=True)
        write(made)
        digests.write(made, {})
        _publish(made, entry)
    except OSError as error:
        raise DataError(
            f"the cache directory {root} cannot be written ({error.strerror}); make room there, or set "
            "HF_DATASETS_CACHE to another one"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return entry


def damage(entry: Path) -> str | None:
    """The fault of an entry: empty if it does not exist, None if it has none."""
    if not os.path.lexists(entry):
        return ""
    try:
        written = Digests.read(entry)
        if written is None:
            return f"it has no {DIGESTS_FILE}"
        if missing := {path.relative_to(entry).as_posix() for path in _files(entry)} ^ {*written.files, DIGESTS_FILE}:
            return f"{entry / min(missing)} is missing, or does not belong there"
        written.check_share(0, 1)
    except CheckpointError as error:
        return str(error)
    return None


def _publish(made: Path, entry: Path) -> None:
    """Give a new entry its name, unless another process was faster. Raises OSError.

    Nothing waits for the disk: an entry that a power cut has left incomplete does not fit its digests.
    """
    try:
        os.rename(made, entry)
    except OSError:
        if damage(entry) is None:
            return
        # Processes that have opened a damaged file keep it.
        aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=entry.parent))
        try:
            os.rename(entry, aside / entry.name)
            os.rename(made, entry)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


@contextmanager
def table_writer(path: Path, schema: pyarrow.Schema) -> Iterator[Any]:
    """Context manager that makes an Arrow file, whose batches are given to `write_batch` of what it yields."""
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        yield writer


def read_table(path: Path) -> pyarrow.Table:
    """The table in an Arrow file, memory-mapped: only what is accessed is read. Raises DataError if it is not one."""
    try:
        with pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) as reader:
            table = reader.read_all()
        table.validate()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"the prepared data in {path.parent} cannot be read ({one_line(str(error), 200)}); delete that directory"
        ) from error
    return table


def cached_table(
    name: str,
    key: str,
    schema: pyarrow.Schema,
    batches: Iterable[pyarrow.RecordBatch],
    counts: Callable[[], Sequence[int]],
) -> tuple[pyarrow.Table, list[int]]:
    """The table of an entry, and two numbers that were counted while it was written.

    Args:
        name, key: as of `cached`; so are the errors.
        schema: of the table.
        batches: iterated over if the entry is written.
        counts: asked for the numbers after the last batch.
    """

    def write(folder: Path) -> None:
        with table_writer(folder / "tokens.arrow", schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        (folder / "counts.json").write_text(json.dumps(list(counts())))

    folder = cached(name, key, write)
    return read_table(folder / "tokens.arrow"), strict_json.read(folder / "counts.json", _Counts, error=DataError)


def in_blocks(items: Sequence[T], size: int = BATCH_ROWS) -> Iterator[Sequence[T]]:
    """The items in slices of `size`."""
    return (items[start : start + size] for start in range(0, len(items), size))
