"""Partition by the number of layers."""

from __future__ import annotations


def by_count(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, at most one apart, the longer stages first.

    The last stage has the head and the loss, usually the most expensive layer, so it should not get an extra one.
    """
    base, extra = divmod(num_layers, num_stages)
    return tuple(base + (stage < extra) for stage in range(num_stages))
