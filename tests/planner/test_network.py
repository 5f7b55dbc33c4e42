"""Links of a cluster: which one a message or a reduction takes, and who shares it."""

from __future__ import annotations

import pytest

from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.partition.cluster import Cluster, parse_cluster
from hf_gpipe.planner.machines.devices import LINKS, device
from hf_gpipe.planner.machines.network import Network, one_level, read_cluster
from hf_gpipe.schedule import Costs, Placement, build, placement_for, simulate

#: Two machines of two devices; a byte takes a tenth of a second inside of a machine and a second between machines.
TWO_BY_TWO = parse_cluster("2x2@1B/s,10B/s")


def network(placement: Placement, cluster: Cluster = TWO_BY_TWO) -> Network:
    return Network(cluster, placement)


def test_pipelines_inside_of_machines_reduce_between_them() -> None:
    placement = placement_for("gpipe", 2, 4, 2)
    assert placement.workers == ((0, 2), (1, 3))
    links = network(placement)
    assert links.transfer_seconds([20]) == {(0, 0, 1): 2, (0, 2, 3): 2}
    # Each replica sends a half twice, and two rings share the link of a machine.
    assert links.reduce_seconds(0, 20) == links.reduce_seconds(1, 20) == pytest.approx(2 * 10 * 2)


def test_replicas_inside_of_machines_share_the_link_for_messages() -> None:
    links = network(Placement([(0, 1), (2, 3)]))
    assert links.transfer_seconds([20]) == {(0, 0, 2): 40, (0, 1, 3): 40}
    assert links.reduce_seconds(0, 20) == pytest.approx(2)


def test_a_ring_over_all_devices_crosses_each_link_once() -> None:
    assert network(Placement([(0, 1, 2, 3)])).reduce_seconds(0, 20) == pytest.approx(2 * 3 * 5)


def test_stages_of_one_process_send_nothing() -> None:
    links = network(Placement([0, 0, 1]))
    assert links.transfer_seconds([20, 20]) == {(0, 0, 0): 0, (1, 0, 1): 2}
    assert links.reduce_seconds(0, 20) == 0


def test_a_device_sends_over_its_own_link_to_several() -> None:
    seconds = network(Placement.one_stage_each(2, [1, 3])).transfer_seconds([20])
    assert seconds == {(0, 0, 1): 2, (0, 0, 2): 20, (0, 0, 3): 20}


def test_counts_alone_take_the_devices_link() -> None:
    a100 = device("a100-80")
    inner, outer = read_cluster("4x8", a100).levels
    assert (inner.parts, inner.bytes_per_second) == (8, a100.link.bytes_per_second)
    assert (outer.parts, outer.bytes_per_second) == (4, LINKS["ethernet-100"].bytes_per_second)
    assert one_level(a100, 3).levels[0].seconds(10) == a100.link.seconds(10)
    with pytest.raises(UserError, match="names no links"):
        read_cluster("2x4x8", a100)


def test_more_processes_than_devices_are_refused() -> None:
    with pytest.raises(UserError, match="5 processes and the cluster 2x2 4 devices"):
        network(Placement.one_stage_each(5))


def test_a_clock_takes_seconds_of_edges() -> None:
    table = build("gpipe", 2, 2, recompute="none", replicas=2)
    edges = {(0, 0, 1): 1, (0, 2, 3): 5}
    total = simulate(table, Costs(1, 1, transfer_seconds=edges)).total_seconds
    assert total == 4 + 2 * 5
    assert simulate(table, Costs(1, 1, transfer_seconds=5)).total_seconds == total
    with pytest.raises(ScheduleError, match="no value for the edge"):
        simulate(table, Costs(1, 1, transfer_seconds={(0, 0, 1): 1}))
    with pytest.raises(ScheduleError, match="transfer_seconds is -1"):
        simulate(table, Costs(1, 1, transfer_seconds={**edges, (0, 2, 3): -1}))
