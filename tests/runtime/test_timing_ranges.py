"""Each action has a range of its name while one of torch's profilers records, and none otherwise."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe import Pipeline
from hf_gpipe.runtime import timing
from tests.oracle import padded_batch, plain_model, tiny_config


def test_actions_are_named_in_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates too, and those of stages whose number torch could take for the length of a name of C++."""
    pipe = Pipeline(plain_model(tiny_config("llama")), num_stages=3, num_micro_batches=2, device="cpu")
    batch = padded_batch(pipe.adapter.config)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        pipe.train_step(batch)
    events = [event for event in recorded.events() if event.name.startswith("action ")]
    actions = [str(action) for action in pipe.schedule(2).actions[0]]
    assert [event.name for event in events] == [f"action {action}" for action in actions]
    with_operations = {event.name for event in events if event.cpu_children}
    assert with_operations == {f"action {action}" for action in actions if "U" not in action or action == actions[-1]}
    monkeypatch.setattr(timing.NamedRanges, "mark", None)
    pipe.train_step(batch)
