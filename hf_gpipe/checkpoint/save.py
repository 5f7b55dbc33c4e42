"""How files get into a directory: written into a new folder, which becomes the directory or hands its files over to it.

A crash leaves the old files or the new ones, never a part.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
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
    rf"{_SHARD.pattern}|model\.safetensors(\.index\.json)?|adapter_(config\.json|model\.(safetensors|bin))|"
    rf"{DISTRIBUTED.pattern}"
)
_OF_MODEL = re.compile(rf"{_WEIGHTS.pattern}|(generation_)?config\.json")
#: The files that make shards, or saved adapters, a model: the last to be handed over.
_LAST = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "adapter_model.safetensors")
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


def write_files(directory: Path, *writes: Callable[[Path], Any] | None) -> None:
    """Write small files that belong to a model.

    Args:
        directory: an existing directory.
        writes: functions that write files, such as the tokenizer's, into the directory that they get.

    Raises:
        UserError: a function fails, such as for a configuration with values that are not valid.
    """
    for write in filter(None, writes):
        try:
            write(directory)
        except (OSError, HfGpipeError):
            raise
        except Exception as error:  # the library, and a script's own tokenizer, raise whatever they come upon
            raise UserError(
                f"a file that belongs to the model cannot be saved: {type(error).__name__}: "
                f"{' '.join(str(error).split())}; correct what it says"
            ) from error


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


def replace_file(path: Path, text: str) -> None:
    """Write a file, in place of an older one, which stays where that fails. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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


def temporary_path(final: Path) -> Path:
    """Path of a directory that is being written."""
    return final.with_name(f".{final.name}.tmp")


def remove(path: Path) -> None:
    """Delete a checkpoint or the remains of one. Of a link only the link is deleted."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _written(temporary: Path, world: World, publish: Callable[[], None]) -> Iterator[Path]:
    """Context manager with a new directory that all processes write into; the main process publishes it at the end.

    Raises CheckpointError, on every process, if one of them cannot write.
    """

    def prepare() -> None:
        remove(temporary)
        make_directory(temporary)

    world.from_main(prepare, takes_long=True)
    try:
        yield temporary
        write_once(temporary.parent, world, publish)
    except BaseException:
        # Frees the space on a full disk.
        if world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def written_whole(final: Path, world: World) -> Iterator[Path]:
    """Context manager for a new directory that all processes write into; it is renamed to `final` at the end.

    If a process is killed before that, `final` is as it was.

    Raises:
        CheckpointError: on every process, if one of them cannot write.
    """
    temporary = temporary_path(final)

    def publish() -> None:
        _sync(temporary, *temporary.rglob("*"))
        replace_directory(temporary, final)
        _sync(final.parent)

    with _written(temporary, world, publish):
        yield temporary


@contextmanager
def written_into(directory: Path, world: World, *, is_complete: bool, keeps_model: bool) -> Iterator[Path]:
    """Context manager for the new files of a directory, which keeps what no save has written; yields a folder for them.

    Args:
        directory: is made if needed.
        world: the processes, all of which write.
        is_complete: whether the new files have all that belongs to the model; if not, what an earlier save has left
            beside it, such as a tokenizer, stays. The state of a training stays.
        keeps_model: whether the files of the directory's model stay, as those to which new adapters belong.

    Raises:
        CheckpointError: on every process, if one of them cannot write.
    """
    world.from_main(lambda: make_directory(directory))
    new = directory / ".saving.tmp"
    with _written(new, world, lambda: hand_over(new, directory, is_complete=is_complete, keeps_model=keeps_model)):
        yield new


def hand_over(new: Path, directory: Path, *, is_complete: bool, keeps_model: bool) -> None:
    """Move the files of a new folder with digests into a directory, and delete what an earlier save has left there.

    While files are moved the directory has no digests, so after a crash they can be used and do not seem damaged. The
    arguments are those of `written_into`.
    """
    if any(_SHARD.fullmatch(path.name) for path in directory.iterdir()):
        _rename_shards(new)  # those of an earlier save stay until the new index is there
    try:
        known = digests.Digests.read(directory)
    except CheckpointError:
        known = None
    made = digests.Digests.read(new)
    assert made is not None, "a model that is written has digests"
    (directory / digests.DIGESTS_FILE).unlink(missing_ok=True)
    for name in sorted(made.files, key=lambda name: (name in _LAST, name)):
        (directory / name).parent.mkdir(exist_ok=True)
        (new / name).replace(directory / name)
    entries = {} if known is None else dict(known.files)
    earlier = {name for name in entries if is_complete or _OF_MODEL.fullmatch(name)}
    if any(name in made.files for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        # Whoever has written them, other weights would be read in place of the new ones.
        earlier |= {path.name for path in directory.iterdir() if _WEIGHTS.fullmatch(path.name)}
    for name in set() if keeps_model else sorted(earlier - made.files.keys()):
        if not name.startswith(digests.TRAINING):
            path = directory / name
            path.unlink(missing_ok=True)
            if path.parent != directory and not any(path.parent.iterdir()):
                path.parent.rmdir()
    entries |= made.files
    digests.write_entries(directory, {name: entry for name, entry in entries.items() if (directory / name).exists()})
    shutil.rmtree(new)


def _rename_shards(folder: Path) -> None:
    """Give the shards of a saved model other names than those of any earlier save."""
    made, index, tag = digests.Digests.read(folder), folder / SAFE_WEIGHTS_INDEX_NAME, uuid4().hex[:8]
    if made is None or not index.exists():
        return
    entries = {file: entry for file, entry in made.files.items() if isinstance(entry, dict)}
    content = json.loads(index.read_text())
    for file in set(content["weight_map"].values()):
        renamed = file.replace("model-", f"model-{tag}-", 1)
        (folder / file).replace(folder / renamed)
        entries[renamed] = entries.pop(file)
    content["weight_map"] = {n: f.replace("model-", f"model-{tag}-", 1) for n, f in content["weight_map"].items()}
    _write_index(index, content)
    digests.write(folder, entries)


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


def complete_model(directory: Path, shards: Mapping[str, Shard]) -> dict[str, Entry]:
    """Make the shards that were written into a new directory a model: a single one has its own name, several an index.

    Returns the entries of the files, for the digests.
    """
    if len(shards) == 1:
        ((file, shard),) = shards.items()
        (directory / file).replace(directory / SAFE_WEIGHTS_NAME)
        return {SAFE_WEIGHTS_NAME: shard.entry}
    sizes = [size for shard in shards.values() for size in shard.sizes.values()]
    content = {
        "metadata": {"total_parameters": sum(n for n, _ in sizes), "total_size": sum(b for _, b in sizes)},
        "weight_map": {name: file for file, shard in sorted(shards.items()) for name in shard.sizes},
    }
    _write_index(directory / SAFE_WEIGHTS_INDEX_NAME, content)
    return {file: shard.entry for file, shard in shards.items()}


def _write_index(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _sync(*paths: Path) -> None:
    """Write files to disk: after a power cut there must not be a new name without the files' content."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
