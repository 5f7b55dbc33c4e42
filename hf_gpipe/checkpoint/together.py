"""Write in all processes: an error in one of them, such as a full disk, is raised in all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from hf_gpipe.errors import CheckpointError
from hf_gpipe.runtime.topology import Topology

Value = TypeVar("Value")


def write_together(directory: Path, topology: Topology, write: Callable[[], Value]) -> list[Value]:
    """Call `write` in this process and wait for the others. Every process must call it.

    Args:
        directory: where `write` writes to, for the error message.
        topology: the processes.
        write: returns a small value.

    Returns:
        The values that `write` returned in the processes, in order of rank.

    Raises:
        CheckpointError: on every process, if one of them cannot write.
    """
    value, problem = None, ""
    try:
        value = write()
    except (OSError, SafetensorError) as error:
        problem = " ".join(str(error).split())
    outcomes = topology.gather_objects((value, problem))
    for rank, (_, found) in enumerate(outcomes):
        if found:
            raise CheckpointError(
                f"process {rank} cannot write into {directory}: {found}; earlier checkpoints are unchanged; make room "
                "there, or correct the permissions, and start again"
            )
    return [value for value, _ in outcomes]  # type: ignore[misc]  # without a problem, there is a value


def write_on_main(directory: Path, topology: Topology, write: Callable[[], None]) -> None:
    """Call `write` in the main process, once every process has called this function.

    Raises CheckpointError, on every process, if the main one cannot write into `directory`.
    """
    topology.barrier()
    write_together(directory, topology, write if topology.is_main else _nothing)


def _nothing() -> None:
    pass
