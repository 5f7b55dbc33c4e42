"""Digests of all files of a checkpoint or a saved model, to find a changed file before it is used.

    hf_gpipe_digests.json
        digest  of the rest of this file
        step    the number of updates before the checkpoint was written; null for a model that was saved alone
        files   {"config.json": digest, "model.safetensors": {"header": digest, "tensors": {name: digest}}, ...}

Every tensor has its own digest, so a process checks only its stage's tensors. A directory without this file is used as
it is, and may have files that are not named in it. The digests detect accidents, not forgery.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import xxhash
from pydantic import Field
from typing_extensions import TypedDict

from hf_gpipe import strict_json
from hf_gpipe.errors import CheckpointError
from hf_gpipe.job.job import available_cores

DIGESTS_FILE = "hf_gpipe_digests.json"
FORMAT = 1
_TENSORS = ".safetensors"
#: Files of a checkpoint that are not part of the model; an upload of the model does not have them.
TRAINING = ("training_state/", "trainer_state.json")
#: Bytes that are read at a time: few calls, and the block is still in the processor's cache for its digest.
_BLOCK_BYTES = 1 << 20
#: A few threads are as fast as memory allows; reading and digests release Python's lock.
_MOST_THREADS = 4

Entry: TypeAlias = str | dict[str, Any]
"""The digest of a file, or the digests of the header and the tensors of a safetensors file."""


#: A longer header of a safetensors file is refused, as the safetensors library does.
_LONGEST_HEADER = 100_000_000


class _OfTensors(TypedDict):
    header: str
    tensors: dict[str, str]


class _Content(TypedDict):
    """The content of the file of digests."""

    step: strict_json.Number | None
    files: dict[str, str | _OfTensors]


class _Tensor(TypedDict):
    """The entry of a tensor in the header of a safetensors file."""

    data_offsets: Annotated[list[strict_json.Number], Field(min_length=2, max_length=2)]


class FilePart(NamedTuple):
    """A part of a file that has its own digest."""

    file: str
    tensor: str | None
    start: int
    size: int
    digest: str


@dataclass(frozen=True)
class Digests:
    """The digests that the files of a directory had when they were written.

    Attributes:
        directory: where they are.
        step: the number of updates of a checkpoint; None: a model that was saved alone.
        files: the entry of each file, by its name relative to the directory.
    """

    directory: Path
    step: int | None
    files: Mapping[str, Entry]

    @classmethod
    def read(cls, directory: Path) -> Digests | None:
        """Read the digests of a directory; None if it has none.

        Raises:
            CheckpointError: the file of digests is itself damaged.
        """
        path = directory / DIGESTS_FILE
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        rest = text.partition(b"\n")[2]
        if text != _first_line(rest) + rest:
            raise CheckpointError(f"{path} is damaged: its content has another digest than its first line says")
        content = strict_json.parse(text, str(path), dict[str, Any])
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path} has format {content.get('format')!r}; this version reads format {FORMAT}")
        strict_json.fit(content, _Content, str(path))
        for file in content["files"]:
            # The checkpoint may be of unknown origin: a name must not lead out of it.
            if Path(file).is_absolute() or ".." in Path(file).parts or "\0" in file:
                raise CheckpointError(f"{path} names {file!r}, which is outside of its directory")
        return cls(directory, content["step"], content["files"])

    def parts(self, file: str, wanted: Callable[[str], bool] | None = None) -> list[FilePart]:
        """The parts of a file that are to be checked. The header of a safetensors file is checked at once.

        Args:
            file: its name.
            wanted: which tensors of it; None: all.

        Raises:
            CheckpointError: the file is missing, has no digest, its header is damaged, or its length is wrong.
        """
        path, entry = self.directory / file, self.files.get(file)
        if entry is None:
            raise CheckpointError(f"{path} is not one of the files that {DIGESTS_FILE} names")
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):  # of a pipe the reading would never end
                raise CheckpointError(f"{path} cannot be read: it is not a regular file")
            size = status.st_size
            if isinstance(entry, str):
                return [FilePart(file, None, 0, size, entry)]
            header = read_header(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if digest(header) != entry["header"]:
            raise CheckpointError(f"{path} is damaged: its header has another digest than {DIGESTS_FILE} says")
        content = strict_json.parse(header[8:], f"{path}, its header", dict[str, Any])
        content.pop("__metadata__", None)
        strict_json.fit(content, dict[str, _Tensor], f"{path}, its header")
        places = {name: tensor["data_offsets"] for name, tensor in content.items()}
        for name, (start, stop) in places.items():
            if start > stop:
                raise CheckpointError(f"{path} is damaged: the tensor {name!r} lies from byte {start} to {stop}")
        expected = len(header) + max((stop for _, stop in places.values()), default=0)
        if size != expected:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, and its header describes {expected}")
        return [
            FilePart(file, name, len(header) + start, stop - start, entry["tensors"].get(name))
            for name, (start, stop) in places.items()
            if wanted is None or wanted(name)
        ]

    def check(self, parts: Iterable[FilePart]) -> None:
        """Check parts of files. Raises CheckpointError for a part that has changed."""
        with ThreadPoolExecutor(min(_MOST_THREADS, available_cores())) as pool:
            for _ in pool.map(self._check_part, parts):
                pass

    def _check_part(self, part: FilePart) -> None:
        path = self.directory / part.file
        try:
            digest_now = _digest_of(path, part.start, part.size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if digest_now != part.digest:
            what = "it" if part.tensor is None else f"the tensor {part.tensor!r}"
            raise CheckpointError(f"{path} is damaged: {what} has another digest than {DIGESTS_FILE} says")

    def check_share(self, share: int, num_shares: int) -> None:
        """Check one of `num_shares` about equal shares of all bytes. Raises CheckpointError for a damaged part."""
        parts = [part for file in self.files for part in self.parts(file)]
        total, before = sum(part.size for part in parts), 0
        mine = []
        for part in parts:
            # The minimum is for empty parts at the very end.
            if min(before * num_shares // max(total, 1), num_shares - 1) == share:
                mine.append(part)
            before += part.size
        self.check(mine)


def check_model_files(directory: Path) -> None:
    """Check the files of a saved model except its tensors: configurations, tokenizer, code, index.

    Raises:
        CheckpointError: one of them is missing or has changed.
    """
    with advising():
        digests = Digests.read(directory)
        if digests is not None:
            small = [file for file in digests.files if not file.endswith(_TENSORS) and not file.startswith(TRAINING)]
            digests.check(part for file in small for part in digests.parts(file))


def check_tensors(directory: Path, files: Iterable[str], wanted: Callable[[str], bool]) -> None:
    """Check the headers and the wanted tensors of files, where there are digests. Raises CheckpointError for damage."""
    if (digests := Digests.read(directory)) is not None:
        digests.check(part for file in files for part in digests.parts(file, wanted))


@contextmanager
def advising() -> Iterator[None]:
    """Context manager that adds to an error about a model's files what the user can do."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; save or copy the model again, or, if it was changed on purpose, delete {DIGESTS_FILE} to use "
            "the files as they are"
        ) from error


def write(directory: Path, written: Mapping[str, Entry], step: int | None = None) -> None:
    """Write the digests of all files of a new directory.

    Args:
        directory: of the files. It may have digests of a part of them, as of a model beside which a state was written.
        written: the entries of the files of tensors that were written now.
        step: the number of updates of a checkpoint; None: a model that is saved alone.
    """
    known = Digests.read(directory)
    earlier = {} if known is None else known.files
    tensors = {file: entry for file, entry in earlier.items() if isinstance(entry, dict)} | dict(written)
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    files.pop(DIGESTS_FILE, None)
    write_entries(directory, {name: tensors.get(name) or entry_of_file(path) for name, path in files.items()}, step)


def write_entries(directory: Path, files: Mapping[str, Entry], step: int | None = None) -> None:
    """Write a file of digests with these entries."""
    rest = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1, sort_keys=True)[2:].encode() + b"\n"
    temporary = directory / f".{DIGESTS_FILE}.tmp"
    temporary.write_bytes(_first_line(rest) + rest)
    temporary.replace(directory / DIGESTS_FILE)


def digest(data: Any) -> str:
    """The digest of bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def entry_of_file(path: Path) -> Entry:
    """The entry of a file that has just been written and is not of tensors."""
    return _digest_of(path, 0, path.stat().st_size)


def entry_of_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Entry:
    """The entry of a safetensors file that has just been written.

    Args:
        path: the file, of which only the header is read.
        tensors: what was written: contiguous, on the CPU.
    """
    return {
        "header": digest(read_header(path)),
        "tensors": {name: digest(t.reshape(-1).view(torch.uint8).numpy()) for name, t in tensors.items()},
    }


def _first_line(rest: bytes) -> bytes:
    return f'{{"digest": "{digest(rest)}",\n'.encode()


def read_header(path: Path) -> bytes:
    """The length and the header of a safetensors file; fewer bytes if the file is shorter."""
    with path.open("rb") as file:
        length = file.read(8)
        # A damaged length must not allocate more memory than the file has bytes.
        size = min(int.from_bytes(length, "little"), os.fstat(file.fileno()).st_size, _LONGEST_HEADER)
        return length + file.read(size)


def _digest_of(path: Path, start: int, size: int) -> str:
    """The digest of `size` bytes from `start`; of fewer bytes if the file is shorter."""
    state, block = xxhash.xxh3_128(), memoryview(bytearray(min(size, _BLOCK_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while size and (count := file.readinto(block[: min(size, _BLOCK_BYTES)])):
            state.update(block[:count])
            size -= count
    return state.hexdigest()
