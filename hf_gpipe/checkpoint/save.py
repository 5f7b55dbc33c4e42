"""Save a model in Hub format from all processes; a crash leaves the old checkpoint or the new one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_gpipe.adapters import Adapter, StageModel
from hf_gpipe.checkpoint import digests, hub
from hf_gpipe.checkpoint.copies import Files, PendingWrite
from hf_gpipe.checkpoint.digests import Entry
from hf_gpipe.checkpoint.together import write_once, write_together
from hf_gpipe.checkpoint.weight_files import DISTRIBUTED
from hf_gpipe.errors import CheckpointError, HfGpipeError, UserError
from hf_gpipe.libraries.transformers import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, custom_object_save
from hf_gpipe.runtime.mesh import Mesh

#: File names of shards, written by transformers or by this module. Other files named model-... belong to the user.
_SHARD = re.compile(r"model(-[0-9a-f]{8})?-\d{5}-of-\d{5}\.safetensors")
#: Names of the files that transformers takes a model's weights from, those of adapters included.
_WEIGHTS = re.compile(
    rf"{_SHARD.pattern}|model\.safetensors|adapter_(config\.json|model\.(safetensors|bin))|{DISTRIBUTED.pattern}"
)
_OF_MODEL = re.compile(rf"{_WEIGHTS.pattern}|model\.safetensors\.index\.json|(generation_)?config\.json")
#: The folder in which small files wait until everything else is written.
_PREPARED = ".config.tmp"


class Shard(NamedTuple):
    """Sizes and digests of a file that a process has written, sent to the other processes."""

    sizes: dict[str, tuple[int, int]]
    """The numbers of elements and of bytes of each tensor."""
    entry: Entry


def pending_model(
    directory: Path,
    models: Mapping[int, StageModel],
    owner_stage: Mapping[str, int],
    world: Mesh,
    *,
    is_complete: bool,
) -> PendingWrite:
    """A model that is to be written: one safetensors shard per stage, the index, digests of all these.

    The shards get new names. The file that makes them the checkpoint, the index or the single `model.safetensors`, is
    written last, and then what is left of an earlier save is deleted. The tensors are read by `PendingWrite.write`.

    Args:
        directory: where to write, after `prepare`; files in it that no save has written stay.
        models: the stages of this process, by number.
        owner_stage: for each parameter of the whole model, the stage that writes it.
        world: the processes; every one must call this function.
        is_complete: as of `delete_earlier`.
    """
    num_stages = world.placement.num_stages
    taken = world.is_main and any(_SHARD.fullmatch(path.name) for path in directory.iterdir())
    tag = world.gather_objects(f"-{uuid4().hex[:8]}" if taken else "")[world.main]
    files: Files = {}
    for stage, model in models.items():
        if world.is_in_first_replica(stage):  # each file is written once
            names = [n for n in (*model.parameters, *model.buffers) if owner_stage.get(n, stage) == stage]
            tensors = hub.saved_tensors(model, names)
            if world.leads(stage):
                files[stage] = tensors

    def write_shards(files: Files) -> dict[str, Shard]:
        written = {}
        for stage in sorted(files):
            tensors = hub.in_hub_form(models[stage], files.pop(stage))
            if not tensors:
                continue
            file = f"model{tag}-{stage + 1:05d}-of-{num_stages:05d}.safetensors"
            written[file] = write_shard(directory / file, tensors)
        return written

    def write(files: Files) -> dict[str, Entry]:
        shards: dict[str, Shard] = {}
        for part in write_together(directory, world, lambda: write_shards(files), dict[str, Shard]):
            shards.update(part)

        write_once(directory, world, lambda: publish(directory, shards, is_complete=is_complete))
        return {}

    return PendingWrite(files, write)


def prepare(directory: Path, world: Mesh, *writes: Callable[[Path], Any] | None) -> None:
    """`prepare_files` by the main process, in a directory that is made if needed. Every process must call it.

    Raises:
        UserError: on every process, if a file cannot be written, or something has no form in a file.
    """
    world.from_main(lambda: make_directory(directory))
    write_once(directory, world, lambda: prepare_files(directory, *writes))


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


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> Shard:
    """Write tensors, contiguous and on the CPU, into a safetensors file, or none of it. Raises OSError."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except Exception:
        path.unlink(missing_ok=True)
        raise
    sizes = {name: (t.numel(), t.numel() * t.element_size()) for name, t in tensors.items()}
    return Shard(sizes, digests.entry_of_tensors(path, tensors))


def publish(directory: Path, shards: Mapping[str, Shard], *, is_complete: bool = True) -> None:
    """Make the written shards and the prepared files the directory's checkpoint, with digests, in the main process.

    Args:
        directory: of the checkpoint.
        shards: the written ones, by their files.
        is_complete: as of `delete_earlier`.
    """
    with digests.updated(directory) as entries:
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
