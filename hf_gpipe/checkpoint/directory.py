"""The checkpoint directories of a run: `checkpoint-N` appears whole, and disappears whole."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from hf_gpipe.checkpoint.save import make_directory, replace_directory
from hf_gpipe.checkpoint.state import has_state
from hf_gpipe.runtime.topology import Topology

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
    """The newest checkpoint from which a training can resume."""
    return next((path for path in reversed(checkpoints(output_dir)) if has_state(path)), None)


@contextmanager
def written_whole(final: Path, topology: Topology) -> Iterator[Path]:
    """A new directory for all processes to write into; it takes its name once every one of them is done.

    Killed before, it leaves nothing under the name `final` that was not there already.

    Raises:
        CheckpointError: on every process, where the main one cannot write into the directory.
    """
    temporary = final.with_name(f".{final.name}.tmp")

    def prepare() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        make_directory(temporary)

    topology.from_main(prepare)
    yield temporary
    topology.barrier()
    if topology.is_main:
        _sync(temporary)
        replace_directory(temporary, final)
    topology.barrier()


def rotate(output_dir: Path, limit: int | None, keep: Path | None = None) -> None:
    """Delete the oldest checkpoints but `limit`; the newest one and `keep` always stay. Runs in the main process."""
    found = checkpoints(output_dir)
    if limit is None or limit < 1:
        return
    protected = [path for path in found if path == found[-1] or (keep is not None and path == keep)]
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


def _sync(directory: Path) -> None:
    """Have the system write all files to disk: a rename must not survive a power cut that the files do not."""
    for path in [directory, *directory.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
