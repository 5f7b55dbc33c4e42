"""A trainer may leave M, schedule, recomputation and partition to the planner, which looks at the rows' lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_gpipe import PipelineTrainer
from hf_gpipe.errors import UserError
from hf_gpipe.planner.workload import Workload
from hf_gpipe.training.longest import longest_mini_batch
from tests.oracle import tiny_config
from tests.training.toy import Rows, Stream, arguments


def test_the_longest_rows_are_planned_for() -> None:
    rows = Rows(50)
    longest = max(len(row) for row in rows.rows)
    assert longest_mini_batch(rows, 8) == Workload(8, longest, longest + 1)
    assert longest_mini_batch([{"input_ids": [1, 2, 3]}], 4) == Workload(4, 3, 3)
    sorted_rows = longest_mini_batch(rows, 8, batch_tokens=100, by_length=True)
    assert sorted_rows == Workload(-(-100 // (longest + 1)), longest, longest + 1)
    mean = sum(len(row["labels"]) for row in rows) // len(rows)
    assert mean < longest
    assert longest_mini_batch(rows, 8, batch_tokens=100) == Workload(-(-100 // mean), longest, longest + 1)
    masked = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}]
    assert longest_mini_batch(masked, 4, batch_tokens=9) == Workload(5, 4, 4)
    for unknown in (Stream(), [], ["text"], None):
        assert longest_mini_batch(unknown, 8) is None


def test_what_is_auto_is_settled(tmp_path: Path) -> None:
    chosen = {"num_micro_batches": "auto", "schedule": "auto", "recompute": "auto", "partition": "auto"}
    args = arguments(tmp_path, num_stages=2, memory="1GiB", max_steps=1, **chosen)
    trainer = PipelineTrainer(tiny_config("marian"), args, train_dataset=Rows())
    assert isinstance(trainer.pipe.num_micro_batches, int)
    assert trainer.pipe.recompute == "none", "1 GiB is more than enough"
    with pytest.raises(UserError, match="give example="):
        PipelineTrainer(tiny_config("marian"), args, train_dataset=Stream())
