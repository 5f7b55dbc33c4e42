"""Saved tensors of graphs wait on the host (`recompute: host`): loss and gradients are those of a run without."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from hf_gpipe import Pipeline
from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.model import clone
from hf_gpipe.model.clone import exact_clone
from hf_gpipe.modes.host_graphs import copies as offload
from hf_gpipe.modes.host_graphs.copies import HostCopies, SavedTensors
from hf_gpipe.modes.host_graphs.table import OFFLOAD
from hf_gpipe.schedule import recompute_under
from scripts.families import default_config
from tests.gloo import run_gloo
from tests.oracle import gathered_gradients, padded_batch, plain_model, tiny_config

#: With so many micro-batches some stage has more than three graphs.
COUNT = 5


@pytest.fixture(autouse=True)
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let storages of any size move; the numbers of storages that graphs let go."""
    return count_moved(monkeypatch)


def count_moved(patch: pytest.MonkeyPatch) -> list[int]:
    patch.setattr(offload, "SMALLEST_BYTES", 1)
    leave, counts = HostCopies.leave, list[int]()

    def counted(copies: HostCopies, saved: SavedTensors) -> None:
        counts.append(len(saved.homes))
        leave(copies, saved)

    patch.setattr(HostCopies, "leave", counted)
    return counts


def pipeline(model: nn.Module | str, recompute: Any, **options: Any) -> Pipeline:
    given_ = {"num_stages": 2, "num_micro_batches": COUNT, "schedule": "gpipe"} | copy.deepcopy(options)
    torch.manual_seed(0)
    return Pipeline(copy.deepcopy(model), recompute=recompute, seed=3, **given_)


def step(model: nn.Module, batch: dict[str, torch.Tensor], recompute: Any, **options: Any) -> dict[str, torch.Tensor]:
    """The loss and all gradients of a second step, which adds to those of the first."""
    pipe = pipeline(model, recompute, **options)
    pipe.train_step(batch)
    return {"loss": pipe.train_step(batch)} | gathered_gradients(pipe)


def own_step(model: nn.Module, batch: dict[str, torch.Tensor], recompute: Any, **options: Any) -> dict[str, Any]:
    """The loss of a step and the gradients of this process."""
    pipe = pipeline(model, recompute, **options)
    loss = pipe.train_step(batch)
    return {"loss": loss} | {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


SCHEDULES = [
    {"schedule": "gpipe"},
    {"schedule": "gpipe", "sequence_chunks": 2},
    {"schedule": "breadth_first", "num_stages": 3, "num_processes": 1},
    {"schedule": "interleaved_1f1b", "num_stages": 4, "num_processes": 1},
    {"schedule": "1f1b", "num_stages": 4},
    {"schedule": "zb_h1", "num_stages": 4},
    {"schedule": "vocab_gpipe"},
]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(["llama", "t5", "mixtral", "gpt2", "bart", "qwen3", "opt", "phi3"]),
    options=st.sampled_from(SCHEDULES),
    attention=st.sampled_from(["eager", "sdpa"]),
    tied=st.booleans(),
    mixed=st.booleans(),
)
def test_the_numbers_of_graphs_that_stay(
    family: str, options: dict[str, Any], attention: str, tied: bool, mixed: bool
) -> None:
    config = default_config(family)
    config.tie_word_embeddings = tied
    for name in ("attention_dropout", "dropout", "dropout_rate", "resid_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.1)
    model = exact_clone(config, torch.float64)
    num_stages = options.get("num_stages", 2)
    recompute = ["host", *["none"] * (num_stages - 1)] if mixed else "host"
    options = {"attn_implementation": attention} | options
    try:
        expected = step(model, clone.padded_batch(model), "none", **options)
    except UserError:
        return  # of an encoder-decoder no rows are cut
    assert_equal(step(model, clone.padded_batch(model), recompute, **options), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"autocast": torch.bfloat16},
        {"autocast": torch.bfloat16, "schedule": "zb_h1", "num_stages": 4, "peft_config": "lora"},
        {"packing": True},
    ],
)
def test_what_else_it_goes_with(options: dict[str, Any], moved: list[int]) -> None:
    if "peft_config" in options:
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.1)
        options = options | {"peft_config": lora}
    config = tiny_config("llama", tied=False, dropout=0.1)
    model, batch = plain_model(config, dtype=torch.float32), padded_batch(config)
    expected = step(model, batch, "none", **options)
    assert not moved
    assert_equal(step(model, batch, "host", **options), expected)
    assert moved
    assert all(moved)


#: In two processes.
IN_PROCESSES: list[dict[str, Any]] = [
    {"num_stages": 2},
    {"num_stages": 2, "autocast": torch.bfloat16},
    {"num_stages": 4, "num_processes": 2},
    {"num_stages": 1, "replicas": 2, "zero": 1, "num_micro_batches": 2 * COUNT},
    {"num_stages": 1, "tensor_parallel": 2},
    {"num_stages": 4, "num_processes": 2, "schedule": "vocab_gpipe"},
]


def steps_in_processes() -> list[tuple[list[str], int]]:
    """Of each case which of this process's tensors differ from a run without, and how many graphs went."""
    config = tiny_config("llama", tied=False, dropout=0.1)
    model, batch = plain_model(config), padded_batch(config, rows=2 * COUNT)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        counts = count_moved(patch)
        for case in IN_PROCESSES:
            expected = own_step(model, batch, "none", **case)
            before = len(counts)
            found = own_step(model, batch, "host", **case)
            assert found.keys() == expected.keys()
            different = [name for name in expected if not torch.equal(found[name], expected[name])]
            results.append((different, len(counts) - before))
    return results


def test_in_processes() -> None:
    """Replicas with a shared optimizer state and divided layers too."""
    for of_process in run_gloo(steps_in_processes, 2):
        for case, (different, moved) in zip(IN_PROCESSES, of_process, strict=True):
            assert not different, (case, different)
            assert moved, case


def test_weights_of_4_bits(tmp_path: Path, moved: list[int]) -> None:
    pytest.importorskip("bitsandbytes")
    from tests import test_quantised  # without the package it is skipped as a whole

    config = test_quantised.config()
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    results = []
    for recompute in ("none", "host"):
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        bits = {"quantization_config": test_quantised.asked("nf4"), "peft_config": lora}
        pipe = pipeline(str(tmp_path), recompute, **bits)
        results.append({"loss": pipe.train_step(padded_batch(config))} | gathered_gradients(pipe))
    assert moved
    assert_equal(*results)


def test_in_a_window(moved: list[int]) -> None:
    """Weights change while graphs are away, which then find the version that their forward has read."""
    config = tiny_config("llama", tied=False, dropout=0.1)
    model, batch, weights = plain_model(config), padded_batch(config), []
    for recompute in ("none", "host"):
        pipe = pipeline(model, recompute, schedule="pipedream", num_stages=4, num_micro_batches=2)
        optimizers = {n: torch.optim.SGD(own.parameters.values(), lr=0.1) for n, own in pipe.models.items()}
        pipe.train_window([[batch]] * 4, lambda stage, *_, steps=optimizers: steps[stage].step())
        weights.append({name: p.detach() for name, p in pipe.named_parameters()})
    assert moved
    assert_equal(*weights)


class Checkpointed(nn.Module):
    """A layer that checkpoints a part of itself, and saves views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 12), nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        left, right = checkpoint(lambda one: self.inside(one).exp(), hidden, use_reentrant=False).chunk(2, dim=-1)
        return self.outside((left * right).sigmoid())


def chain(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3)).double()


def test_checkpoints_in_a_chain_of_layers(moved: list[int]) -> None:
    batch = {"input": torch.randn(10, 4, dtype=torch.float64), "labels": torch.arange(10) % 3}
    model, options = chain(Checkpointed(), Checkpointed()), {"num_stages": 1, "example": batch}
    expected = step(model, batch, "none", **options)
    assert_equal(step(model, batch, "host", **options), expected)
    assert moved == [moved[0]] * 6


def test_what_stays(moved: list[int]) -> None:
    """Weights, inputs and small tensors; each storage moves once, however often it is saved."""
    device, weight = torch.device("cpu"), nn.Parameter(torch.ones(4, 4))
    saved, hidden = SavedTensors(device), torch.randn(3, 4, requires_grad=True)
    with saved.hooks():
        squared = (hidden @ weight).square()
        loss = (squared[:, :2] * squared[:, 2:]).exp().sum()
    assert len(saved.homes) == 5
    saved.keep([weight, hidden])
    assert len(saved.homes) == 3
    copies = HostCopies(device)
    copies.leave(saved)
    with pytest.raises(AssertionError, match="the graph is away"):
        torch.autograd.grad(loss, hidden, retain_graph=True)
    copies.come(saved)
    copies.leave(other := SavedTensors(device))
    copies.come(other)
    assert copies.num_bytes == offload.PIECE_BYTES, "pieces are taken in turn"
    saved.arrive()
    loss.backward()
    expected = hidden.detach().requires_grad_()
    squared = (expected @ weight).square()
    (squared[:, :2] * squared[:, 2:]).exp().sum().backward()
    assert torch.equal(hidden.grad, expected.grad)


@pytest.mark.parametrize("is_weight", [True, False])
def test_changes_in_place_are_errors_as_without(is_weight: bool) -> None:
    """Also of what does not move; autograd does not look for them under hooks."""
    weight, copies = nn.Parameter(torch.ones(4)), HostCopies(torch.device("cpu"))
    saved = SavedTensors(torch.device("cpu"))
    with saved.hooks():
        result = (torch.randn(3, 4, requires_grad=True) * weight).sigmoid()
    saved.keep([weight])
    with torch.no_grad():
        (weight if is_weight else result).mul_(2)
    copies.leave(saved)
    copies.come(saved)
    saved.arrive()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_where_it_cannot_be() -> None:
    config = tiny_config("llama", tied=False)
    with pytest.raises(UserError, match=r"recompute is host and offload_weights all: graphs on the host keep weights"):
        Pipeline(config, 4, 4, "breadth_first", "host", offload_weights="all")
    table = Pipeline(config, 1, COUNT, "gpipe", "host").schedule(COUNT)
    assert OFFLOAD in table.kinds
    with pytest.raises(ScheduleError, match=r"recompute is 'none', and the table 'gpipe' .* 'host'"):
        recompute_under(table, "none")
