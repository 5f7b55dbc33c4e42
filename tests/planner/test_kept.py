"""A planner traces no layer twice, and the results of operations on fake tensors are cached."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_gpipe import Pipeline
from hf_gpipe.adapters import Adapter, adapter_for
from hf_gpipe.adapters.chain import Chain
from hf_gpipe.adapters.observation import fake_operations
from hf_gpipe.adapters.peft_resolve import resolve_peft
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.tracing import StageTracer
from hf_gpipe.planner.costs.tracker import Tracker
from hf_gpipe.planner.workload import Workload
from tests.image_families import EXACT, classifier
from tests.oracle import tiny_config

WORKLOAD = Workload(rows=3, source_tokens=6, target_tokens=5)
ENTRIES = ("pixel_values", (3, 32, 32), "float32"), ("labels", (), "int64")
IMAGES = Workload(2, 1, 1, has_padding=False, entries=ENTRIES)


def llama(**values: Any) -> Any:
    config = tiny_config("llama")
    for name, value in values.items():
        setattr(config, name, value)
    return config


def with_lora(rank: int, **options: Any) -> Adapter:
    adapter = adapter_for(llama())
    resolve_peft(adapter, "default", LoraConfig(r=rank, target_modules=["q_proj"], **options), is_new=True)
    return adapter


def of_images(family: str) -> Chain:
    return Chain(classifier(family, EXACT[family]).float(), IMAGES.shapes)


def test_another_plan_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of the run uses the traces of the decision, also for another mini-batch of the same shape."""
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.long), "labels": torch.ones(4, 6, dtype=torch.long)}
    pipe = Pipeline(llama(), 2, 2, recompute="auto", example=batch)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it is traced again")

    monkeypatch.setattr(StageTracer, "_run", fail)
    assert pipe.plan(batch).step_seconds == pipe.plan().step_seconds
    with pytest.raises(AssertionError, match="traced again"):
        pipe.plan({name: tensor[:, :5] for name, tensor in batch.items()})


@pytest.mark.parametrize("family", ["bart", "ResNet"])
def test_known_operations_are_those_that_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last byte and operation."""
    adapter, workload = (of_images(family), IMAGES) if family in EXACT else (adapter_for(tiny_config(family)), WORKLOAD)
    found = []

    def each_runs(function: Any, args: Any, kwargs: Any, derive: Any = None) -> tuple[Any, Any]:
        result = function(*args, **kwargs)
        return result, derive and derive(function, args, kwargs, result)

    for run in (fake_operations.run, each_runs):
        monkeypatch.setattr(fake_operations, "run", run)
        found.append([LayerTracer(adapter, as_on_gpu=as_on_gpu).costs(workload) for as_on_gpu in (False, True)])
    assert found[0] == found[1]


def test_a_tensor_that_is_read_twice_is_moved_once() -> None:
    """Also where the same operation on two tensors of this form is known."""
    moved = []
    with FakeTensorMode():
        one, other = torch.empty(2, 8), torch.empty(2, 8)
        with Tracker() as tracker:
            for second in (other, one, other):
                with tracker.phase() as phase:
                    one * second
                moved.append(phase.moved)
    assert moved == [3 * one.nbytes, 2 * one.nbytes, 3 * one.nbytes]
