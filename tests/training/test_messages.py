"""What the processes of a training tell each other in a step, besides the tensors between stages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_gpipe.errors import DataError, NonFiniteError, PeerError
from hf_gpipe.job.world import World
from hf_gpipe.runtime.batches import Batches, shared_stream
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, Recorder, trainer, weights

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "all_gather", "send", "recv", "barrier")


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


class _Alone(TrainerCallback):
    """Process 1 ends its third update after process 0 has begun its fourth step, and asks for things alone."""

    def __init__(self, folder: Path) -> None:
        self._begun, self._saved = folder / "begun", folder / "checkpoint-6"

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 3:
            self._begun.touch()
        # That a checkpoint is written is a request of all processes, which must not come with that of one alone.
        end = time.monotonic() + 60
        while state.global_step == 8 and not self._saved.exists():
            assert time.monotonic() < end, "the checkpoint is not written"
            time.sleep(0.01)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end = time.monotonic() + 20
        while not state.is_world_process_zero and state.global_step == 2 and not self._begun.exists():
            assert time.monotonic() < end, "process 0 waits for the update of process 1"
            time.sleep(0.01)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            control.should_save = state.global_step == 5
            control.should_training_stop = state.global_step == 11


class _Poison(TrainerCallback):
    """The last stage's weights are not numbers any more before the fourth step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 3 and not state.is_world_process_zero:
            model.lm_head.weight.data.fill_(math.nan)


def _train_unclipped(folder: Path, num_processes: int) -> tuple[list[Any], dict[str, torch.Tensor], str]:
    options: dict[str, Any] = {"max_steps": 14 if num_processes > 1 else 12, "logging_steps": 4, "max_grad_norm": 0.0}
    options |= {"schedule": "zb_h2", "recompute": "none", "on_nonfinite_loss": "stop"}
    options |= {"train_dataset": CausalRows(24), "lr_scheduler_type": "constant"}
    recorder, config = Recorder(), tiny_config("llama", tied=False)
    made = trainer(folder, model=plain_model(config, dtype=torch.float32), callbacks=[recorder], **options)
    if num_processes > 1:
        made.add_callback(_Alone(folder))
    made.train()
    noted = [(one["loss"], one["grad_norm"]) for one in recorder.logs if "loss" in one]
    trained, message = weights(made), ""
    if num_processes > 1:
        model = plain_model(config, dtype=torch.float32)
        with pytest.raises(NonFiniteError) as caught:
            trainer(folder, model=model, callbacks=[_Poison()], **options | {"logging_steps": 20}).train()
        message = str(caught.value)
    return noted, trained, message


def test_no_process_waits_for_the_updates_of_others_where_nothing_clips(tmp_path: Path) -> None:
    (expected, plain, _), *found = _train_unclipped(tmp_path / "one", 1), *run_gloo(_train_unclipped, 2, tmp_path, 2)
    for noted, trained, message in found:
        np.testing.assert_allclose(noted, expected, atol=1e-5)
        torch.testing.assert_close(trained, plain, rtol=0, atol=1e-5)
        assert message.startswith("step 4: the loss is nan")
    # Asked for by one process alone, and so met one step later.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]


def _mini_batches(sizes: list[int], fails: bool) -> tuple[list[int], str | None]:
    world = World.current()

    def read() -> Iterator[Batches]:
        for size in sizes:
            yield [{"input_ids": torch.arange(size)[None]}]
        if fails:
            raise DataError("a row cannot be read")

    got = []
    try:
        for (batch,) in shared_stream(read() if world.is_main else None, world):
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
