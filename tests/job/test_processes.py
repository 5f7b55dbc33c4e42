"""The processes of a pipeline talk over groups of their own, whatever the default group of torch.distributed is."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_gpipe import Pipeline
from hf_gpipe.checkpoint import save
from hf_gpipe.errors import UserError
from hf_gpipe.job.job import LAST_MESSAGE_SECONDS, Job
from hf_gpipe.job.world import World
from tests.gloo import NO_CPU, TIMEOUT, run_gloo
from tests.oracle import assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config


def _whole_pipeline(folder: str) -> tuple[Any, Any, float]:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1))
    config = tiny_config("llama", tied=True)
    batch = padded_batch(config)
    pipe = Pipeline(plain_model(config), 3, 2, "1f1b")
    result = run_pipeline(pipe, batch if pipe.world.is_main else None)
    ids = pipe.generate(input_ids=batch["input_ids"][:, :4], max_new_tokens=3, do_sample=True)
    pipe.save_pretrained(folder)
    pipe.load_pretrained(folder)
    return result, ids, pipe.eval_step(batch).loss


def test_a_default_group_without_cpu_tensors(tmp_path: Path) -> None:
    """`init_process_group("nccl")` is the usual first line of a script."""
    config = tiny_config("llama", tied=True)
    plain, batch = plain_model(config), padded_batch(config)
    expected = run_plain(plain, batch, 2)
    found = run_gloo(_whole_pipeline, 2, str(tmp_path), backend=NO_CPU)
    for result, ids, loss in found:
        assert_same(result, expected)
        assert torch.equal(ids, found[0][1])
        assert loss == pytest.approx(expected.loss, rel=1e-10)


def _messages() -> tuple[Any, ...]:
    world = World.current()
    rank, other = world.rank, 1 - world.rank
    tensor = torch.tensor([float(rank)])
    world.broadcast(tensor, 1)
    # Messages of the user's on the default group come between ours in a different order on each process.
    theirs = torch.tensor([float(rank)])
    work = dist.broadcast(theirs, src=0, async_op=True) if rank == 0 else None
    total = world.all_reduce(torch.tensor([rank + 1]), dist.ReduceOp.MAX)
    objects = world.gather_objects({"rank": rank})
    if rank == 1:
        work = dist.broadcast(theirs, src=0, async_op=True)
    assert work is not None
    work.wait()
    with pytest.raises(UserError, match="of the main process"):
        world.from_main(lambda: _fail("of the main process"))
    group = world.group_on(tensor.device)
    limit = group._get_backend(tensor.device).options._timeout
    assert world.group_on(tensor.device) is group
    return tensor.item(), theirs.item(), total.item(), objects, world.broadcast_value(other, 0), limit


def _fail(message: str) -> None:
    raise UserError(message)


def test_messages_between_processes() -> None:
    for found in run_gloo(_messages, 2):
        assert found == (1.0, 0.0, 2, [{"rank": 0}, {"rank": 1}], 1, TIMEOUT)


def _write_slowly(folder: str) -> None:
    Job.current().timeout = timedelta(seconds=3)
    world = World.current()
    with (
        patch.object(save, "_sync", lambda *paths: time.sleep(4)),
        save.written_whole(Path(folder) / "saved", world) as temporary,
    ):
        (temporary / str(world.rank)).touch()


def test_a_disk_may_be_slower_than_messages(tmp_path: Path) -> None:
    run_gloo(_write_slowly, 2, str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["0", "1"]


def _rejoin(folder: str) -> list[list[int]]:
    gathered = []
    for attempt in range(2):
        rank = dist.get_rank()
        gathered.append(World.current().gather_objects(rank))
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{attempt}", 2)
        dist.init_process_group("gloo", store=store, rank=1 - rank, world_size=2, timeout=timedelta(seconds=30))
    return gathered


def test_a_second_default_group(tmp_path: Path) -> None:
    """Groups of an ended job are not used in the next one, in which a process may have another rank."""
    assert run_gloo(_rejoin, 2, str(tmp_path)) == [[[0, 1], [0, 1]]] * 2


def test_one_process_needs_no_group() -> None:
    world = World.current()
    value = torch.ones(2)
    world.barrier()
    assert world.broadcast(value, 0) is None
    assert world.all_reduce(value) is value
    assert world.gather_objects("a") == ["a"]
    assert world.broadcast_value("a", 0) == "a"
    assert world.is_main
    assert Job.current()._common_groups == {}


ENDS = """
import subprocess
import sys
import time
import torch.distributed as dist
from hf_gpipe.job.job import LAST_MESSAGE_SECONDS, Job
time.sleep = lambda seconds: print("waited", seconds)
dist.init_process_group("gloo", "file://STORE", rank=0, world_size=1)
for _ in range(2):
    Job.current().new_group([0], "gloo")
"""


def test_a_process_that_has_sent_messages_waits_once_before_it_ends(tmp_path: Path) -> None:
    words = [sys.executable, "-c", ENDS.replace("STORE", str(tmp_path / "store"))]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stdout == f"waited {LAST_MESSAGE_SECONDS}\n"
