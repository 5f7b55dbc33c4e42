"""Stages with replicas compute what the plain model computes: uniform and uneven replication, every schedule."""

from __future__ import annotations

import copy
import functools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, PreTrainedConfig, PreTrainedModel

from hf_gpipe import Pipeline
from hf_gpipe.errors import UserError
from hf_gpipe.runtime import replicas
from hf_gpipe.runtime.wiring import last_backwards
from hf_gpipe.schedule.actions import Action
from hf_gpipe.settings.pipeline import PipelineConfig
from tests.gloo import run_gloo
from tests.oracle import (
    VOCABULARY,
    Batch,
    Result,
    assert_same,
    gathered_gradients,
    padded_batch,
    plain_model,
    run_plain,
    tiny_config,
)

#: Decides which values of the cases meet; every pair of values meets in some case, whatever it is.
SEED = int(os.environ.get("HF_GPIPE_TEST_SEED", "0"))


@dataclass(frozen=True)
class Mesh:
    """K stages, their replicas, and the number of processes."""

    num_stages: int
    replicas: int | tuple[int, ...]
    num_processes: int

    @classmethod
    def uniform(cls, num_replicas: int, num_stages: int) -> Mesh:
        return cls(num_stages, num_replicas, num_replicas * num_stages)

    @classmethod
    def uneven(cls, *replicas: int) -> Mesh:
        return cls(len(replicas), replicas, sum(replicas))


MESHES = (
    *(Mesh.uniform(*one) for one in ((2, 1), (2, 2))),
    *(Mesh.uneven(*one) for one in ((3, 1), (1, 2))),
    # Two pipelines of 4 stages on 2 processes each.
    Mesh(4, 2, 4),
)
#: Weights of the first two and the last are tied; mixtral has an auxiliary loss.
MODELS = ("llama", "marian", "mixtral", "llama, lora", "marian, dropout")
VALUES: dict[str, Sequence[Any]] = {
    "mesh": MESHES,
    "model": MODELS,
    "num_micro_batches": (4, 6, 7),
    "schedule": ("gpipe", "gpipe_fused", "1f1b", "interleaved_1f1b", "zb_h1"),
    "recompute": ("none", "block", "stage", 2),
}


@dataclass(frozen=True)
class Case:
    """One pipeline. A number as `recompute` is that of stored graphs on every stage."""

    mesh: Mesh
    model: str
    num_micro_batches: int
    schedule: str
    recompute: str | int


def covering_cases() -> list[Case]:
    """Cases in which every pair of values of two fields meets, as few as a greedy choice finds."""
    chance = random.Random(SEED)
    names = list(VALUES)
    missing = {
        (one, a, other, b) for one, other in combinations(names, 2) for a, b in product(VALUES[one], VALUES[other])
    }

    def pairs(case: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(one, case[one], other, case[other]) for one, other in combinations(names, 2)}

    cases = []
    while missing:
        one, a, other, b = min(missing, key=repr)
        tried = [
            {name: chance.choice(values) for name, values in VALUES.items()} | {one: a, other: b} for _ in range(200)
        ]
        best = max(tried, key=lambda case: len(pairs(case) & missing))
        missing -= pairs(best)
        cases.append(Case(**best))
    return cases


CASES = covering_cases()


@functools.cache
def config_of(model: str) -> PreTrainedConfig:
    if model == "mixtral":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_local_experts": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        auxiliary = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        config = MixtralConfig(vocab_size=VOCABULARY, pad_token_id=0, **sizes, **heads, **auxiliary)
        config._experts_implementation = "eager"
        return config
    family, _, kind = model.partition(", ")
    config = tiny_config(family, dropout=0.2 if kind == "dropout" else 0.0)
    if family == "llama":
        config.num_hidden_layers = 2
    return config


@functools.cache
def plain_of(model: str) -> PreTrainedModel:
    """The plain model, with adapters whose second factors are not zero, so that both get gradients."""
    plain = plain_model(config_of(model))
    if model.endswith("lora"):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(1)
        plain = peft.get_peft_model(plain, config).double()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    return plain


def batches_of(model: str) -> tuple[Batch, Batch]:
    """A mini-batch, and one with a single row: most replicas have no micro-batch of it."""
    config = config_of(model)
    # Of two parts, for rows stay short: transformers' softmax is in float32, whose sums depend on the columns cut off.
    parts = [padded_batch(config, 6, seed) for seed in (1, 2)]
    first = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return first, {name: tensor[2:3] for name, tensor in padded_batch(config, 5, seed=3).items()}


@dataclass(frozen=True)
class Step:
    """Two steps whose gradients are added up, and an evaluation, with the numbers that every process has."""

    losses: tuple[float, float]
    first_norm: float
    gradients: dict[str, torch.Tensor]
    norm: float
    evaluated: list[float]


def in_one_process(model: str, num_micro_batches: int) -> Step:
    """By the plain model; with dropout, which depends on seed, step, micro-batch and layer, by one stage."""
    if model.endswith("dropout"):
        return step(Pipeline(copy.deepcopy(plain_of(model)), 1, num_micro_batches), model)
    plain = plain_of(model)
    if model.endswith("lora"):
        plain = copy.deepcopy(plain).get_base_model()
    first, second = (run_plain(plain, batch, num_micro_batches) for batch in batches_of(model))
    total = {name: gradient + second.gradients[name] for name, gradient in first.gradients.items()}
    both = Result(first.loss + second.loss, total)
    with torch.no_grad():
        rows = run_plain_rows(plain.eval(), batches_of(model)[0])
    plain.train()
    return Step((first.loss, second.loss), first.norm, total, both.norm, rows)


def run_plain_rows(model: PreTrainedModel, batch: Batch) -> list[float]:
    """The negative log-likelihood of each row, summed over its targets."""
    targets = batch["labels"]
    logits = model(**batch, use_cache=False).logits.log_softmax(-1)
    if not model.config.is_encoder_decoder:
        logits, targets = logits[:, :-1], targets[:, 1:]
    values = -logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    rows: list[float] = (values * (targets != -100)).sum(dim=1).tolist()
    return rows


def step(pipe: Pipeline, model: str) -> Step:
    """What `in_one_process` computes, by a pipeline; the second step's gradients are added to the first's."""
    norms: list[float] = []
    losses = []
    for batch in batches_of(model):
        given = batch if pipe.world.is_main else None
        losses.append(float(pipe.train_step(given, update=lambda _, norm: norms.append(float(norm)))))
    gradients = gathered_gradients(pipe)
    assert float(pipe.grad_norm()) == norms[1], "U's norm is that of all gradients"
    evaluation = pipe.eval_step(batches_of(model)[0] if pipe.world.is_main else None)
    norm = float(pipe.clip_grad_norm_(norms[1] / 2))
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name] / 2, rtol=1e-5, atol=1e-12)
    first, second = losses
    return Step((first, second), norms[0], gradients, norm, evaluation.row_nll.tolist())


def run_cases(cases: Sequence[Case]) -> list[Step]:
    """In one of the processes of a job: all cases with so many processes."""
    replicas.BUCKET_BYTES = 3000  # so that a tiny stage has several
    return [step(pipeline_of(case), case.model) for case in cases]


def pipeline_of(case: Case) -> Pipeline:
    mesh = case.mesh
    recompute = [case.recompute] * mesh.num_stages if isinstance(case.recompute, int) else case.recompute
    pipe = Pipeline(
        copy.deepcopy(plain_of(case.model)),
        mesh.num_stages,
        case.num_micro_batches,
        case.schedule,
        recompute,
        replicas=mesh.replicas,
    )
    assert pipe.world.placement.num_processes == mesh.num_processes
    return pipe


@pytest.mark.parametrize("num_processes", sorted({mesh.num_processes for mesh in MESHES}))
def test_replicas_compute_what_the_plain_model_computes(num_processes: int) -> None:
    cases = [case for case in CASES if case.mesh.num_processes == num_processes]
    print(f"{len(cases)} of {len(CASES)} cases; HF_GPIPE_TEST_SEED={SEED}")
    expected = functools.cache(in_one_process)
    for of_process in run_gloo(run_cases, num_processes, cases):
        for case, found in zip(cases, of_process, strict=True):
            assert_same_step(found, expected(case.model, case.num_micro_batches), case)


def assert_same_step(found: Step, expected: Step, case: Case) -> None:
    # transformers computes the auxiliary loss in float32, whose sum rounds as the tensors lie in memory.
    tolerance = 1e-7 if case.model == "mixtral" else 1e-10
    assert found.losses == pytest.approx(expected.losses, rel=tolerance), case
    try:
        assert_same(Result(0.0, found.gradients), Result(0.0, expected.gradients))
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error
    assert found.first_norm == pytest.approx(expected.first_norm, rel=1e-10), case
    assert found.norm == pytest.approx(expected.norm, rel=1e-10), case
    assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-10), case


def test_every_pair_of_values_is_covered() -> None:
    names = list(VALUES)
    for one, other in combinations(names, 2):
        found = {(getattr(case, one), getattr(case, other)) for case in CASES}
        assert found == set(product(VALUES[one], VALUES[other]))


def without_norm(model: PreTrainedModel) -> None:
    """Leave out the last norm of a llama, whose weight then has no gradient."""
    model.model.norm.forward = lambda hidden: hidden


def run_without_norm(num_replicas: int) -> Result:
    with pytest.raises(UserError, match="would never get one"):
        Pipeline(tiny_config("llama"), 1, 1, replicas=num_replicas)
    pipe = Pipeline(copy.deepcopy(plain_of("llama")), 1, 4, replicas=num_replicas)
    without_norm(pipe.models[0].model)
    batch = batches_of("llama")[0] if pipe.world.is_main else None
    loss = float(pipe.train_step(batch))
    return Result(loss, gathered_gradients(pipe))


def test_a_parameter_without_gradient_has_none_on_any_replica() -> None:
    plain = copy.deepcopy(plain_of("llama"))
    without_norm(plain)
    expected = run_plain(plain, batches_of("llama")[0], 4)
    assert "model.norm.weight" not in expected.gradients
    for found in run_gloo(run_without_norm, 2, 2):
        assert_same(found, expected)


def test_a_replica_that_would_never_get_a_micro_batch_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_micro_batches is 2 and stage 1 has 3 replicas: .* at least as many"):
        PipelineConfig(num_stages=2, num_micro_batches=2, replicas=(1, 3)).check_micro_batches(1)
    with pytest.raises(UserError, match="is 2, of each of the 2 mini-batches of a step, and stage 0 has 5 replicas"):
        PipelineConfig(num_micro_batches=2, replicas=5).check_micro_batches(2)


def buckets_before_reduction() -> tuple[int, int]:
    """How many buckets of a stage have left before its G, and how many there are."""
    replicas.BUCKET_BYTES = 3000
    pipe = Pipeline(copy.deepcopy(plain_of("llama")), 1, 4, replicas=2, recompute="block")
    left: list[int] = []
    start = pipe.weights.replicas.start

    def counted(stage: int) -> None:
        left.append(len(pipe.weights.replicas._sums[stage]._started))
        start(stage)

    pipe.weights.replicas.start = counted  # type: ignore[method-assign]
    pipe.train_step(batches_of("llama")[0] if pipe.world.is_main else None)
    return left[0], len(pipe.weights.replicas._buckets[0])


def test_gradients_leave_while_the_last_backward_computes() -> None:
    for before, number in run_gloo(buckets_before_reduction, 2):
        assert before == number > 3


def test_a_reduction_begins_in_a_backward_only_where_no_other_comes_first() -> None:
    def found(row: str) -> set[str]:
        return {str(action) for action in last_backwards([Action.parse(word) for word in row.split()])}

    assert found("0F0 1F0 1B0 0B0 1G 0G 0U 1U") == {"1B0"}
    assert found("0F0 1F0 1B0 1G 0B0 0G 0U 1U") == {"1B0", "0B0"}
    assert found("0F0 0F2 0B0 0B2 0G 0U") == {"0B2"}
    assert found("0G 0U") == set()
