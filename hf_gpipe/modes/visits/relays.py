"""The channels on which workers tell each other that the gradients of a visit have arrived in CPU memory."""

from __future__ import annotations

import torch

from hf_gpipe.runtime.channel import Channel, RemoteChannel
from hf_gpipe.runtime.mesh import Mesh


def connect_relays(world: Mesh) -> dict[tuple[int, int, int], Channel]:
    """The channels between this process's workers and those of other processes, by (stage, sender, receiver).

    They exist where stages are shared. A message says that the gradients of a visit of the stage's weights have arrived
    in CPU memory.
    """
    placement = world.placement
    if not placement.is_shared or world.num_processes == 1:
        return {}
    cpu, first = torch.device("cpu"), 2 * placement.num_stages
    group, own = world.group_on(cpu), {*world.workers}
    return {
        (stage, sender, receiver): RemoteChannel(
            world.peer(receiver if sender in own else sender), first + stage, group, cpu, lambda _: torch.uint8
        )
        for stage in range(placement.num_stages)
        for pipeline in placement.pipelines
        for sender in pipeline
        for receiver in pipeline
        if (sender in own) != (receiver in own)
    }
