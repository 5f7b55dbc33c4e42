"""The checkpoint directories of a run: `checkpoint-N` appears whole, and disappears whole."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_gpipe.checkpoint.hub import read_weight_map
from hf_gpipe.checkpoint.peft import WEIGHTS_NAME as ADAPTER_WEIGHTS_NAME
from hf_gpipe.checkpoint.save import make_directory, replace_directory
from hf_gpipe.checkpoint.state import FOLDER, has_state, read_state
from hf_gpipe.checkpoint.together import write_on_main, write_together
from hf_gpipe.errors import CheckpointError
from hf_gpipe.runtime.topology import Topology

logger = logging.getLogger(__name__)

#: How long a network file system may take to show a new file.
_APPEARS_SECONDS = 10.0

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(checkpoint-\d+)\.(tmp|old|gone)(-\w+)?")


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` updates is."""
    return output_dir / f"checkpoint-{step}"


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first by their number of updates."""
    if not output_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def last_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint from which a training can resume: one whose files are all there, and whole.

    A newer one that is damaged, which none is that was written here, is told and left alone.
    """
    for path in reversed(checkpoints(output_dir)):
        problem = what_is_missing(path)
        if not problem:
            return path
        if has_state(path):
            logger.warning("%s is not complete (%s); an older checkpoint is looked for", path, problem)
    return None


@contextmanager
def written_whole(final: Path, topology: Topology) -> Iterator[Path]:
    """A new directory for all processes to write into; it takes its name once every one of them is done.

    Killed before, it leaves nothing under the name `final` that was not there already.

    Raises:
        CheckpointError: on every process, where one of them cannot write.
    """
    temporary = final.with_name(f".{final.name}.tmp")

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        make_directory(temporary)

    def publish() -> None:
        _sync(temporary, *temporary.rglob("*"))
        replace_directory(temporary, final)
        _sync(final.parent)

    topology.from_main(prepare)
    try:
        yield temporary
        write_on_main(final, topology, publish)
    except BaseException:
        # A disk that is full has room again.
        if topology.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def rotate(output_dir: Path, limit: int | None, keep: Path | None = None) -> None:
    """Delete the oldest checkpoints but `limit`. Runs in the main process.

    The newest one, the newest one that a training can resume from, and `keep` always stay.
    """
    found = checkpoints(output_dir)
    if limit is None or limit < 1 or len(found) <= limit:
        return
    newest_whole = next((path for path in reversed(found) if not what_is_missing(path)), None)
    stay = (found[-1], newest_whole, keep)
    protected = [path for path in found if path in stay]
    others = [path for path in found if path not in protected]
    for path in others[: max(0, len(found) - max(limit, len(protected)))]:
        gone = path.with_name(f".{path.name}.gone-{uuid4().hex[:8]}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_leftovers(output_dir: Path) -> None:
    """Clean up after a run that was killed while it wrote or deleted a checkpoint. Runs in the main process."""
    for path in list(output_dir.iterdir()) if output_dir.is_dir() else []:
        match = _LEFTOVER.fullmatch(path.name)
        if match and match[2] == "old" and not (output_dir / match[1]).exists():
            path.rename(output_dir / match[1])
        elif match:
            shutil.rmtree(path, ignore_errors=True)


def check_shared(output_dir: Path, topology: Topology) -> None:
    """Find out whether all processes write into one and the same directory; every process calls it.

    Raises:
        CheckpointError: on every process, where one of them cannot write, or does not see what another one has written.
    """
    token = topology.gather_objects(uuid4().hex)[0]
    files = [output_dir / f".seen-by-all-{token}-{rank}" for rank in range(topology.num_processes)]

    def write() -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        files[topology.rank].touch()

    try:
        write_together(output_dir, topology, write)
        unseen = [rank for rank, file in enumerate(files) if not _appears(file)]
        places = topology.gather_objects((socket.gethostname(), str(output_dir.resolve()), unseen))
    finally:
        files[topology.rank].unlink(missing_ok=True)
    for rank, (host, path, others) in enumerate(places):
        if others:
            raise CheckpointError(
                f"process {rank} (on {host}, in {path}) does not see what process {others[0]} (on "
                f"{places[others[0]][0]}, in {places[others[0]][1]}) writes; every process writes its own stages, so "
                "the output directory must be one that all machines share, given by the same absolute path"
            )


def _appears(file: Path) -> bool:
    """Whether a file is there; a network file system may show it a little later."""
    deadline = time.monotonic() + _APPEARS_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def what_is_missing(checkpoint: Path) -> str:
    """Why no training can resume from this directory; empty where one can."""
    try:
        state = read_state(checkpoint)
        files = [*_weights(checkpoint), *(f"{FOLDER}/{file}" for file in state["optimizer"]["files"])]
        return next((problem for file in files if (problem := _damage(checkpoint / file))), "")
    except CheckpointError as error:
        return str(error)


def _weights(checkpoint: Path) -> list[str]:
    for name in (SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME):
        if (checkpoint / name).exists():
            return [name]
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        raise CheckpointError(f"{checkpoint} has no weights in safetensors format")
    return sorted(set(read_weight_map(index).values()))


def _damage(file: Path) -> str:
    """What is wrong with a file of tensors; its header says how long it is."""
    try:
        with safe_open(file, framework="pt"):
            return ""
    except (OSError, SafetensorError) as error:
        return f"{file}: {error}"


def _sync(*paths: Path) -> None:
    """Have the system write files to disk: a rename must not survive a power cut that the files do not."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
