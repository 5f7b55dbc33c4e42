"""How the layers of each stage are divided among processes (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field

from hf_gpipe.errors import UserError
from hf_gpipe.partition.cluster import Cluster
from hf_gpipe.schedule import Placement
from hf_gpipe.settings.mode import Mode
from hf_gpipe.settings.section import Count

T = TypeVar("T")


class Division(Mode):
    """How layers are divided among the ranks of a worker."""

    num_ranks: Count = Field(1, alias="tensor_parallel")
    """T: number of processes that divide the layers of each stage among them (tensor parallelism), each with a device
    of its own. Each process in `num_processes` and `placement` then stands for T processes with consecutive ranks."""

    if TYPE_CHECKING:

        def __init__(self, num_ranks: int = 1) -> None: ...

    @property
    def is_whole(self) -> bool:
        """Whether layers are whole, on the only rank of a worker."""
        return self.num_ranks == 1

    @property
    def text(self) -> str:
        """The setting, for errors."""
        return f"tensor_parallel is {self.num_ranks}"

    def by_worker(self, of_ranks: Sequence[T]) -> list[Sequence[T]]:
        """A list with an entry for every rank, cut into the entries of each worker."""
        return [of_ranks[first : first + self.num_ranks] for first in range(0, len(of_ranks), self.num_ranks)]

    def workers_among(self, num_processes: int) -> int:
        """How many workers so many processes form. Raises UserError where T does not divide their number."""
        if num_processes % self.num_ranks:
            raise UserError(
                f"{self.text} and there are {num_processes} processes; start a multiple of "
                f"{self.num_ranks}, for so many share each stage."
            )
        return num_processes // self.num_ranks

    def workers_on(self, num_gpus: int) -> int:
        """How many workers so many GPUs are enough for. Raises UserError where it is none."""
        if num_gpus < self.num_ranks:
            raise UserError(
                f"pipeline.{self.text} and this machine has {num_gpus} GPUs; use at most as "
                "many, a launcher on several machines, or pipeline.device=cpu"
            )
        return num_gpus // self.num_ranks

    def cluster_of(self, devices: Cluster) -> Cluster:
        """The cluster of workers that are neighbouring devices, whose flows leave a part together.

        Raises:
            UserError: a worker would be in two parts of the innermost level.
        """
        inner, *outer = devices.levels
        if inner.parts % self.num_ranks:
            raise UserError(
                f"{self.text} and {inner.parts} devices have fast links with each other: the "
                f"sums of each block would go over slower ones; use a divisor of {inner.parts}."
            )
        shared = [replace(level, bytes_per_second=level.bytes_per_second / self.num_ranks) for level in outer]
        return Cluster((replace(inner, parts=inner.parts // self.num_ranks), *shared))

    def placed(self, placement: Placement) -> Placement:
        """A placement whose workers are divided so."""
        return replace(placement, ranks_per_worker=self.num_ranks)
