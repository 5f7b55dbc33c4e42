"""A cluster as levels: devices in a machine, machines in the cluster, each with the links between its parts.

The text of a cluster names its levels from the outside in: `4x8` is 4 machines of 8 devices. The links of the levels
follow after an @, in the same order: `4x8@25Gbit/s+50us,150GB/s+5us`. A link has a bandwidth, in bytes (B) or bits
(bit) a second, and may have a latency.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hf_gpipe.errors import UserError, nearest

_EXAMPLE = "4x8@25Gbit/s+50us,150GB/s+5us"
_BANDWIDTH = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<prefix>[KMGT]?)(?P<unit>B|bit)/s")
_LATENCY = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>ns|us|ms|s)")
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Level:
    """Equal parts that one kind of link connects; a link by itself connects two.

    Attributes:
        parts: how many; of the innermost level these are devices.
        bytes_per_second: of the link of one part, in one direction.
        latency_seconds: of one message.
    """

    parts: int
    bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise UserError(f"a level of a cluster has {self.parts} parts; it needs at least 1.")
        if not 0 < self.bytes_per_second < float("inf"):
            raise UserError(
                f"a level of a cluster has a bandwidth of {self.bytes_per_second} B/s; it must be above 0 and finite."
            )
        if not 0 <= self.latency_seconds < float("inf"):
            raise UserError(
                f"a level of a cluster has a latency of {self.latency_seconds} s; it must be at least 0 and finite."
            )

    def seconds(self, size_bytes: float) -> float:
        """How long one message travels."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Cluster:
    """Levels from the inside out: `levels[0]` connects the devices of a machine, `levels[-1]` the largest parts.

    Ranks are numbered so that those of a part follow each other.
    """

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise UserError("a cluster needs at least one level.")

    @property
    def num_devices(self) -> int:
        return self.devices_in(len(self.levels))

    def devices_in(self, depth: int) -> int:
        """The devices in one component that has the innermost `depth` levels; 1 for depth 0."""
        return prod(level.parts for level in self.levels[:depth])

    def __str__(self) -> str:
        """The counts alone, such as 4x8."""
        return "x".join(str(level.parts) for level in reversed(self.levels))


#: The clusters of PipeDream's Table 2 (SOSP 2019), both with V100s. A: 4 of them in a server (Azure NC24 v3), PCIe,
#: 10 Gbit/s between servers. B: 8 in a server (AWS p3.16xlarge), NVLink, 25 Gbit/s. The table names the kinds of links
#: inside of a server and no rates: docs/partition.md says where 3 and 150 GB/s come from.
CLUSTERS: Mapping[str, Cluster] = {
    "pipedream-a": Cluster((Level(4, 3e9, 1e-5), Level(4, 1.25e9, 5e-5))),
    "pipedream-b": Cluster((Level(8, 150e9, 5e-6), Level(2, 3.125e9, 5e-5))),
}


def parse_cluster(text: str) -> Cluster:
    """The cluster that a text describes.

    Args:
        text: a name in `CLUSTERS`; counts and links, such as `4x8@25Gbit/s+50us,150GB/s+5us`, or `16@1.25GB/s` for one
            level; or counts and a name, such as `2x4@pipedream-a`, which takes that cluster's links.

    Raises:
        UserError: names the part of the text that cannot be read, and what is allowed there.
    """
    if text in CLUSTERS:
        return CLUSTERS[text]
    counts_text, separator, links_text = text.partition("@")
    if not separator:
        hint = nearest(text, CLUSTERS)
        raise UserError(
            f"cluster {text!r} names no links; write counts and links, such as {_EXAMPLE}, or one of the names "
            f"{', '.join(CLUSTERS)}{hint}"
        )
    counts = [_count(part, text) for part in counts_text.split("x")]
    if re.fullmatch(r"[a-z][a-z0-9-]*", links_text):
        links = _named(links_text, text)
    else:
        links = [_link(part, text) for part in links_text.split(",")]
    if len(links) != len(counts):
        raise UserError(
            f"cluster {text!r} has {len(counts)} levels ({counts_text}) and links for {len(links)}; "
            "give one link per level, from the outermost to the innermost."
        )
    levels = [Level(count, *link) for count, link in zip(counts, links, strict=True)]
    return Cluster(tuple(reversed(levels)))


def _count(part: str, text: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]*", part):
        raise UserError(
            f"cluster {text!r} has the count {part!r}; write whole numbers above 0 with x between them, such as "
            f"{_EXAMPLE}."
        )
    return int(part)


def _named(name: str, text: str) -> list[tuple[float, float]]:
    """The links of a named cluster, from the outside in."""
    if name not in CLUSTERS:
        raise UserError(
            f"cluster {text!r} names the unknown links {name!r}; use one of {', '.join(CLUSTERS)}, or give "
            f"bandwidths, such as {_EXAMPLE}{nearest(name, CLUSTERS)}"
        )
    return [(level.bytes_per_second, level.latency_seconds) for level in reversed(CLUSTERS[name].levels)]


def _link(part: str, text: str) -> tuple[float, float]:
    """Bytes a second and seconds of latency."""
    bandwidth_text, separator, latency_text = part.partition("+")
    bandwidth = _BANDWIDTH.fullmatch(bandwidth_text)
    if bandwidth is None:
        raise UserError(
            f"cluster {text!r} has the bandwidth {bandwidth_text!r}; write it as 12.5GB/s or 10Gbit/s, for example."
        )
    bits = 8 if bandwidth["unit"] == "bit" else 1
    rate = float(bandwidth["number"]) * _PREFIXES[bandwidth["prefix"]] / bits
    if not separator:
        return rate, 0.0
    latency = _LATENCY.fullmatch(latency_text)
    if latency is None:
        raise UserError(f"cluster {text!r} has the latency {latency_text!r}; write it as 5us or 0.1ms, for example.")
    return rate, float(latency["number"]) * _SECONDS[latency["unit"]]
