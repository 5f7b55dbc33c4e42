"""Gradients of weights apart from those of inputs (I and W) are those of the backward in one piece (B)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Gemma2Config, GPT2Config, MixtralConfig, PreTrainedConfig, PreTrainedModel, T5Config

from hf_gpipe import Pipeline
from hf_gpipe.adapters.modules.linear import hand_over
from hf_gpipe.adapters.modules.weight_gradients import WeightGradients, kept_bytes
from hf_gpipe.errors import StageError, UserError
from hf_gpipe.planner.costs.layers import LayerTracer
from hf_gpipe.planner.workload import Workload
from hf_gpipe.runtime import replicas
from hf_gpipe.schedule import Action, Placement, Schedule, build, check_table
from hf_gpipe.schedule.kinds import BACKWARD, INPUT, WEIGHT
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, Result, assert_same, padded_batch, plain_model, run_pipeline, run_plain
from tests.oracle import tiny_config as oracle_config
from tests.training.toy import trainer, weights

#: The global gradient norm times this: what another order of summation explains in float64.
TOLERANCE = 1e-14
#: Families that compute in float64 alone.
EXACT = ("llama", "gpt2", "t5", "m2m_100")


def split_table(table: Schedule, delay: int) -> Schedule:
    """The same table with I and W for B. W comes after `delay` more I of its stage, at the latest before G and U."""
    rows = []
    for actions in table.actions:
        row: list[Action] = []
        waiting: dict[int, list[Action]] = {stage: [] for stage in range(table.num_stages)}
        for action in actions:
            own = waiting[action.stage]
            if action.kind == BACKWARD:
                row.append(replace(action, kind=INPUT))
                own.append(replace(action, kind=WEIGHT))
            else:
                if action.micro_batch is None:
                    for own in waiting.values():
                        row += own
                        own.clear()
                row.append(action)
            if len(own) > delay:
                row.append(own.pop(0))
        rows.append(tuple(row))
    found = replace(table, name=f"{table.name}, split", actions=tuple(rows))
    check_table(found)
    return found


def written(folder: Path, num_stages: int, num_micro_batches: int, recompute: Any, delay: int, workers: Any) -> str:
    """The path of a table: 1f1b, its backward in two parts."""
    limits = tuple(None if one in ("none", "block") else one for one in recompute)
    table = build("1f1b", num_stages, num_micro_batches, Placement(workers), limits)
    path = folder / f"{num_stages}-{num_micro_batches}-{delay}.txt"
    path.write_text(split_table(table, delay).text())
    return str(path)


def tiny_config(family: str, *, tied: bool) -> PreTrainedConfig:
    """As `tests.oracle.tiny_config`, for more families."""
    if family in ("llama", "m2m_100"):
        return oracle_config(family, tied=tied)
    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "pad_token_id": 0}
    llama = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    llama |= {"num_key_value_heads": 1, "head_dim": 8}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "decoder_start_token_id": 0}
    if family == "mixtral":
        config = MixtralConfig(num_local_experts=4, output_router_logits=True, **sizes, **llama)
        config._experts_implementation = "eager"  # grouped matrix products do not support float64
        return config
    configs = {
        "gpt2": lambda: GPT2Config(n_embd=16, n_layer=3, n_head=2, n_positions=32, **sizes, **dropouts),
        "t5": lambda: T5Config(dropout_rate=0.0, **sizes, **t5),
        "gemma2": lambda: Gemma2Config(**sizes, **llama),
    }
    return configs[family]()


def deferred_names(model: PreTrainedModel) -> set[str]:
    """Weights of linear layers and of experts and routers, without the head."""
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() > 1 and not any(word in name for word in ("embed", "lm_head", "shared", "wte", "wpe", "bias"))
    }


@pytest.mark.parametrize(
    ("family", "tied", "num_stages", "num_micro_batches", "recompute", "delay"),
    [
        ("llama", True, 2, 3, ("none", "none"), 9),
        ("llama", False, 3, 2, (1, 1, 1), 0),
        ("gpt2", True, 3, 3, ("block", "block", "block"), 1),
        ("gpt2", False, 2, 1, ("none", 1), 1),
        ("t5", False, 2, 3, ("block", "none"), 2),
        ("t5", True, 4, 2, (1, "none", 1, "none"), 0),
        ("m2m_100", True, 3, 3, (2, "none", 1), 1),
        ("gemma2", True, 2, 2, ("none", "block"), 1),
        ("mixtral", False, 3, 3, (2, "none", 1), 2),
        ("mixtral", True, 1, 2, ("block",), 9),
    ],
)
def test_split_gradients_are_the_whole_ones(
    family: str, tied: bool, num_stages: int, num_micro_batches: int, recompute: Any, delay: int, tmp_path: Path
) -> None:
    config = tiny_config(family, tied=tied)
    plain, batch = plain_model(config), padded_batch(config)
    path = written(tmp_path, num_stages, num_micro_batches, recompute, delay, [0] * num_stages)
    whole = Pipeline(plain, num_stages, num_micro_batches, "1f1b", list(recompute))
    expected = run_pipeline(whole, batch)
    # Gemma 2 and Mixtral compute parts in float32, which rounds in another way where columns of padding are cut off.
    assert_same(expected, run_plain(plain, batch, num_micro_batches), 1e-10 if family in EXACT else 1e-7)
    plain.zero_grad()
    mode = "block" if "block" in recompute else "none"
    pipe = Pipeline(plain, num_stages, num_micro_batches, path, **({"recompute": mode} if mode == "block" else {}))
    put: set[str] = set()
    names = {p: name for name, p in pipe.named_parameters()}
    for stage in pipe.stages.values():
        perform = stage.weight_backward

        def noted(index: int, *rest: Any, stage: Any = stage, perform: Any = perform) -> None:
            put.update(names[p] for p in stage.deferred(index))
            perform(index, *rest)

        stage.weight_backward = noted  # type: ignore[method-assign]
    assert_same(run_pipeline(pipe, batch), expected, TOLERANCE)
    assert put == deferred_names(plain)


def in_three_processes(path: str) -> tuple[list[Any], tuple[int, int]]:
    """Two steps of a tied llama whose first stage has two replicas that share the update."""
    replicas.BUCKET_BYTES = 3000
    config = tiny_config("llama", tied=True)
    pipe = Pipeline(plain_model(config), 2, 4, path, replicas=[2, 1], zero=1)
    batch = padded_batch(config) if pipe.world.is_main else None
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.shard_optimizer(optimizer)
    started: list[tuple[int, int]] = []
    start = pipe.weights.replicas.start

    def counted(stage: int) -> None:
        started.append((len(pipe.weights.replicas._sums[stage]._started), len(pipe.weights.replicas._buckets[stage])))
        start(stage)

    pipe.weights.replicas.start = counted  # type: ignore[method-assign]
    found = []
    for _ in range(2):
        found.append(run_pipeline(pipe, batch))
        optimizer.step()
    return found, started[-1] if started else (0, 0)


def test_several_processes_with_replicas_that_share_the_update(tmp_path: Path) -> None:
    """The sums over replicas begin in the last W."""
    config = tiny_config("llama", tied=True)
    plain, batch = plain_model(config), padded_batch(config)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        expected.append(run_plain(plain, batch, 4))
        optimizer.step()
    path = written(tmp_path, 2, 4, (1, "none"), 1, [[0, 1], [2]])
    of_process = run_gloo(in_three_processes, 3, path)
    for found, _ in of_process:
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    for _, (before, number) in of_process[:2]:
        assert before == number > 1


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_lora_and_frozen_layers(autocast: torch.dtype | None, checkpointed: bool, tmp_path: Path) -> None:
    """Trained: LoRA of two layers and nothing else of block 0; a frozen weight is not kept."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], lora_dropout=0.2)
    path = written(tmp_path, 2, 3, ("none", "none"), 1, [0, 0])
    results = []
    for schedule in ("1f1b", path):
        plain = plain_model(tiny_config("llama", tied=True), dtype=torch.float64 if autocast is None else torch.float32)
        model = peft.get_peft_model(plain, lora)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
                    parameter.requires_grad_("layers.0" not in name)
        recompute = "block" if checkpointed else "none"
        pipe = Pipeline(model, 2, 3, schedule, recompute, autocast=autocast)
        for stage in pipe.stages.values():
            backward = stage.input_backward

            def checked(index: int, gradients: Any, stage: Any = stage, backward: Any = backward) -> Any:
                message = backward(index, gradients)
                assert all(p.requires_grad for p in stage.deferred(index))
                return message

            stage.input_backward = checked  # type: ignore[method-assign]
        results.append(run_pipeline(pipe, padded_batch(plain.config)))
        del model
    assert all("lora_" in name for name in results[0].gradients)
    assert_same(results[1], results[0], TOLERANCE if autocast is None else 1e-6)


class Experts(nn.Module):
    """As transformers computes experts by grouped products, and a matrix of its own that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 16))
        self.down = nn.Parameter(torch.randn(3, 8, 16))
        self.router = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([2, 2, 6], dtype=torch.int32)
        x = F.linear(x, self.router) * self.router.mean()
        x = F.grouped_mm(x, self.up.transpose(-2, -1), offs=offsets)
        x = F.grouped_mm(x.relu(), self.down, offs=offsets)
        return x @ self.router


def test_experts_by_grouped_products() -> None:
    torch.manual_seed(0)
    module, x = Experts(), torch.randn(6, 16)
    gradients, names = WeightGradients(), {p: name for name, p in module.named_parameters()}
    for _ in range(2):
        module(x).square().sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    hand_over(module, gradients)
    for _ in range(2):
        with gradients.keeping() as kept:
            module(x).square().sum().backward()
        found = [names[one.parameter] for one in kept]
        assert found == ["router", "down", "up", "router"]
        with torch.no_grad():
            for one in kept:
                one.add()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_products_are_written_then_added_in_place_and_hooks_see_whole_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    gradients, x = WeightGradients(), torch.randn(4, 8)
    hand_over(model, gradients)
    seen: list[torch.Tensor] = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient))
    with gradients.keeping() as kept:
        model(x).square().sum().backward()
    assert [one.parameter is model[2].weight for one in kept] == [True]
    assert kept_bytes(kept) == 4 * (4 * 16 + 4 * 8)
    assert model[2].weight.grad is None
    assert model[2].bias.grad is not None
    assert torch.equal(seen[0], model[0].weight.grad)
    kept[0].add()
    first = model[2].weight.grad
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        kept[0].add()
    assert model[2].weight.grad is first
    assert all(event.cpu_memory_usage <= 0 for event in profile.key_averages())


def test_compiled_blocks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda module, backend: None)  # its import takes seconds
    path = written(tmp_path, 2, 2, ("none", "none"), 0, [0, 0])
    with pytest.raises(UserError, match=r"torch\.compile .* set torch_compile to false"):
        Pipeline(tiny_config("llama", tied=True), 2, 2, path, torch_compile=True)


def test_nothing_is_left_after_a_step(tmp_path: Path) -> None:
    """The graph is freed in I, and what it kept in W; also after a failure."""
    path = written(tmp_path, 2, 3, ("none", "none"), 9, [0, 0])
    config = tiny_config("llama", tied=True)
    pipe = Pipeline(plain_model(config), 2, 3, path)
    stage, batch = pipe.stages[1], padded_batch(config)
    perform = stage.weight_backward

    def fail(index: int, *rest: Any) -> None:
        assert not stage._live
        assert len(stage._kept) == 3
        raise RuntimeError("no")

    stage.weight_backward = fail  # type: ignore[method-assign]
    with pytest.raises(StageError, match="1W0"):
        pipe.train_step(batch)
    assert not stage._kept
    stage.weight_backward = perform  # type: ignore[method-assign]
    pipe.zero_grad()
    expected = run_plain(plain_model(config), batch, 3)
    assert_same(run_pipeline(pipe, batch), expected)
    assert not stage._kept


def in_two_processes() -> list[Result]:
    """Ties cross the two processes."""
    config = tiny_config("m2m_100", tied=True)
    found = []
    for schedule in ("zb_h2", "zb_v"):
        pipe = Pipeline(plain_model(config), 4, 4, schedule, "none")
        batch = padded_batch(config) if pipe.world.is_main else None
        found.append(run_pipeline(pipe, batch))
        assert pipe.eval_step(batch).loss == pytest.approx(found[-1].loss, rel=1e-10)
    return found


def test_split_schedules_in_two_processes() -> None:
    config = tiny_config("m2m_100", tied=True)
    expected = run_plain(plain_model(config), padded_batch(config), 4)
    for results in run_gloo(in_two_processes, 2):
        for found in results:
            assert_same(found, expected)


def test_a_training_is_resumed(tmp_path: Path) -> None:
    """A run that begins with the whole backward and goes on with the split one, accumulating, has the same weights."""
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    options |= {"lr_scheduler_type": "constant"}
    whole = trainer(tmp_path / "whole", schedule="1f1b", **options)
    whole.train()
    trainer(tmp_path / "split", schedule="1f1b", **options | {"max_steps": 2}).train()
    resumed = trainer(tmp_path / "split", schedule="zb_h1", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "split" / "checkpoint-2"))
    expected = weights(whole)
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_planner_knows_what_is_kept(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, tied=True)
    pipe = Pipeline(config, 3, 2, written(tmp_path, 3, 2, ("none",) * 3, 9, [0] * 3), partition=[1, 3, 2])
    stage, kept = pipe.stages[1], []
    perform = stage.weight_backward

    def noted(index: int, *rest: Any) -> None:
        kept.append(stage.deferred_bytes(index))
        perform(index, *rest)

    stage.weight_backward = noted  # type: ignore[method-assign]
    batch = padded_batch(config)
    batch["attention_mask"].fill_(1)
    pipe.train_step(batch)
    micro_batch = Workload.from_batch(batch).with_rows(len(batch["input_ids"]) // 2)
    costs = LayerTracer(pipe.adapter).costs(micro_batch)
    assert kept == [sum(layer.deferred_bytes for layer in costs.layers[1:4])] * 2
    assert costs.layers[0].deferred_bytes == costs.layers[-1].deferred_bytes == 0
