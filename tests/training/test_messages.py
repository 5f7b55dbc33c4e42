"""What the processes of a training tell each other in a step, besides the tensors between stages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_gpipe.errors import DataError, PeerError
from hf_gpipe.runtime.batches import Batches, shared_stream
from hf_gpipe.runtime.processes import Processes
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, trainer

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather_object", "broadcast_object_list", "barrier")


class Counter(TrainerCallback):
    """Notes at the beginning of each step which collectives came before it."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.before_step: list[int] = []
        for name in COLLECTIVES:
            setattr(dist, name, self._counting(name, getattr(dist, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            return function(*args, **kwargs)

        return call

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before_step.append(len(self.called))


def _collectives_of_a_step(folder: Path) -> list[list[str]]:
    counter = Counter()
    model = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    options: dict[str, Any] = {"max_steps": 5, "logging_steps": 5, "save_strategy": "no"}
    trainer(folder, model=model, train_dataset=CausalRows(24), callbacks=[counter], **options).train()
    return [counter.called[start:stop] for start, stop in pairwise(counter.before_step[1:])]


def test_the_collectives_of_a_step(tmp_path: Path) -> None:
    """Loss and norm before the update, what callbacks ask for after it, and a later mini-batch."""
    for steps in run_gloo(_collectives_of_a_step, 2, tmp_path):
        assert steps == [["all_reduce", "all_reduce", "broadcast"]] * 3


def _mini_batches(sizes: list[int], fails: bool) -> tuple[list[int], str | None]:
    processes = Processes.of_job()

    def read() -> Iterator[Batches]:
        for size in sizes:
            yield [{"input_ids": torch.arange(size)[None]}]
        if fails:
            raise DataError("a row cannot be read")

    got = []
    try:
        for (batch,) in shared_stream(read() if processes.is_reader else None, processes):
            assert torch.equal(batch["input_ids"], torch.arange(batch["input_ids"].numel())[None])
            got.append(batch["input_ids"].numel())
    except (DataError, PeerError) as error:
        return got, type(error).__name__
    return got, None


@pytest.mark.parametrize("fails", [False, True])
def test_mini_batches_of_any_size(fails: bool) -> None:
    """Also longer than the room in the messages before."""
    sizes = [3, 20_000, 5, 9_000, 50_000, 1]
    ends = ("DataError", "PeerError") if fails else (None, None)
    assert run_gloo(_mini_batches, 2, sizes, fails) == [(sizes, end) for end in ends]
