"""The memory that CUDA's libraries take of each process, counted by hand."""

from __future__ import annotations

import pytest

from hf_gpipe.modes.divided_head.table import head_communicators
from hf_gpipe.partition.cluster import parse_cluster
from hf_gpipe.planner.machines.devices import DEVICES, cpu
from hf_gpipe.planner.machines.processes import Processes, library_bytes
from hf_gpipe.schedule import Placement
from hf_gpipe.settings.division import Division

MIB = 1 << 20
#: Of each kind of channel: of messages, both directions at one neighbour, and of a ring.
PCIE, RING, NVLINK, NVLINK_RING = 2 * 12, 2 * 12, 32 * 12, 24 * 12


def mebibytes(name: str, workers: list[tuple[int, ...]], cluster: str | None = None, ranks: int = 1) -> list[float]:
    processes = Processes(DEVICES[name], None, cluster and parse_cluster(cluster), None, Division(ranks))
    return [size / MIB for size in library_bytes(processes, Placement(workers))]


@pytest.mark.parametrize(
    ("name", "workers", "cluster", "ranks", "beside_cublas"),
    [
        ("rtx4090", [(0,)], None, 1, [0]),
        ("rtx4090", [(0,), (1,), (2,)], None, 1, [PCIE + RING, 2 * PCIE + RING, PCIE + RING]),
        ("a100-80", [(0,), (1,)], None, 1, [NVLINK + NVLINK_RING] * 2),
        # Two stages of two replicas: each worker sends to one of the next, and has a ring with its own replica.
        ("rtx4090", [(0, 1), (2, 3)], None, 1, [PCIE + 2 * RING] * 4),
        # Between two machines, and for sums over all, the network; each has the ranks of its worker beside.
        ("a100-80", [(0,), (1,)], "2x2@1.25GB/s,300GB/s", 2, [PCIE + RING + NVLINK_RING] * 2),
    ],
)
def test_each_connection_counts(
    name: str, workers: list[tuple[int, ...]], cluster: str | None, ranks: int, beside_cublas: list[int]
) -> None:
    always = 12.125 + 22
    assert mebibytes(name, workers, cluster, ranks) == [always + size for size in beside_cublas]


def test_hopper_has_larger_workspaces_and_a_cpu_none() -> None:
    assert mebibytes("h100", [(0,)]) == [64 + 22]
    assert library_bytes(Processes(cpu(1)), Placement([(0,), (1,)])) == (0, 0)


def test_a_divided_head_has_communicators_of_its_own() -> None:
    processes, placement = Processes(DEVICES["rtx4090"]), Placement([(0,), (1,), (2,)])
    whole, divided = (library_bytes(processes, placement, links) for links in ((), head_communicators(placement)))
    # The last stage talks to both others, each in both directions.
    assert [(more - less) / MIB for less, more in zip(whole, divided, strict=True)] == [PCIE, PCIE, 2 * PCIE]
