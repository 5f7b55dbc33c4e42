"""The processes of a training agree on what callbacks or a signal have asked for, at the end of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_gpipe.job.world import World


class Agreement:
    """All processes must do what one of them was asked for, or one would hang. Each has one, and they call it in step.

    Args:
        world: of the pipeline.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        #: Of the last call, if its requests may still have to be met.
        self._earlier: Callable[[], torch.Tensor] | None = None

    def reach(self, own: Sequence[int], *, waits: bool) -> list[int]:
        """The requests to meet now, the same in every process.

        Args:
            own: for each kind of request a number, the same kinds in every process; 0: it was not asked for here.
            waits: whether to wait for the other processes, in all of them. If not, a process without requests goes on
                at once. Then requests that every process has are met now, and others at the next call, when all
                processes know of them.

        Returns:
            Of each kind the largest number of any process, or 0.
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
