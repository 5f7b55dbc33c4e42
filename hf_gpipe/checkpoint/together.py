"""Writing in all processes: what fails in one of them, as on a full disk, is told in all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from hf_gpipe.errors import CheckpointError
from hf_gpipe.runtime.topology import Topology

Value = TypeVar("Value")


def write_together(directory: Path, topology: Topology, write: Callable[[], Value]) -> list[Value]:
    """Call `write` in every process, and wait until all of them are done.

    Args:
        directory: where it writes to, for the message.
        topology: the processes.
        write: returns a small value.

    Returns:
        What each process's call returned, in order of rank.

    Raises:
        CheckpointError: on every process, where one of them cannot write.
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
                f"process {rank} cannot write into {directory}: {found}; what was saved before is as it was: make room "
                "there, or see to the permissions, and start again"
            )
    return [value for value, _ in outcomes]  # type: ignore[misc]  # without a problem, there is a value


def write_on_main(directory: Path, topology: Topology, write: Callable[[], None]) -> None:
    """Call `write` in the main process, after all of them have come here.

    Raises CheckpointError, on every process, where the main one cannot write into `directory`.
    """
    topology.barrier()
    write_together(directory, topology, write if topology.is_main else _nothing)


def _nothing() -> None:
    pass
