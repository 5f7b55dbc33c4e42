"""The processes of a job meet in a store that may still have what the processes of an earlier start wrote there.

torchrun starts all processes anew after a failure, or when a machine is lost or joins. The store in its agent goes on,
with the addresses of processes that have ended, and no variable of the environment is the same in all processes of one
start and another one in the next. So the processes agree on a name for their start.
"""

from __future__ import annotations

import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

_POLL_SECONDS = 0.02


def meet(store: dist.Store, rank: int, num_processes: int, limit: timedelta) -> str:
    """Agree on a name for this start of the processes. Every process must call it.

    Each process asks under a name of its own, which rank 0 answers with the name of the start. What an earlier process
    has asked is answered too, and nobody reads it.

    Args:
        store: common to all, with anything in it.
        rank: of this process.
        num_processes: of this start.
        limit: how long to wait for the others.

    Returns:
        The name, which no other start has.

    Raises:
        RuntimeError: some process did not come in time.
    """
    own = uuid4().hex
    if rank != 0:
        store.set(f"hf_gpipe/asks/{rank}", own)
        store.wait([f"hf_gpipe/start/{own}"], limit)
        start = store.get(f"hf_gpipe/start/{own}").decode()
        store.set(f"hf_gpipe/here/{start}/{rank}", "")
        return start
    missing, answered = list(range(1, num_processes)), set[str]()
    deadline = time.monotonic() + limit.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"hf_gpipe/asks/{other}"]):
                name = store.get(f"hf_gpipe/asks/{other}").decode()
                if name not in answered:
                    answered.add(name)
                    store.set(f"hf_gpipe/start/{name}", own)
        missing = [other for other in missing if not store.check([f"hf_gpipe/here/{own}/{other}"])]
        if missing and time.monotonic() > deadline:
            raise RuntimeError(
                f"waited {limit.total_seconds():g} seconds in vain for process {missing[0]} of {num_processes} to start"
            )
        time.sleep(_POLL_SECONDS if missing else 0)
    return own
