"""Traces are kept where the same would be found again, and nowhere else; operations on fake tensors likewise."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from hf_gpipe import Pipeline
from hf_gpipe.adapters import Adapter, Autocast, adapter_for
from hf_gpipe.adapters.chain import Chain
from hf_gpipe.adapters.observation import fake_operations
from hf_gpipe.adapters.peft_resolve import resolve_peft
from hf_gpipe.losses.custom import LogitsLoss
from hf_gpipe.losses.loss import PLAIN, TokenLoss
from hf_gpipe.planner.costs import kept
from hf_gpipe.planner.costs.kept import identity_of
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


class OwnLoss(TokenLoss):
    """A user's."""


def value_of(logits: Any, labels: Any) -> Any:
    """A user's function."""
    return logits.sum()


def test_what_a_trace_reads_is_told_apart() -> None:
    bfloat16 = Autocast(torch.bfloat16, torch.device("cpu"))
    models: list[Any] = [
        lambda: adapter_for(llama()),
        lambda: adapter_for(llama(hidden_act="gelu")),
        lambda: adapter_for(llama(attention_dropout=0.1)),
        lambda: adapter_for(llama(), torch.bfloat16),
        lambda: adapter_for(llama(), None, "eager"),
        lambda: adapter_for(llama(), autocast=bfloat16),
        lambda: with_lora(2),
        lambda: with_lora(3),
        lambda: with_lora(2, lora_dropout=0.1),
        lambda: of_images("ResNet"),
        lambda: of_images("ViT"),
    ]
    found = [identity_of(make(), PLAIN) for make in models]
    assert found == [identity_of(make(), PLAIN) for make in models], "the same of models that are made alike"
    assert None not in found
    adapter, losses = adapter_for(llama()), [PLAIN, TokenLoss(label_smoothing=0.1), TokenLoss(logit_clipping=2.0)]
    found += [identity_of(adapter, loss) for loss in losses[1:]] + [identity_of(adapter, PLAIN, 2)]
    for scope in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16)):
        with scope:
            found.append(identity_of(adapter, PLAIN))
    assert len(set(found)) == len(found)


def test_what_a_user_wrote_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may read anything. And a function of transformers that a program exchanges is another one."""

    class Own(nn.Linear):
        pass

    own: list[Any] = [OwnLoss(), LogitsLoss(value_of), Chain(nn.Sequential(Own(2, 2), nn.Linear(2, 2))), lambda: 0]
    assert [identity_of(one) for one in own] == [None] * 4
    assert identity_of(Chain(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) is not None
    wrapping = nn.Linear(2, 2)
    wrapping.forward = functools.wraps(nn.Linear.forward)(lambda *args: args)  # type: ignore[method-assign]
    assert identity_of(wrapping) is None
    before = identity_of(adapter_for(llama()))
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "own", value_of)
        assert identity_of(adapter_for(llama())) is None
    for target, name in ((modeling_llama, "apply_rotary_pos_emb"), (modeling_llama.LlamaMLP, "forward")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, lambda *args: args)
            assert identity_of(adapter_for(llama())) not in (before, None)
    assert identity_of(adapter_for(llama())) == before


def test_another_plan_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline what was traced to decide tells its plan, and of the next one both."""
    inputs = {"loss": PLAIN, "as_on_gpu": True}
    first = LayerTracer(adapter_for(llama()), **inputs).costs(WORKLOAD)
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.long), "labels": torch.ones(4, 6, dtype=torch.long)}
    pipe = Pipeline(llama(), 2, 2, example=batch)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it is traced again")

    monkeypatch.setattr(StageTracer, "_run", fail)
    assert LayerTracer(adapter_for(llama()), **inputs).costs(WORKLOAD) == first
    assert Pipeline(llama(), 2, 2, example=batch).plan().step_seconds == pipe.plan().step_seconds
    with pytest.raises(AssertionError, match="traced again"):
        LayerTracer(adapter_for(llama()), **inputs).costs(replace(WORKLOAD, target_tokens=7))
    with pytest.raises(AssertionError, match="traced again"):
        LayerTracer(adapter_for(llama()), loss=OwnLoss(), as_on_gpu=True).costs(WORKLOAD)


@pytest.mark.parametrize("family", ["bart", "ResNet"])
def test_known_operations_are_those_that_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last byte and operation."""
    adapter, workload = (of_images(family), IMAGES) if family in EXACT else (adapter_for(tiny_config(family)), WORKLOAD)
    found = []

    def each_runs(function: Any, args: Any, kwargs: Any, derive: Any = None) -> tuple[Any, Any]:
        result = function(*args, **kwargs)
        return result, derive and derive(function, args, kwargs, result)

    for run in (fake_operations.run, each_runs):
        monkeypatch.setattr(kept, "_kept", kept.OrderedDict())
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


def test_the_least_recently_planned_models_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST_MODELS", 2)
    monkeypatch.setattr(kept, "_kept", kept.OrderedDict())
    first = kept.kept_for(1)
    first["a trace"] = 1
    for number in (2, 1, 3):
        kept.kept_for(number)
    assert kept.kept_for(1) is first
    assert len(kept._kept) == 2
    assert kept.kept_for(lambda: 0) is not kept.kept_for(lambda: 0)
