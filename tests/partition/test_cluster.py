"""The text of a cluster."""

from __future__ import annotations

import pytest

from hf_gpipe.errors import UserError
from hf_gpipe.partition.cluster import CLUSTERS, Cluster, Level, parse_cluster


def test_levels_are_written_from_the_outside_in() -> None:
    cluster = parse_cluster("4x8@25Gbit/s+50us,150GB/s+5us")
    assert [level.parts for level in cluster.levels] == [8, 4]
    inner, outer = cluster.levels
    assert (inner.bytes_per_second, inner.latency_seconds) == (150e9, pytest.approx(5e-6))
    assert (outer.bytes_per_second, outer.latency_seconds) == (3.125e9, pytest.approx(5e-5))
    assert (cluster.num_devices, cluster.devices_in(0), cluster.devices_in(1)) == (32, 1, 8)
    assert str(cluster) == "4x8"
    assert outer.seconds(3.125e9) == pytest.approx(1.00005)


def test_one_level_and_three() -> None:
    assert parse_cluster("16@1.25GB/s") == Cluster((Level(16, 1.25e9),))
    assert parse_cluster("2x3x4@1GB/s,2MB/s,300KB/s").num_devices == 24


def test_named_clusters_and_their_links() -> None:
    assert parse_cluster("pipedream-a") is CLUSTERS["pipedream-a"]
    assert str(parse_cluster("pipedream-b")) == "2x8"
    assert parse_cluster("1x4@pipedream-a").levels[0] == CLUSTERS["pipedream-a"].levels[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8", "names no links"),
        ("pipedream-aa", "did you mean 'pipedream-a'"),
        ("4x0@1GB/s,1GB/s", "the count '0'"),
        ("4x@1GB/s,1GB/s", "the count ''"),
        ("4 x 8@1GB/s,1GB/s", "the count '4 '"),
        ("-4@1GB/s", "the count '-4'"),
        ("4x8@1GB/s", "2 levels .* links for 1"),
        ("16@pipedream-a", "1 levels .* links for 2"),
        ("4x8@pipedream-c", "unknown links 'pipedream-c'"),
        ("4x8@1GB/s,10Gbps", "the bandwidth '10Gbps'"),
        ("4x8@1GB/s,", "the bandwidth ''"),
        ("4@1e9B/s", "the bandwidth '1e9B/s'"),
        ("4@1GB/s+5", "the latency '5'"),
        ("4@1GB/s+", "the latency ''"),
        ("4@0GB/s", "bandwidth of 0.0 B/s"),
    ],
)
def test_a_text_that_cannot_be_read_names_its_part(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_cluster(text)


def test_levels_in_python_are_checked_too() -> None:
    for wrong in ((0, 1.0, 0.0), (1, float("inf"), 0.0), (1, 1.0, -1.0)):
        with pytest.raises(UserError, match="a level of a cluster"):
            Level(*wrong)
    with pytest.raises(UserError, match="at least one level"):
        Cluster(())
