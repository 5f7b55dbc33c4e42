"""Processes that a launcher starts again meet in a store that has what earlier ones wrote."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_gpipe.runtime.meeting import meet

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
