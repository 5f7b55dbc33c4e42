"""Copies of the runs in a folder that outlives this machine: the last checkpoint and the best, recipe and curves."""

from __future__ import annotations

import shutil
from pathlib import Path

from hf_gpipe.checkpoint.directory import step_of
from translation_scaling.curves import STATE_FILE, newest_checkpoint, read_curve, state_of

#: The small files of a run; its metrics exist once it is finished.
_FILES = ("recipe.yaml", "metrics.jsonl", "metrics.json", "starts.jsonl", "run.log")


def keep(folder: Path, kept: Path) -> None:
    """Copy the newest checkpoint of a run and the best, unless they are there, and its small files."""
    wanted = _last_and_best(folder)
    if not all(_copied(checkpoint, kept) for checkpoint in wanted):
        return
    for older in kept.glob("checkpoint-*"):
        if wanted and older.name not in {checkpoint.name for checkpoint in wanted}:
            shutil.rmtree(older)
    _copy_files(folder, kept)
    if not (folder / "metrics.json").exists():  # a run that goes on has deleted it
        (kept / "metrics.json").unlink(missing_ok=True)


def bring_back(kept: Path, folder: Path) -> None:
    """Copy what is kept of a run into its folder, if the folder has less."""
    theirs, mine = newest_checkpoint(kept), newest_checkpoint(folder)
    if theirs is not None and (mine is None or step_of(mine) < step_of(theirs)):
        for checkpoint in _last_and_best(kept):
            _copied(checkpoint, folder)
    if kept.is_dir() and read_curve(folder).step < read_curve(kept).step:
        _copy_files(kept, folder)


def _last_and_best(folder: Path) -> list[Path]:
    """The newest checkpoint, and the best one where that is another and is there."""
    newest = newest_checkpoint(folder)
    if newest is None:
        return []
    best = state_of(newest)["best_model_checkpoint"] if (newest / STATE_FILE).exists() else None
    checkpoints = {newest, *([folder / Path(best).name] if best is not None else [])}
    return sorted((checkpoint for checkpoint in checkpoints if checkpoint.is_dir()), key=step_of)


def _copied(checkpoint: Path, into: Path) -> bool:
    """Copy a checkpoint, unless it is there, whole or not at all; False: it was deleted meanwhile."""
    temporary = into / f".copy-of-{checkpoint.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    if (into / checkpoint.name).exists():
        return True
    try:
        shutil.copytree(checkpoint, temporary)
    except (FileNotFoundError, shutil.Error):
        shutil.rmtree(temporary, ignore_errors=True)
        return False
    temporary.rename(into / checkpoint.name)
    return True


def _copy_files(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if (source / name).exists():
            temporary = target / f".copy-of-{name}"
            shutil.copyfile(source / name, temporary)
            temporary.replace(target / name)
