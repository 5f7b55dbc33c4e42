"""Processes that a launcher starts again meet in a store that has what earlier ones wrote."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.job.liveness import Liveness
from hf_gpipe.job.meeting import meet

LIMIT = timedelta(seconds=20)


def test_each_start_has_a_name_that_all_its_processes_know() -> None:
    store = dist.HashStore()
    names = []
    for num_processes in (3, 1, 2, 4, 2):
        # Of an earlier start that ended before the processes had met.
        store.set(f"hf_gpipe/asks/{num_processes - 1}", "stale")
        with ThreadPoolExecutor(num_processes) as pool:
            meetings = [pool.submit(meet, store, rank, num_processes, LIMIT) for rank in range(num_processes)]
            (name,) = {meeting.result() for meeting in meetings}
        names.append(name)
    assert len(set(names)) == len(names)


def test_a_process_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set("hf_gpipe/asks/1", "stale")
    with pytest.raises(RuntimeError, match="in vain for process 1 of 2 to start"):
        meet(store, 0, 2, timedelta(seconds=0.1))


def test_a_process_of_another_run_is_told_that_it_is_one() -> None:
    """Two runs that were given the same port: the store is that of the first."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(meet, store.clone(), rank, 2, LIMIT) for rank in range(2)]
        (name,) = {meeting.result() for meeting in meetings}
    heart = Liveness(dist.PrefixStore(name, store), 0, 2, timedelta(seconds=4))
    with pytest.raises(UserError, match=rf"another run .* process {os.getpid()} on machine .*; give each run a port"):
        meet(store.clone(), 1, 2, timedelta(seconds=100))
    heart.stop()


def test_an_earlier_start_of_the_same_job_is_no_other_run() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: meet(store.clone(), rank, 2, LIMIT), range(2)))
    # Its main process has ended, and that of the next start is late.
    with pytest.raises(RuntimeError, match="waited 4 seconds in vain for process 0 to start"):
        meet(store.clone(), 1, 2, timedelta(seconds=4))
