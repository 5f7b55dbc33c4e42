"""Layers measured on this machine: seconds of every kind, together with other processes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from transformers import LlamaConfig, T5Config

from hf_gpipe.adapters import StageModel, adapter_for
from hf_gpipe.adapters.observation.tiny import tiny_config
from hf_gpipe.checkpoint.stage_weights import initialise
from hf_gpipe.planner.costs import measure
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.measure import profile_layers
from hf_gpipe.planner.costs.model_costs import ModelCosts, Seconds
from hf_gpipe.planner.costs.tracing import context_of
from hf_gpipe.planner.workload import Workload
from scripts.families import default_config
from tests.gloo import run_gloo

CPU = torch.device("cpu")
WORKLOAD = Workload(rows=2, source_tokens=12, target_tokens=12)


def llama(num_blocks: int = 4) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=3000,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=num_blocks,
        num_attention_heads=2,
        pad_token_id=0,
    )


def seconds_of(costs: ModelCosts, index: int) -> Seconds:
    seconds = costs.layers[index].seconds
    assert seconds is not None
    return seconds


def test_every_layer_gets_its_seconds_and_keeps_its_costs() -> None:
    adapter = adapter_for(llama())
    computed, measured = LayerTracer(adapter).costs(WORKLOAD), profile_layers(adapter, WORKLOAD, CPU, repeats=7)
    assert measured.is_measured
    assert not computed.is_measured
    assert measured.update_seconds_per_parameter is None
    blocks = measured.layers[1:5]
    assert len({layer.seconds for layer in blocks}) == 1
    assert all(layer.seconds is not None for layer in measured.layers)
    for one, other in zip(computed.layers, measured.layers, strict=True):
        assert (one.name, one.parameters, one.plain) == (other.name, other.parameters, other.plain)


def test_a_wide_head_takes_longer_than_a_narrow_block() -> None:
    config = llama(2)
    config.vocab_size = 30000
    costs = profile_layers(adapter_for(config), Workload(2, 32, 32), CPU, repeats=3)
    block, head = seconds_of(costs, 1), seconds_of(costs, -1)
    # All of the head is computed in B.
    assert head.backward > block.forward + block.backward


@pytest.mark.parametrize("family", ["t5", "mixtral", "marian"])
def test_other_families(family: str) -> None:
    costs = profile_layers(adapter_for(tiny_config(default_config(family))), WORKLOAD, CPU, repeats=1)
    assert costs.is_measured


def test_the_update_is_measured_and_the_random_numbers_go_on_as_before() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    costs = profile_layers(
        adapter_for(llama(2)),
        WORKLOAD,
        CPU,
        repeats=1,
        make_optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
    )
    assert 0 < (costs.update_seconds_per_parameter or 0) < 1e-4
    assert torch.equal(torch.rand(3), expected)


def _profile() -> ModelCosts:
    return profile_layers(adapter_for(llama(2)), WORKLOAD, CPU, repeats=1, barrier=torch.distributed.barrier)


def test_processes_measure_at_the_same_time() -> None:
    """A barrier that one process calls more often than the other would never return."""
    first, second = run_gloo(_profile, 2)
    assert first.is_measured
    assert second.is_measured
    assert [layer.plain for layer in first.layers] == [layer.plain for layer in second.layers]


def test_a_difference_of_measurements_is_never_negative() -> None:
    assert Seconds(1.0, 2.0, 3.0).less(Seconds(2.0, 1.0, 1.0)) == Seconds(0.0, 1.0, 2.0)


def test_received_tensors_are_not_too_large_for_a_head_whose_weights_are() -> None:
    """With hidden states of N(0, 1), T5's logits would exceed 100: subnormal probabilities, slow to compute with."""
    narrow = {"d_kv": 8, "d_ff": 8, "num_heads": 2, "num_layers": 1, "vocab_size": 100}
    adapter = adapter_for(T5Config(d_model=512, decoder_start_token_id=0, **narrow))
    head = StageModel(adapter, len(adapter.layers) - 1, len(adapter.layers))
    initialise(head, CPU, seed=0)
    carry = context_of(head, WORKLOAD.micro_batch(adapter)).carry
    assert (carry["hidden"] @ head.model.lm_head.weight.T).abs().max() < 10


def test_a_side_of_a_link_that_fails_while_it_is_measured_ends_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other waited for half an hour."""
    sides = iter((1, 2))

    def seconds(call: Callable[[], object], _: torch.device) -> float:
        for _ in range(next(sides)):
            call()
        raise ValueError("this side fails")

    monkeypatch.setattr(measure, "_seconds", seconds)
    monkeypatch.setattr(measure, "_LOOPBACK_LIMIT", timedelta(seconds=1))
    with pytest.raises(ValueError, match="this side fails"):
        measure._loopback(4096)
