"""The channels for the messages of a divided head."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_gpipe.modes.divided_head.table import head_communicators, head_edges
from hf_gpipe.runtime.edges import Edge, communicator, connect_edge
from hf_gpipe.runtime.mesh import Mesh


def connect_head(world: Mesh, dtype_of: Callable[[str], torch.dtype]) -> dict[tuple[int, int, int], Edge]:
    """Create the edges between this process's stages and the last stage, for the messages of a divided head.

    Every process must call it.

    Args:
        dtype_of: function from a tensor's name to its dtype.
    """
    placement = world.placement
    last = placement.num_stages - 1
    links = {link: communicator(world, link) for link in head_communicators(placement)}
    return {
        (stage, worker, end): connect_edge(world, links, (stage, last), (worker, end), last + stage, dtype_of)
        for stage, worker, end in head_edges(placement)
        if world.worker in (worker, end)
    }
