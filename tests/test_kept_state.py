"""Modules that keep a state between forwards, or compute by the length of rows: the numbers of new models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    NllbMoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    SwitchTransformersConfig,
)

from hf_gpipe import DistillationLoss, Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.adapters.modules.kept_state import KeptState, observe_kept
from hf_gpipe.adapters.observation.tiny import LENGTH_LIMIT, tiny_config
from hf_gpipe.errors import DataError, UnsupportedModelError
from hf_gpipe.pipeline.exactness import compare
from scripts.random_cases.in_float64 import in_float64
from tests.oracle import Batch, Result, assert_same, plain_model, run_pipeline, run_plain

LIMIT = 16
SIZES: dict[str, Any] = {
    **{"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "pad_token_id": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3},
}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": LIMIT},
    **{"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 3.0, 9.0, 20.0]},
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
#: The factors of 48 frequencies, as published with Phi-3.5-mini and Phi-4-mini; their values are others.
FACTORS = {"short_factor": [1.0 + 0.05 * i for i in range(48)], "long_factor": [1.0 + 1.3 * i for i in range(48)]}
CONFIGS: dict[str, PreTrainedConfig] = {
    "dynamic": LlamaConfig(**SIZES, max_position_embeddings=LIMIT, rope_parameters=DYNAMIC),
    "longrope": Phi3Config(
        **SIZES, max_position_embeddings=64, original_max_position_embeddings=LIMIT, rope_parameters=LONGROPE
    ),
    "48 factors": Phi3Config(
        **SIZES | {"hidden_size": 192, "num_attention_heads": 2},
        max_position_embeddings=32 * LIMIT,
        original_max_position_embeddings=LIMIT,
        rope_parameters=LONGROPE | FACTORS,
    ),
    "by type of layer": Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        max_position_embeddings=LIMIT,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"full_attention": DYNAMIC, "sliding_attention": LONGROPE},
    ),
}


def model_of(name: str) -> PreTrainedModel:
    return plain_model(CONFIGS[name])


def rows(*lengths: int) -> Batch:
    """Rows of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids *= mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def by_new_models(model: nn.Module, batch: Batch, num_micro_batches: int) -> Result:
    """The step of plain models that have run nothing yet, one for each micro-batch."""
    total = int((batch["labels"][:, 1:] != -100).sum())
    loss, gradients = 0.0, dict[str, torch.Tensor]()
    for part in range(num_micro_batches):
        own = {name: torch.tensor_split(tensor, num_micro_batches)[part] for name, tensor in batch.items()}
        share = int((own["labels"][:, 1:] != -100).sum()) / total
        step = run_plain(copy.deepcopy(model), own, 1)
        loss += step.loss * share
        for name, gradient in step.gradients.items():
            gradients[name] = gradients.get(name, 0) + gradient * share
    return Result(loss, gradients)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("lengths", "num_stages", "num_micro_batches", "recompute"),
    [
        ((10, 20, 30), 2, 3, "stage"),
        ((30, 20, 10), 3, 3, "stage"),
        ((10, 20, 30), 3, 3, "block"),
        ((30, 10), 2, 2, "none"),
        ((9, 12, 14), 2, 3, "stage"),
    ],
)
def test_exact(name: str, lengths: tuple[int, ...], num_stages: int, num_micro_batches: int, recompute: str) -> None:
    """R saw the frequencies of a later and longer micro-batch, and short rows those that their own length chose."""
    model, batch = model_of(name), rows(*lengths)
    with in_float64():
        expected, whole = by_new_models(model, batch, num_micro_batches), by_new_models(model, batch, 1)
        model(**rows(40), use_cache=False)  # which changes the frequencies of the model in memory
        found = run_pipeline(Pipeline(model, num_stages, num_micro_batches, recompute=recompute), batch)
    assert_same(found, expected, 1e-10)
    assert_same(found, whole, 1e-10)  # the width of the mini-batch is that of each micro-batch


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("recompute", ["stage", "block"])
def test_chunks(name: str, recompute: str) -> None:
    """Each chunk of a long row chose the frequencies by its own last position."""
    model, batch = model_of(name), rows(30, 12, 25)
    with in_float64():
        expected = by_new_models(model, batch, 3)
        pipe = Pipeline(model, 2, 3, recompute=recompute, sequence_chunks=4)
        assert_same(run_pipeline(pipe, batch), expected, 1e-10)


def test_padding_is_cut_off_below_the_limit_alone() -> None:
    """Phi-3.5 was trained on rows of 2,048 tokens; its limit is 4,096."""
    config = Phi3Config(**SIZES, max_position_embeddings=131072, rope_parameters=LONGROPE)
    assert config.rope_parameters["original_max_position_embeddings"] == 4096
    adapter = adapter_for(config)
    widths = {}
    for width in (2048, 4096, 4097):
        batch = rows(width, 100)
        part = {name: tensor[1:] for name, tensor in batch.items()}
        widths[width] = adapter.prepare(part)["input_ids"].shape[1]
    assert widths == {2048: 100, 4096: 100, 4097: 4097}


def test_a_teacher_and_its_student_read_the_same_padding() -> None:
    """The student cut off columns of padding by which the teacher chooses its frequencies."""
    teacher = plain_model(CONFIGS["dynamic"])
    student, batch = plain_model(LlamaConfig(**SIZES), seed=1), rows(30, 10)
    losses = [
        float(
            Pipeline(student, 2, m, loss=DistillationLoss(beta=0.5), teacher=copy.deepcopy(teacher)).train_step(batch)
        )
        for m in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_documents_and_positions_beyond_the_limit() -> None:
    """Documents in one row, and rows with positions of their own, would choose frequencies for each other."""
    model = model_of("dynamic")
    short, long = rows(12, 9, 7), rows(12, 30)
    with in_float64():
        expected = by_new_models(model, short, 3)
        assert_same(run_pipeline(Pipeline(model, 2, 2, packing=True), short), expected, 1e-10)
    with pytest.raises(DataError, match=r"a document has 30 tokens, and beyond 16 .* leave packing out"):
        Pipeline(model, 2, 2, packing=True).train_step(long)
    positions = (long["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    with pytest.raises(DataError, match=r"rows that end at 11 and at 29, and beyond 16 .* leave position_ids out"):
        Pipeline(model, 2, 2).train_step({**long, "position_ids": positions})
    alike = {name: tensor[1:].repeat(2, 1) for name, tensor in {**long, "position_ids": positions}.items()}
    Pipeline(model, 2, 2).train_step(alike)
    with pytest.raises(DataError, match=r"position_ids go to 29, and beyond 16 .* \(sequence_chunks\)"):
        Pipeline(model, 2, 2, sequence_chunks=2).train_step(alike)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "by type of layer"])
def test_generation(name: str) -> None:
    """Generation continued from the frequencies of the training step before it; it crosses the limit here."""
    model = model_of(name).eval()
    prompt = {name: tensor for name, tensor in rows(12).items() if name != "labels"}
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    expected = copy.deepcopy(model).generate(**prompt, **options)
    pipe = Pipeline(model, 2, 2)
    pipe.train_step(rows(40, 30))
    assert torch.equal(pipe.generate(**prompt, **options), expected)


def test_an_evaluation_changes_no_training() -> None:
    """The routers of NLLB-MoE kept the capacity that an evaluation computes from its own number of tokens."""
    config = tiny_config(NllbMoeConfig(num_experts=4, expert_capacity=64, encoder_layerdrop=0.0, decoder_layerdrop=0.0))
    config._experts_implementation = "eager"
    batch = rows(9, 8, 7, 6)
    losses = []
    for evaluates in (False, True):
        pipe = Pipeline(copy.deepcopy(config), 2, 2, recompute="block", dtype=torch.float64, seed=3)
        assert pipe.adapter.kept == {"NllbMoeTop2Router": frozenset({"expert_capacity"})}
        if evaluates:
            pipe.eval_step({name: tensor[:1, :2] for name, tensor in batch.items()})
        losses.append(float(pipe.train_step(batch)))
    assert losses[0] == losses[1]


def test_families_without_a_state_keep_nothing() -> None:
    for config in (LlamaConfig(), Gemma3TextConfig()):
        assert not adapter_for(tiny_config(config)).kept


class _Counts(nn.Module):
    """Keeps a number of forwards, a table that every forward needs, and a buffer that it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.longest = nn.Buffer(torch.zeros(1))

    def forward(self, length: int) -> None:
        self.count += 1
        self.table = torch.arange(3)
        self.longest.clamp_(min=length)


def test_what_modules_keep_is_observed_and_put_back() -> None:
    module = _Counts()
    longest = module.longest
    kept = observe_kept(module, (lambda: module(9), lambda: module(4)))
    assert kept == {"_Counts": frozenset({"count", "longest"})}
    assert (module.count, float(module.longest), hasattr(module, "table")) == (0, 0.0, False)
    new = KeptState(module, kept)
    module(5)
    new.restore()
    assert (module.count, float(module.longest), hasattr(module, "table")) == (0, 0.0, True)
    assert module.longest is longest


def test_a_state_that_is_not_put_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison ran rows of almost the same length, in one order, with one kind of recomputation."""
    config = CONFIGS["dynamic"]
    assert tiny_config(config).max_position_embeddings == LENGTH_LIMIT
    assert compare(config).is_exact
    restore = KeptState.restore

    def restores_plain_models(self: KeptState, within: nn.Module | None = None) -> None:
        if all(names is None for _, names, _ in self._noted):
            restore(self, within)

    monkeypatch.setattr(KeptState, "restore", restores_plain_models)
    assert not compare(config).is_exact
    with pytest.raises(UnsupportedModelError, match="differs by"):
        Pipeline(LlamaConfig(**SIZES, max_position_embeddings=24, mlp_bias=True, rope_parameters=DYNAMIC), 2, 2)


@pytest.mark.parametrize("family", [NllbMoeConfig, SwitchTransformersConfig])
def test_gradients_that_are_summed_in_float32_are_summed_in_one_order(family: type[PreTrainedConfig]) -> None:
    """The weights of these routers are float32 in a model of float64, and four micro-batches differed by 1e-9."""
    assert compare(family()).difference < 1e-14
