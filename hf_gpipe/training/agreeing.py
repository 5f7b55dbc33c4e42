"""The processes of a training agree on what callbacks or a signal have asked for, at the end of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_gpipe.job.world import World


class Agreement:
    """Makes all processes do what any was asked for, or a process would hang. Each has one and calls it in step.

    Args:
        world: the processes of the pipeline.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        #: Gives the requests of the last call, if they may still have to be met; else None.
        self._earlier: Callable[[], torch.Tensor] | None = None

    def reach(self, own: Sequence[int], *, waits: bool) -> list[int]:
        """The requests to meet now, the same in every process.

        Args:
            own: a number for each kind of request, the same kinds in every process; 0: it was not asked for here.
            waits: whether to wait for the other processes, in all of them. If not, a process without requests goes on
                at once. Then requests that every process has are met now, and others at the next call, when all
                processes know of them.

        Returns:
            The largest number of any process for each kind, or 0.
        """
        asked = list(own)
        if self._earlier is not None:
            asked = [max(pair) for pair in zip(asked, self._earlier().amax(dim=1).tolist(), strict=True)]
        # A column for each process.
        requests = torch.zeros(len(asked), self._world.num_processes, dtype=torch.int64)
        requests[:, self._world.rank] = torch.tensor(asked)
        self._earlier = self._world.begin_sum(requests)
        if waits or any(asked):
            everyone = self._earlier()
            if waits or everyone.any(dim=0).all():
                self._earlier = None
                return [int(largest) for largest in everyone.amax(dim=1)]
        return [0] * len(asked)
