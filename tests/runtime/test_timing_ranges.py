"""Each action has a range of its name while one of torch's profilers records, and none otherwise."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.runtime import timing
from tests.oracle import padded_batch, plain_model, tiny_config


def test_actions_are_named_in_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipeline(plain_model(tiny_config("llama")), num_stages=2, num_micro_batches=2, device="cpu")
    batch = padded_batch(pipe.adapter.config)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        pipe.train_step(batch)
    events = [event for event in recorded.events() if event.name in {"0F1", "1B0"}]
    assert sorted(event.name for event in events) == ["0F1", "1B0"]
    assert all(event.cpu_children for event in events), "the operations of an action lie inside its range"
    monkeypatch.setattr(timing.NamedRanges, "mark", None)
    pipe.train_step(batch)
