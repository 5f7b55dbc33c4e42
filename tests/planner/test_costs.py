"""The costs of layers: parameters as a real Pipeline holds them, memory as real and fake stages keep it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from hf_gpipe import Pipeline
from hf_gpipe.adapters import Adapter, adapter_for
from hf_gpipe.adapters.modules.autocast import Autocast, keeping_weights
from hf_gpipe.adapters.observation.tiny import BLOCK_COUNTS, tiny_config
from hf_gpipe.adapters.peft_resolve import resolve_peft
from hf_gpipe.model.assembly import assemble
from hf_gpipe.planner.costs import layers as planner_layers
from hf_gpipe.planner.costs.layers import LayerTracer, ModelLayers, by_rows, to_run
from hf_gpipe.planner.costs.model_costs import InnerRecompute, ModelCosts
from hf_gpipe.planner.costs.stage_costs import StageCosts
from hf_gpipe.planner.costs.tracing import StageTracer, Trace
from hf_gpipe.planner.costs.tracker import Tracker
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime.memory import peak_memory_bytes, reset_peak_memory
from hf_gpipe.runtime.micro_batch import Context, on_devices
from hf_gpipe.runtime.stage import Stage
from scripts.families import default_config
from tests.planner.models import DEVICE
from tests.versions import OF_POSITIONS

WORKLOAD = Workload(rows=3, source_tokens=12, target_tokens=10)
FAMILIES = ("llama", "gpt2", "mistral", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "t5", "mt5", "bart", "mbart")
FAMILIES += ("m2m_100", "marian", "pegasus")


def clone(family: str) -> PreTrainedConfig:
    """A tiny configuration of a family, without layers that are left out at random."""
    config = default_config(family)
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return tiny_config(config)


def costs_of(config: PreTrainedConfig) -> ModelCosts:
    return LayerTracer(adapter_for(config)).costs(WORKLOAD)


def short(family: str) -> PreTrainedConfig:
    """A clone with two blocks in each stack."""
    config = clone(family)
    for name in BLOCK_COUNTS:
        if isinstance(vars(config).get(name), int):
            setattr(config, name, 2)
    return config


@cache
def costs_of_short(family: str) -> ModelCosts:
    return costs_of(short(family))


def numbers(parameters: dict[str, torch.nn.Parameter]) -> tuple[int, int, int]:
    """Count, bytes and trainable bytes."""
    trainable = sum(p.nbytes for p in parameters.values() if p.requires_grad)
    return sum(p.numel() for p in parameters.values()), sum(p.nbytes for p in parameters.values()), trainable


@pytest.fixture
def without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs have the layers' parameters, and zeros of what is found by running them."""
    needed = [name for name in Trace._fields if name not in Trace._field_defaults]
    numbers: dict[str, Any] = {name: (0,) if name.endswith("levels") else 0 for name in needed}
    nothing = Trace(**numbers)
    monkeypatch.setattr(StageTracer, "trace", lambda stage, inputs: nothing)
    monkeypatch.setattr(StageTracer, "saved_bytes", lambda stage, inputs, first_layer: (0, 0))


@pytest.mark.usefixtures("without_running")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_holds_and_owns_what_a_pipelines_does(family: str) -> None:
    config = clone(family)
    costs = costs_of(config)
    sums = StageCosts(costs, DEVICE)
    for num_stages in (1, 3):
        pipe = Pipeline(config, num_stages, seed=0, device="cpu")
        for stage, model in pipe.models.items():
            layers = pipe.partition[stage]
            held, owned = sums.held(layers[0], layers[-1] + 1), sums.owned(layers[0], layers[-1] + 1)
            assert (held.count, held.num_bytes, held.trainable_bytes) == numbers(model.parameters)
            own = {name: p for name, p in model.parameters.items() if pipe.ties.owner_stage[name] == stage}
            assert (owned.count, owned.num_bytes, owned.trainable_bytes) == numbers(own)
        whole = dict(pipe.named_parameters())
        together = sums.held_by((layers[0], layers[-1] + 1) for layers in pipe.partition)
        assert costs.total == together
        assert (together.count, together.num_bytes, together.trainable_bytes) == numbers(whole)


def trace(costs_family: PreTrainedConfig, start: int, stop: int, inner: InnerRecompute, *, is_real: bool) -> Trace:
    """A whole stage at once, on fake tensors or in earnest."""
    adapter = adapter_for(costs_family)
    wants_gradient, recompute_blocks = ModelLayers(adapter).wants_gradient, inner == "block"
    tracer = StageTracer(
        adapter, range(start, stop), wants_gradient, recompute_blocks=recompute_blocks, is_real=is_real
    )
    return tracer.trace(WORKLOAD.micro_batch(adapter))


@pytest.mark.parametrize("inner", ["none", "block"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "t5", "bart"])
def test_a_stage_keeps_what_its_layers_keep_together(family: str, inner: InnerRecompute) -> None:
    config, costs = short(family), costs_of_short(family)
    num_layers, graphs = len(costs.layers), StageCosts(costs, DEVICE).graphs[inner]
    for start, stop in ((0, num_layers), (2, num_layers - 1) if inner == "none" else (num_layers // 2, num_layers)):
        found = trace(config, start, stop, inner, is_real=False)
        assert graphs.kept_bytes(start, stop) == pytest.approx(found.saved, rel=0.01)
        peak = graphs.backward_peak_bytes(start, stop)
        # The sum has two tensors of hidden states more in the last decoder block, where the peak of such a clone is.
        assert peak == pytest.approx(found.saved + max(found.backward_levels), rel=0.07)


@pytest.mark.parametrize("family", ["gpt2", "bart"])
def test_the_gradient_of_a_tied_table_waits_for_that_of_another_embedding(family: str) -> None:
    """Measured: resident memory of a stage with all layers, whose table is larger than all else. It was one table more
    than predicted where two embeddings use it; the head adds to the gradient at once.
    """
    config, cpu = clone(family), torch.device("cpu")
    config.vocab_size = 300_000  # larger than what the allocator keeps
    adapter, workload = adapter_for(config), Workload(rows=1, source_tokens=3, target_tokens=3)
    costs = LayerTracer(adapter).costs(workload)
    predicted = StageCosts(costs, DEVICE).graphs["none"].backward_peak_bytes(0, len(costs.layers))
    stage = Stage(assemble(adapter, range(len(costs.layers)), None, cpu), ModelLayers(adapter).wants_gradient)
    micro_batch = on_devices([workload.micro_batch(adapter)], [cpu])[cpu][0]
    for _ in range(2):  # the first backward makes the gradients
        before = reset_peak_memory([cpu])
        stage.forward(Context(micro_batch, {}), keep_graph=True)
        stage.backward(0, {})
    table = max(one.size.trainable_bytes for layer in costs.layers for one in layer.shared)
    assert peak_memory_bytes([cpu]) - before == pytest.approx(predicted, abs=0.4 * table)


@pytest.mark.parametrize("inner", ["none", "block"])
@pytest.mark.parametrize("family", ["llama", "t5", "bart"])
def test_sums_of_any_run_of_layers_are_those_added_up_one_by_one(family: str, inner: InnerRecompute) -> None:
    """As the top of stage_costs.py defines them: masks once a stack, and the first layer's input is the stage's."""
    costs = costs_of_short(family)
    layers, graphs = costs.layers, StageCosts(costs, DEVICE).graphs[inner]
    for start, stop in combinations(range(len(layers) + 1), 2):
        own = layers[start:stop]
        stacks = {layer.stack: 0 for layer in own}
        for layer in own:
            stacks[layer.stack] = max(stacks[layer.stack], layer.graph(inner).stage_saved_bytes)
        kept, gradients = sum(stacks.values()), sum(layer.parameters.trainable_bytes for layer in own)
        forward, backward, first_backward = [], [], []
        for index, layer in enumerate(own):
            kept += layer.graph(inner).saved_input_bytes if index else 0
            forward.append(kept + layer.forward_working_bytes)
            kept += layer.graph(inner).saved_bytes
            backward.append(kept + layer.graph(inner).backward_working_bytes)
            first_backward.append(backward[-1] + gradients)
            gradients -= layer.parameters.trainable_bytes
            # A tied weight's gradient waits from the last layer that uses it to the first one.
            later = [one for one in own[index + 1 :] if one.kind != "head"]  # the head adds to it at once
            for tie in {one.name: one for layer in later for one in layer.shared}.values():
                if any(one.name == tie.name for layer in own[: index + 1] for one in layer.shared):
                    backward[-1] += tie.size.trainable_bytes
                    first_backward[-1] += tie.size.trainable_bytes
        assert graphs.kept_bytes(start, stop) == kept
        assert graphs.forward_peak_bytes(start, stop) == max(forward)
        assert graphs.backward_peak_bytes(start, stop) == max(backward)
        assert graphs.first_backward_peak_bytes(start, stop) == max(first_backward)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_fake_tensors_keep_what_real_ones_do(family: str) -> None:
    config = clone(family)
    config.pad_token_id = 0
    num_layers = len(adapter_for(config).layers)
    for layers in ((1, 3), (num_layers - 2, num_layers)):
        fake, real = (trace(config, *layers, "none", is_real=is_real) for is_real in (False, True))
        assert fake.saved == pytest.approx(real.saved, rel=0.02)
        assert fake.forward.flops == real.forward.flops
        assert fake.backward.flops == real.backward.flops
        assert (fake.forward.calls, fake.backward.calls) == (real.forward.calls, real.backward.calls)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_few_numbers_of_rows_tell_the_others(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last byte. Of layers that do not depend on values three sizes are traced."""
    adapter, trace, counts = adapter_for(clone(family)), StageTracer.trace, dict[int, int]()
    runs: list[StageTracer] = []

    def counted(stage: StageTracer, inputs: Mapping[str, torch.Tensor]) -> Trace:
        runs.append(stage)
        return trace(stage, inputs)

    monkeypatch.setattr(StageTracer, "trace", counted)
    tracer = LayerTracer(adapter)
    for rows in (24, 12, 6, 5, 1):
        runs.clear()
        found = tracer.costs(replace(WORKLOAD, rows=rows))
        counts[rows] = len(runs)
        if rows in (5, 1):
            assert found == LayerTracer(adapter).costs(replace(WORKLOAD, rows=rows))
    if family != "mixtral":
        assert counts[6] == counts[5] == 1, "the head"
        assert counts[1] == counts[24] >= 5


def test_what_lies_on_no_line_is_computed() -> None:
    def largest(rows: int) -> tuple[int, tuple[int, int]]:
        return 3, (10 * rows, max(100, 20 * rows))

    asked: list[int] = []

    def compute(rows: int) -> tuple[int, tuple[int, int]]:
        asked.append(rows)
        return largest(rows)

    bent, straight = by_rows(compute, lambda: True), by_rows(lambda rows: (rows, 7 - rows), lambda: True)
    for rows in (20, 12, 8, 4, 3):
        assert bent(rows) == largest(rows)
        assert straight(rows) == (rows, 7 - rows)
    assert asked == [20, 2, 12, 8, 4, 3]


def test_calls_of_a_block_do_not_depend_on_its_rows() -> None:
    costs = costs_of_short("llama")
    block = costs.layers[1]
    seven_linears, attention = 7, 1
    assert seven_linears + attention < block.forward.calls < 60
    assert 2 * seven_linears + attention < block.backward.calls < 120
    assert block.outside.calls > 0, "a stage makes its mask and its rotary tables"
    assert costs.layers[2].forward.calls == block.forward.calls


def test_flops_of_a_block_and_of_the_head() -> None:
    """2 for each weight and token, twice that backward, and attention's two products of T by T for each head."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, pad_token_id=0
    )
    costs = costs_of(config)
    tokens, length, width = WORKLOAD.num_target_tokens, WORKLOAD.target_tokens, 32
    block, head = costs.layers[1], costs.layers[-1]
    attention = 2 * 2 * WORKLOAD.rows * length * length * width
    products = 2 * tokens * (4 * width * width + 3 * width * 64)
    assert block.forward.flops == pytest.approx(products + attention, rel=OF_POSITIONS)
    assert block.weight_flops == products
    assert head.weight_flops == 0
    assert block.backward.flops == 2 * products + 2.5 * attention  # flash attention makes the scores again
    assert head.backward.flops == 6 * tokens * width * 50, "all of it is in the backward"
    assert head.forward.flops <= OF_POSITIONS * head.backward.flops


def test_boundaries_are_what_crosses() -> None:
    costs = costs_of_short("bart")
    source, target = 3 * 12 * 32 * 4, 3 * 10 * 32 * 4
    by_kind = {(layer.stack, layer.kind): layer.input_bytes for layer in costs.layers}
    assert costs.layers[0].input_bytes == 0
    assert by_kind["encoder", "block"] == source
    assert by_kind["decoder", "embedding"] == source
    assert by_kind["decoder", "block"] == source + target
    assert by_kind["decoder", "head"] == target
    assert all(layer.gradient_input_bytes == layer.input_bytes for layer in costs.layers)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_short_model_tells_all_of_a_long_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = clone(family)
    for name in BLOCK_COUNTS:
        if isinstance(vars(config).get(name), int):
            setattr(config, name, 5)
    adapter = adapter_for(config)
    monkeypatch.setattr(planner_layers, "FEW_BLOCKS", 3)
    few, representative = to_run(ModelLayers(adapter))
    assert len(few.adapter.layers) < len(representative) == len(adapter.layers)
    short = LayerTracer(adapter).costs(WORKLOAD)
    monkeypatch.setattr(planner_layers, "FEW_BLOCKS", 99)
    assert to_run(ModelLayers(adapter))[0].adapter is adapter
    assert short == LayerTracer(adapter).costs(WORKLOAD)


def test_a_class_of_layers_that_a_short_model_lacks_is_run_in_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the second kind begin after those that the short model has."""
    config = clone("gemma3_text")
    config.num_hidden_layers = 4
    config.layer_types = ["full_attention"] * 3 + ["sliding_attention"]
    monkeypatch.setattr(planner_layers, "FEW_BLOCKS", 2)
    adapter = adapter_for(config)
    few, representative = to_run(ModelLayers(adapter))
    assert few.adapter is adapter
    assert representative[1:5] == [1, 1, 1, 4]


def test_blocks_of_two_kinds_are_told_apart() -> None:
    config = clone("gpt_oss")
    adapter = adapter_for(config)
    alike = ModelLayers(adapter).first_alike()
    blocks = [like for like, layer in zip(alike, adapter.layers, strict=True) if layer.kind == "block"]
    expected = [config.layer_types.index(kind) + 1 for kind in config.layer_types]
    assert blocks == expected
    assert len(set(blocks)) == 2


@pytest.mark.usefixtures("without_running")
def test_gpipes_largest_transformer_has_its_parameters() -> None:
    """GPipe, Table 1: 1663 layers, 83.9 billion parameters."""
    config = GPT2Config(
        vocab_size=32000, n_positions=1024, n_embd=2048, n_layer=1663, n_head=32, tie_word_embeddings=False
    )
    costs = LayerTracer(adapter_for(config)).costs(Workload(1, 1024, 1024))
    width = 2048
    blocks = 1663 * (12 * width**2 + 13 * width)
    assert costs.total.count == 2 * 32000 * width + 1024 * width + blocks + 2 * width
    assert len(costs.layers) == 1666


def test_lora_trains_and_returns_only_what_it_must() -> None:
    peft = pytest.importorskip("peft")
    adapter = adapter_for(clone("llama"))
    resolve_peft(adapter, "default", peft.LoraConfig(target_modules=["q_proj"], r=2))
    costs = LayerTracer(adapter).costs(WORKLOAD)
    assert 0 < costs.total.trainable_count == 4 * 2 * (32 + 32)
    # Below the first adapted block nothing wants a gradient.
    assert costs.layers[1].gradient_input_bytes == 0
    assert costs.layers[2].gradient_input_bytes == costs.layers[2].input_bytes


def autocast_on(device: str) -> Adapter:
    cpu = Autocast(torch.bfloat16, torch.device("cpu"))
    adapter = adapter_for(clone("llama"), autocast=cpu)
    adapter.autocast = replace(cpu, device=torch.device(device))
    return adapter


def test_the_first_block_above_frozen_embeddings_keeps_less() -> None:
    """Its input gets no gradient, so its norm does not keep it in float32."""
    peft = pytest.importorskip("peft")
    adapter = adapter_for(clone("llama"), dtype=torch.bfloat16)
    resolve_peft(adapter, "default", peft.LoraConfig(target_modules=["q_proj"], r=2))
    _, first, second, *_ = LayerTracer(adapter).costs(WORKLOAD).layers
    values = WORKLOAD.rows * WORKLOAD.target_tokens * adapter.config.hidden_size
    assert second.plain.saved_bytes - first.plain.saved_bytes >= 4 * values


def test_autocast_converts_each_weight_once_for_a_step() -> None:
    """Graphs of several micro-batches share the conversions, so no graph counts them; of a GPU they are the same."""
    plain, costs, on_gpu = (
        LayerTracer(adapter).costs(WORKLOAD)
        for adapter in (adapter_for(clone("llama")), autocast_on("cpu"), autocast_on("cuda"))
    )
    for layer, other, of_gpu in zip(plain.layers, costs.layers, on_gpu.layers, strict=True):
        if layer.kind == "block":
            # Norms stay in float32.
            assert 0 < layer.parameters.num_bytes - 2 * other.converted_bytes < 0.02 * layer.parameters.num_bytes
            assert other.plain.saved_bytes < layer.plain.saved_bytes
        assert layer.converted_bytes == 0
        assert of_gpu == other
    # Measured: the first graph of a step comes with the conversions.
    adapter, cpu, layers = autocast_on("cpu"), torch.device("cpu"), range(len(costs.layers))
    stage = Stage(assemble(adapter, layers, None, cpu), ModelLayers(adapter).wants_gradient)
    micro_batch, levels = WORKLOAD.micro_batch(adapter), []
    with keeping_weights(adapter.autocast), Tracker() as tracker:
        for index in range(2):
            stage.forward(Context(replace(micro_batch, index=index), {}), keep_graph=True)
            levels.append(tracker.live_bytes)
    graph = StageCosts(costs, DEVICE).graphs["none"].kept_bytes(0, len(layers))
    assert levels[1] - levels[0] == pytest.approx(graph, rel=0.01)
    assert levels[0] - graph == pytest.approx(sum(layer.converted_bytes for layer in costs.layers), rel=0.01)


def test_a_gpus_attention_keeps_no_dropout() -> None:
    config = clone("bart")
    config.attention_dropout = 0.1
    adapter = adapter_for(config)
    on_cpu, on_gpu = (
        LayerTracer(adapter, as_on_gpu=as_on_gpu).costs(WORKLOAD).layers[1] for as_on_gpu in (False, True)
    )
    assert on_gpu.plain.saved_bytes < on_cpu.plain.saved_bytes
