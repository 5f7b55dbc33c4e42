"""Write in all processes: an error in one of them, such as a full disk, is raised in all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from hf_gpipe.errors import CheckpointError, UserError
from hf_gpipe.job.world import World

Value = TypeVar("Value")

#: How many time limits of messages the processes wait for one that writes: a disk may be slow, or may not answer.
PATIENCE = 6


def write_together(
    directory: Path, world: World, write: Callable[[], Value], *, is_writing: bool = True
) -> list[Value]:
    """Call `write` in this process and wait for the others. Every process must call it.

    Args:
        directory: where `write` writes to, for the error message.
        world: the processes.
        write: returns a small value.
        is_writing: whether this process calls it; otherwise it waits alone, and its value is None.

    Returns:
        The values that `write` returned in the processes, in order of rank.

    Raises:
        CheckpointError: on every process, if one of them cannot write. A UserError of one is raised on every process.
    """
    value: Value | None = None
    problem: UserError | str = ""
    with world.working(PATIENCE):
        try:
            value = write() if is_writing else None
        except (OSError, SafetensorError) as error:
            problem = " ".join(str(error).split())
        except UserError as error:
            problem = error
    outcomes = world.gather_objects((value, problem))
    for rank, (_, why) in enumerate(outcomes):
        if isinstance(why, UserError):
            raise problem if isinstance(problem, UserError) and rank == world.rank else why
        if why:
            raise CheckpointError(
                f"process {rank} cannot write into {directory}: {why}; earlier checkpoints are unchanged; make room "
                "there, or correct the permissions, and start again"
            )
    return [value for value, _ in outcomes]  # type: ignore[misc]  # without a problem, there is a value


def write_once(directory: Path, world: World, write: Callable[[], None]) -> None:
    """Call `write` in the writer only, once every process has called this function.

    Raises CheckpointError, on every process, if the writer cannot write into `directory`.
    """
    world.barrier()
    write_together(directory, world, write, is_writing=world.is_writer)
