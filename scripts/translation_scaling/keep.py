"""Copies of the runs in a folder that outlives this machine: the last checkpoint, the recipe and the curves."""

from __future__ import annotations

import shutil
from pathlib import Path

from translation_scaling.curves import newest_checkpoint, read_curve, step_of

#: The small files of a run; its metrics exist once it is finished.
_FILES = ("recipe.yaml", "metrics.jsonl", "metrics.json", "starts.jsonl", "run.log")


def keep(folder: Path, kept: Path) -> None:
    """Copy the newest checkpoint of a run, unless it is there, and its small files."""
    checkpoint = newest_checkpoint(folder)
    kept.mkdir(parents=True, exist_ok=True)
    if checkpoint is not None and not (kept / checkpoint.name).exists():
        if not _copied(checkpoint, kept):
            return
        for older in kept.glob("checkpoint-*"):
            if older.name != checkpoint.name:
                shutil.rmtree(older)
    for name in _FILES:
        if (folder / name).exists():
            _replace(folder / name, kept / name)
        elif name == "metrics.json":
            # A run that goes on has deleted it.
            (kept / name).unlink(missing_ok=True)


def bring_back(kept: Path, folder: Path) -> None:
    """Copy what is kept of a run into its folder, if the folder has less."""
    theirs, mine = newest_checkpoint(kept), newest_checkpoint(folder)
    if theirs is not None and (mine is None or step_of(mine) < step_of(theirs)):
        folder.mkdir(parents=True, exist_ok=True)
        _copied(theirs, folder)
    if kept.is_dir() and read_curve(folder).step < read_curve(kept).step:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            if (kept / name).exists():
                _replace(kept / name, folder / name)


def _copied(checkpoint: Path, into: Path) -> bool:
    """Copy a checkpoint so that it is there whole or not at all; False: it was deleted meanwhile."""
    temporary = into / f".copy-of-{checkpoint.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, temporary)
    except (FileNotFoundError, shutil.Error):
        shutil.rmtree(temporary, ignore_errors=True)
        return False
    temporary.rename(into / checkpoint.name)
    return True


def _replace(source: Path, target: Path) -> None:
    temporary = target.with_name(f".copy-of-{target.name}")
    shutil.copyfile(source, temporary)
    temporary.replace(target)
