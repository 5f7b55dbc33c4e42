"""A method that a process calls alone is told by its name."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_gpipe.errors import UserError
from hf_gpipe.job.job import Job
from tests.gloo import run_gloo
from tests.training.toy import trainer


def refused(folder: str) -> list[str]:
    made = trainer(Path(folder))
    made.save_model()
    with pytest.raises(UserError) as other_call:
        made.save_model() if made.world.rank == 0 else made.pipe.save_pretrained(folder)
    if made.world.rank == 1:
        made.world.barrier()
        made.job.calls._end()
        return [str(other_call.value)]
    made.job.timeout = timedelta(seconds=0.5)
    with pytest.raises(UserError) as late:
        made.predict(None)
    made.world.barrier()
    with pytest.raises(UserError) as ended:
        made.evaluate()
    return [str(one.value) for one in (other_call, late, ended)]


def test_a_call_that_one_process_makes_alone(tmp_path: Path) -> None:
    """It waited for messages until their time limit, which a script's trainer sets to half an hour."""
    (first, late, ended), (second,) = run_gloo(refused, 2, str(tmp_path))
    assert first.startswith(
        "process 0 called PipelineTrainer.save_model and process 1 called Pipeline.save_pretrained; "
    )
    assert second.startswith(
        "process 1 called Pipeline.save_pretrained and process 0 called PipelineTrainer.save_model; "
    )
    assert late.startswith("process 0 called PipelineTrainer.predict and process 1 did not within 0.5 seconds; every ")
    assert ended.startswith(
        "process 0 called PipelineTrainer.evaluate and process 1 has ended without that call; every "
    )


def test_a_second_group_has_calls_of_its_own() -> None:
    """In the store of torchrun, which goes on, a process found the calls of an earlier group as those of another."""
    store, job, seen = dist.HashStore(), Job(), []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            own = job.store_of_group()
            seen.append(own.check(["hf_gpipe/calls/1/1"]))
            own.set("hf_gpipe/calls/1/1", "Pipeline.save_pretrained")
            assert job.store_of_group().check(["hf_gpipe/calls/1/1"])
        finally:
            dist.destroy_process_group()
    assert seen == [False, False]
