"""Files of a saved model: each is written beside the old ones, and then made the directory's, with its digest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter
from hf_gpipe.checkpoint import digests
from hf_gpipe.checkpoint.digests import Entry
from hf_gpipe.checkpoint.weight_files import DISTRIBUTED
from hf_gpipe.errors import CheckpointError, HfGpipeError, UserError
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, custom_object_save

#: File names of shards, written by transformers or by this module. Other files named model-... belong to the user.
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
#: Names of the files that transformers takes a model's weights from, those of adapters included.
_WEIGHTS = re.compile(
    rf"{_SHARD.pattern}|model\.safetensors|adapter_(config\.json|model\.(safetensors|bin))|{DISTRIBUTED.pattern}"
)
_OF_MODEL = re.compile(rf"{_WEIGHTS.pattern}|model\.safetensors\.index\.json|(generation_)?config\.json")
#: The folder in which small files wait until everything else is written.
_PREPARED = ".config.tmp"
#: Without it, transformers does not read a file.
_OF_TORCH = {"format": "pt"}
#: How many time limits of messages the processes wait for one that writes: a disk may be slow, or may not answer.
PATIENCE = 6

Value = TypeVar("Value")


class Shard(NamedTuple):
    """Sizes and digests of a file that a process has written, sent to the other processes."""

    sizes: dict[str, tuple[int, int]]
    """The numbers of elements and of bytes of each tensor."""
    entry: Entry


def has_shards(directory: Path) -> bool:
    """Whether a directory has shards of a saved model."""
    return any(_SHARD.fullmatch(path.name) for path in directory.iterdir())


def prepare_files(directory: Path, *writes: Callable[[Path], Any] | None) -> None:
    """Write small files beside the directory's own, until `publish_files` makes them its own.

    Args:
        directory: an existing directory.
        writes: functions that write files, such as the tokenizer's, into the folder that they get.

    Raises:
        UserError: a function fails, such as for a configuration with values that are not valid.
    """
    temporary = directory / _PREPARED
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for write in writes:
        if write is None:
            continue
        try:
            write(temporary)
        except (OSError, HfGpipeError):
            raise
        except Exception as error:  # the library, and a script's own tokenizer, raise whatever they come upon
            raise UserError(
                f"a file that belongs to the model cannot be saved: {type(error).__name__}: "
                f"{' '.join(str(error).split())}; correct what it says"
            ) from error


def publish_files(directory: Path) -> dict[str, Entry]:
    """Move the prepared files into `directory` one by one, so that after a crash none is incomplete.

    Returns:
        The entry of each file, by its name relative to `directory`.
    """
    temporary = directory / _PREPARED
    entries = {}
    for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
        name = path.relative_to(temporary)
        entries[name.as_posix()] = digests.entry_of_file(path)
        (directory / name).parent.mkdir(exist_ok=True)
        path.replace(directory / name)
    shutil.rmtree(temporary)
    return entries


def make_directory(directory: Path) -> None:
    """Create a directory to write into. Raises CheckpointError if it cannot be created or written into."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"cannot write into the directory {str(directory)!r}: {why}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager in which this process writes a file, or files in a directory.

    Raises:
        CheckpointError: the system does not let it, as on a full disk.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {error.filename or path}: {error.strerror or error}; earlier checkpoints are unchanged; "
            "make room there, or correct the permissions, and start again"
        ) from error


def write_together(directory: Path, world: World, write: Callable[[], Value], kind: Any = None) -> list[Value]:
    """Call `write` in every process, and return its values in order of rank. Every process must call it.

    Args:
        directory: where `write` writes to, for the error message.
        world: the processes.
        write: returns a small value.
        kind: the type of the value, as of `World.from_main`.

    Raises:
        CheckpointError: on every process, if one of them cannot write. A UserError of one is raised on every process.
    """

    def attempt() -> Value:
        try:
            return write()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"process {world.rank} cannot write into {directory}: {' '.join(str(error).split())}; earlier "
                "checkpoints are unchanged; make room there, or correct the permissions, and start again"
            ) from error

    return world.from_each(attempt, kind, takes_long=True, limits=PATIENCE)


def write_once(directory: Path, world: World, write: Callable[[], None]) -> None:
    """Call `write` in the main process only, once every process has called this function.

    Raises CheckpointError, on every process, if the main process cannot write into `directory`.
    """
    world.barrier()
    write_together(directory, world, lambda: write() if world.is_main else None)


def replace_directory(temporary: Path, final: Path) -> None:
    """Rename a complete new directory to `final`; an older directory of that name is deleted afterwards."""
    if final.exists():
        old = final.with_name(f".{final.name}.old-{uuid4().hex[:8]}")
        final.rename(old)
        try:
            temporary.rename(final)
        except OSError:
            old.rename(final)
            raise
        if old.is_symlink():
            old.unlink()
        else:
            shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)


def write_configuration(adapter: Adapter, folder: Path) -> None:
    """Write the configurations of the whole Hugging Face model, and its code if that is not of the library."""
    reference = adapter.reference
    if not isinstance(reference, PreTrainedModel):
        return
    reference.config.architectures = [type(reference).__name__]
    reference.config.dtype = str(adapter.dtype).removeprefix("torch.")
    if reference.is_remote_code():
        # The model's own Python code is saved with it, as save_pretrained does.
        custom_object_save(reference, folder, config=reference.config)
    reference.config.save_pretrained(folder)
    if reference.can_generate():
        reference.generation_config.save_pretrained(folder)


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str] | None = _OF_TORCH) -> Shard:
    """Write tensors, contiguous and on the CPU, into a safetensors file, or none of it. Raises OSError."""
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except Exception:
        path.unlink(missing_ok=True)
        raise
    sizes = {name: (t.numel(), t.numel() * t.element_size()) for name, t in tensors.items()}
    return Shard(sizes, digests.entry_of_tensors(path, tensors))


def publish(directory: Path, shards: Mapping[str, Shard]) -> None:
    """Make the written shards and the prepared files the directory's model, with digests, in the main process."""
    with digests.updated(directory) as entries:
        publish_shards(directory, shards, entries, is_complete=True)


def publish_shards(
    directory: Path, shards: Mapping[str, Shard], entries: dict[str, Entry], *, is_complete: bool
) -> None:
    """Like `publish`, inside of `digests.updated`. The file that makes shards a model is written last, then what is
    left of an earlier save is deleted.

    Args:
        directory: of the model.
        shards: the written ones, by their files.
        entries: the digests of the directory.
        is_complete: as of `delete_earlier`.
    """
    new = publish_files(directory)
    if len(shards) == 1:
        (file, shard) = next(iter(shards.items()))
        (directory / file).replace(directory / SAFE_WEIGHTS_NAME)
        new[SAFE_WEIGHTS_NAME] = shard.entry
        (directory / SAFE_WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
    else:
        sizes = [size for shard in shards.values() for size in shard.sizes.values()]
        content = {
            "metadata": {"total_parameters": sum(n for n, _ in sizes), "total_size": sum(b for _, b in sizes)},
            "weight_map": {name: file for file, shard in sorted(shards.items()) for name in shard.sizes},
        }
        new_index = directory / f".{SAFE_WEIGHTS_INDEX_NAME}.tmp"
        new_index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        new[SAFE_WEIGHTS_INDEX_NAME] = digests.entry_of_file(new_index)
        new_index.replace(directory / SAFE_WEIGHTS_INDEX_NAME)
        new |= {file: shard.entry for file, shard in shards.items()}
    entries |= new
    # Whoever has written them, these weights would be read in place of the new ones.
    others = {path.name for path in directory.iterdir() if _WEIGHTS.fullmatch(path.name)}
    delete_earlier(directory, entries, new, others, is_complete=is_complete)


def delete_earlier(
    directory: Path,
    entries: dict[str, Entry],
    new: Collection[str],
    others: Collection[str] = (),
    *,
    is_complete: bool,
) -> None:
    """Delete what an earlier save has left, by its digests, and would be read together with the new files.

    Args:
        directory: of the files.
        entries: the digests of the directory, from which the deleted files are taken.
        new: the names of the new files.
        others: the names of other files that belong to no save, which are deleted too.
        is_complete: whether the new files have all that belongs to the model; if not, what is beside it, such as a
            tokenizer, stays. The state of a training stays.
    """
    of_save = {name for name in entries if is_complete or _OF_MODEL.fullmatch(name)}
    for name in sorted({*of_save, *others} - {*new}):
        if not name.startswith(digests.TRAINING):
            entries.pop(name, None)
            path = directory / name
            path.unlink(missing_ok=True)
            if path.parent != directory and not any(path.parent.iterdir()):
                path.parent.rmdir()
