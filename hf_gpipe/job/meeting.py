"""The processes of a job meet in a store that may still have what the processes of an earlier start wrote there.

torchrun starts all processes anew after a failure, or when a machine is lost or joins. The store in its agent goes on,
with the addresses of processes that have ended, and no variable of the environment is the same in all processes of one
start and another one in the next. So the processes agree on a name for their start.

The store may also be that of another run, which was given the same port. Its main process answers nobody who comes when
its own processes have met, but its heart beats, by which the late one knows that it has come to the wrong place.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.job.liveness import count_beats

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.02, 0.2
#: How often a process that is not answered looks for beats of another run, and how many tell it that one is there.
_LISTEN_SECONDS, _ENOUGH_BEATS = 1.0, 2

#: The name of the last start whose processes have met, and its main process in words.
_MET = "hf_gpipe/met"


def meet(store: dist.Store, rank: int, num_processes: int, limit: timedelta) -> str:
    """Agree on a name for this start of the processes. Every process must call it.

    Each process asks under a name of its own, which rank 0 answers with the name of the start. What an earlier process
    has asked is answered too, and nobody reads it.

    Args:
        store: common to all, with anything in it.
        limit: how long to wait for the others.

    Returns:
        The name, which no other start has.

    Raises:
        RuntimeError: some process did not come in time.
        UserError: the store is that of another run, whose processes have met.
    """
    own = uuid4().hex
    if rank != 0:
        store.set(f"hf_gpipe/asks/{rank}", own)
        _wait_for_answer(store, f"hf_gpipe/start/{own}", limit)
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
    store.set(_MET, json.dumps([own, f"process {os.getpid()} on machine {socket.gethostname()}"]))
    return own


def _wait_for_answer(store: dist.Store, key: str, limit: timedelta) -> None:
    """Wait for a key of the store, as long as no other run's main process is heard there."""
    begin = listened = time.monotonic()
    pause, last, num_beats = _POLL_SECONDS, ("", 0), 0
    while not store.check([key]):
        now = time.monotonic()
        if now - begin > limit.total_seconds():
            raise RuntimeError(f"waited {limit.total_seconds():g} seconds in vain for process 0 to start")
        if now - listened > _LISTEN_SECONDS and store.check([_MET]):
            listened = now
            start, main = json.loads(store.get(_MET))
            heard = start, count_beats(dist.PrefixStore(start, store), 0)
            # Of an earlier start of this job, it would be about to end.
            num_beats = num_beats + (heard[1] > last[1]) if heard[0] == last[0] else 0
            last = heard
            if num_beats >= _ENOUGH_BEATS:
                address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                raise UserError(
                    f"the processes of another run have met at {address} (MASTER_ADDR, MASTER_PORT): its main process "
                    f"is {main}; give each run a port of its own"
                )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
