"""The plan of divided layers: what one rank has and computes, and what the ranks of a worker sum up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import UserError
from hf_gpipe.partition.cluster import Level, parse_cluster
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.costs.model_costs import ModelCosts, SumBeside, SumsOverRanks
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.machines.devices import DEVICES
from hf_gpipe.planner.workload import Workload
from hf_gpipe.settings.division import Division
from tests.planner.models import planner, settings
from tests.versions import OF_POSITIONS

WIDTH, ROWS, TOKENS, VOCABULARY = 64, 3, 16, 101


def costs(size: int) -> ModelCosts:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=False)
    adapter = adapter_for(config, torch.float32, "sdpa")
    tracer = LayerTracer(adapter, as_on_gpu=True, division=Division(size))
    return tracer.costs(Workload(ROWS, TOKENS, TOKENS, has_padding=False))


def test_a_rank_has_its_part_of_weights_operations_and_activations() -> None:
    whole, half = costs(1), costs(2)
    block, own = whole.layers[1], half.layers[1]
    norms = 2 * WIDTH
    assert own.parameters.count - norms == (block.parameters.count - norms) // 2
    assert own.parameters.trainable_count == own.parameters.count, "all of them are trained"
    assert own.forward.flops == pytest.approx(block.forward.flops // 2, rel=OF_POSITIONS)
    assert own.plain.saved_bytes < 0.75 * block.plain.saved_bytes
    assert half.layers[-1].parameters.count == 51 * WIDTH, "the longest part of the vocabulary"


def test_a_plan_has_the_gradients_and_optimizer_state_of_a_rank() -> None:
    found = costs(2)
    plan = planner(found, optim="adamw_torch").plan(settings((5,), schedule="1f1b"))
    num_bytes = sum(layer.parameters.num_bytes for layer in found.layers)
    assert plan.processes[0].memory.gradients == num_bytes
    assert plan.processes[0].memory.optimizer == pytest.approx(2 * num_bytes, rel=1e-3)


def test_a_block_has_two_sums_forward_and_two_backward() -> None:
    hidden = ROWS * TOKENS * WIDTH * 4
    layers = costs(2).layers
    assert layers[1].forward.sums == layers[1].backward.sums == SumsOverRanks(2, 2 * hidden, 2)
    assert layers[0].forward.sums == SumsOverRanks(1, hidden, 2)
    assert all(layer.forward.sums == layer.backward.sums == SumsOverRanks() for layer in costs(1).layers)
    # A ring of 4: 6 rounds, each with a quarter of the bytes.
    assert SumsOverRanks(2, 4000, 4).seconds(Level(2, 1000.0, 0.5)) == pytest.approx(6 * (2 * 0.5 + 1.0))


def test_the_sums_of_a_backward_run_beside_the_products_of_weights() -> None:
    """Of queries, keys and values, and of gate and up; no product is beside a sum in a split backward."""
    found, tokens, hidden = costs(2), ROWS * TOKENS, ROWS * TOKENS * WIDTH * 4
    feed_forward, attention = found.layers[1].sums_beside
    one = SumsOverRanks(1, hidden, 2)
    assert feed_forward == SumBeside(one, 2 * tokens * WIDTH * 2 * (128 // 2))
    assert attention == SumBeside(one, 2 * tokens * WIDTH * (WIDTH + 2 * WIDTH // 2) // 2)
    assert not costs(1).layers[1].sums_beside

    sums = SumsOverRanks(2, 2 * hidden, 2)
    alone = replace(found, layers=tuple(replace(one, sums_beside=()) for one in found.layers))

    def hidden_seconds(rate: float) -> float:
        link = Level(2, rate, 0.0)
        beside, apart = (StageCosts(one, DEVICES["h100"], link) for one in (found, alone))
        is_hidden = apart.seconds(1, 2, "none").backward - beside.seconds(1, 2, "none").backward
        assert is_hidden == pytest.approx(beside.hidden_seconds(1, 2), rel=1e-6)
        return is_hidden

    assert hidden_seconds(1e15) == pytest.approx(sums.seconds(Level(2, 1e15, 0.0)), rel=1e-3), "all of them"
    assert 0 < hidden_seconds(1e3) == pytest.approx(hidden_seconds(1e2), rel=1e-6), "as long as the products take"


def test_workers_share_the_links_between_machines() -> None:
    cluster = Division(2).cluster_of(parse_cluster("2x4@1GB/s,100GB/s"))
    assert str(cluster) == "2x2"
    assert [level.bytes_per_second for level in cluster.levels] == [100e9, 0.5e9]
    with pytest.raises(UserError, match="tensor_parallel is 8 and 4 devices have fast links"):
        Division(8).cluster_of(parse_cluster("2x4@1GB/s,100GB/s"))
