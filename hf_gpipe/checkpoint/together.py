"""Write in all processes: an error in one of them, such as a full disk, is raised in all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from hf_gpipe.errors import CheckpointError
from hf_gpipe.job.world import World

Value = TypeVar("Value")

#: How many time limits of messages the processes wait for one that writes: a disk may be slow, or may not answer.
PATIENCE = 6


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
