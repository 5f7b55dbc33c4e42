"""The checkpoint directories of a run, `checkpoint-N`: found, deleted as a whole, and used only if undamaged."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError, safe_open

from hf_gpipe.checkpoint.digests import DIGESTS_FILE, Digests, check_model_files
from hf_gpipe.checkpoint.peft import WEIGHTS_NAME as ADAPTER_WEIGHTS_NAME
from hf_gpipe.checkpoint.save import remove, write_together
from hf_gpipe.checkpoint.state import FOLDER, STATE_FILE, has_state, read_state, read_trainer_state
from hf_gpipe.checkpoint.weight_files import read_weight_map
from hf_gpipe.errors import CheckpointError
from hf_gpipe.job.world import World
from hf_gpipe.libraries.transformers import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

logger = logging.getLogger(__name__)

#: How long a network file system may take to show a new file.
_APPEARS_SECONDS = 10.0

_NAME = re.compile(r"checkpoint-(\d+)")
_LEFTOVER = re.compile(r"\.(checkpoint-\d+)\.(tmp|old|gone)(-\w+)?")


def checkpoint_path(output_dir: Path, step: int) -> Path:
    """Path of the checkpoint after `step` updates."""
    return output_dir / f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """The number of updates before a checkpoint, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run, oldest first by their number of updates."""
    if not output_dir.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in output_dir.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered) if path.is_dir()]


def last_checkpoint(output_dir: Path, world: World) -> Path | None:
    """Return the newest undamaged checkpoint, every byte of it checked. Every process must call it.

    A newer one that is damaged is named in a warning and stays. A directory that has only a model is skipped.

    Raises:
        CheckpointError: on every process, if there are checkpoints and all of them are damaged.
    """
    problems: list[str] = []
    for path in map(Path, world.from_main(lambda: [str(found) for found in reversed(checkpoints(output_dir))])):
        if world.from_main(partial(_is_model_alone, path)):
            continue
        problem = _find_damage(path, world)
        if problem:
            problems.append(problem)
            continue
        for problem in problems if world.is_main else []:
            logger.warning("%s; the older %s is used", problem, path.name)
        return path
    if problems:
        raise CheckpointError(
            f"every checkpoint in {output_dir} is damaged ({problems[0]}); put a copy of one there, or move all of "
            "them away to start from the beginning"
        )
    return None


def check_whole(checkpoint: Path, world: World) -> None:
    """Check every byte of a checkpoint. Every process must call it, and checks its share.

    Raises:
        CheckpointError: on every process, if the checkpoint is damaged or no training can resume from it.
    """
    problem = _find_damage(checkpoint, world)
    if problem:
        raise CheckpointError(f"{problem}; resume from another checkpoint")


def _find_damage(checkpoint: Path, world: World) -> str:
    """Why no training can resume from a checkpoint, the same in every process; empty if one can."""

    def check() -> None:
        digests = _digests_of(checkpoint)
        if digests is not None:
            digests.check_share(world.rank, world.num_processes)
        else:
            _check_files(checkpoint)
        # Digests are of accidents: whoever changes a file on purpose, or with a faulty program, changes them too.
        read_state(checkpoint)
        read_trainer_state(checkpoint)
        _weights(checkpoint)
        if digests is None and world.is_main:
            logger.warning(
                "%s was written by an older version, without digests: its content is not checked", checkpoint
            )

    return _first_problem(check, world)


def _first_problem(check: Callable[[], None], world: World) -> str:
    """The first CheckpointError of a check that every process makes, the same in every process; empty if none."""
    problem = ""
    try:
        check()
    except CheckpointError as error:
        problem = str(error)
    return next((problem for problem in world.gather_objects(problem) if problem), "")


def _digests_of(checkpoint: Path) -> Digests | None:
    """The digests of a checkpoint; None for one without. Raises CheckpointError if they are lost or another one's."""
    digests = Digests.read(checkpoint)
    if digests is None:
        if read_state(checkpoint).run.has_digests:
            raise CheckpointError(f"{checkpoint / DIGESTS_FILE} is missing, so the checkpoint cannot be checked")
        return None
    name = _NAME.fullmatch(checkpoint.name)
    if name and digests.step is not None and digests.step != int(name[1]):
        raise CheckpointError(f"{checkpoint} holds the checkpoint of step {digests.step}; rename it to match")
    if f"{FOLDER}/{STATE_FILE}" not in digests.files:
        read_state(checkpoint)  # raises the error that there is none
    return digests


def _is_model_alone(path: Path) -> bool:
    """Whether a directory has a model without the state of a training, and has not lost such a state."""
    if has_state(path):
        return False
    try:
        digests = Digests.read(path)
    except CheckpointError:
        return False
    return digests is None or f"{FOLDER}/{STATE_FILE}" not in digests.files


def rotate(output_dir: Path, limit: int | None, keep: Collection[Path] = ()) -> None:
    """Delete the oldest checkpoints, so that at most `limit` remain. Runs in the main process.

    The newest one, the newest one that a training can resume from, and those in `keep` always remain.
    """
    every = checkpoints(output_dir)
    if limit is None or limit < 1 or len(every) <= limit:
        return
    newest_complete = next((path for path in reversed(every) if _is_complete(path)), None)
    stay = (every[-1], newest_complete, *keep)
    protected = [path for path in every if path in stay]
    others = [path for path in every if path not in protected]
    for path in others[: max(0, len(every) - max(limit, len(protected)))]:
        gone = path.with_name(f".{path.name}.gone-{uuid4().hex[:8]}")
        path.rename(gone)
        remove(gone)


def tidy(output_dir: Path) -> None:
    """Clean up an output directory after a run that was killed. Runs in the main process.

    Raises:
        CheckpointError: a file has the name of a checkpoint, so none could be saved under it.
    """
    entries = list(output_dir.iterdir()) if output_dir.is_dir() else []
    for path in entries:
        if _NAME.fullmatch(path.name) and not path.is_dir():
            what = f"a link to {os.readlink(path)}, which is not a directory" if path.is_symlink() else "a file"
            raise CheckpointError(
                f"{path} is {what}, and a checkpoint is saved under that name; rename or delete it, or choose another "
                "output directory"
            )
    for path in entries:
        match = _LEFTOVER.fullmatch(path.name)
        if match and match[2] == "old" and path.is_dir() and not (output_dir / match[1]).exists():
            path.rename(output_dir / match[1])
        elif match:
            remove(path)


def check_shared(output_dir: Path, world: World) -> None:
    """Check that all processes write into the same directory. Every process must call it.

    Raises:
        CheckpointError: on every process, if one of them cannot write, or does not see a file of another one.
    """
    token = world.broadcast_value(uuid4().hex, world.main)
    files = [output_dir / f".seen-by-all-{token}-{rank}" for rank in range(world.num_processes)]

    def write() -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        files[world.rank].touch()

    try:
        write_together(output_dir, world, write)
        deadline = time.monotonic() + _APPEARS_SECONDS
        unseen = [rank for rank, file in enumerate(files) if not _appears(file, deadline)]
        places = world.gather_objects((str(output_dir.resolve()), unseen))
    finally:
        files[world.rank].unlink(missing_ok=True)
    for rank, (path, others) in enumerate(places):
        if others:
            raise CheckpointError(
                f"process {rank} (on {world.hosts[rank]}, in {path}) does not see what process {others[0]} (on "
                f"{world.hosts[others[0]]}, in {places[others[0]][0]}) writes; every process writes its own stages, so "
                "the output directory must be one that all machines share, given by the same absolute path"
            )


def _appears(file: Path, deadline: float) -> bool:
    """Whether a file exists; waits until then for a network file system to show it."""
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_complete(checkpoint: Path) -> bool:
    """Whether a training could resume from this directory, as far as can be seen without reading all of it."""
    try:
        _digests_of(checkpoint)
        _check_files(checkpoint)
    except CheckpointError:
        return False
    return True


def _check_files(checkpoint: Path) -> None:
    """Raise CheckpointError if a file is missing or shorter than the header of its tensors says."""
    state = read_state(checkpoint)
    for file in [*_weights(checkpoint), *(f"{FOLDER}/{file}" for file in state.optimizer["files"])]:
        try:
            with safe_open(checkpoint / file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{checkpoint / file} is missing or damaged: {error}") from error


def find_model_damage(checkpoint: Path, world: World, *, checks_bytes: bool) -> str:
    """Why a saved model cannot be loaded, the same in every process; empty if it can.

    Args:
        checkpoint: its directory.
        world: the processes; every one must call this function.
        checks_bytes: whether the tensors are read too, by each process its share; otherwise only the headers.
    """

    def check() -> None:
        if not checkpoint.is_dir():
            raise CheckpointError(f"there is no {checkpoint}")
        check_model_files(checkpoint)
        digests, files = Digests.read(checkpoint), _weights(checkpoint)
        if digests is not None:
            parts = [part for file in files for part in digests.parts(file)]
            digests.check(parts[world.rank :: world.num_processes] if checks_bytes else [])

    return _first_problem(check, world)


def _weights(checkpoint: Path) -> list[str]:
    for name in (SAFE_WEIGHTS_NAME, ADAPTER_WEIGHTS_NAME):
        if (checkpoint / name).exists():
            return [name]
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        raise CheckpointError(f"{checkpoint} has no weights in safetensors format")
    return sorted(set(read_weight_map(index).values()))
