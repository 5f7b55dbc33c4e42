"""Weights that visit their device: the loss and every gradient of a run in which they stay there."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.multiprocessing import ProcessRaisedException
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_gpipe import Pipeline, PipelineTrainer, PipelineTrainingArguments
from hf_gpipe.errors import ScheduleError, StageError, UserError
from hf_gpipe.job.world import World
from hf_gpipe.model import clone
from hf_gpipe.model.clone import exact_clone
from hf_gpipe.modes.visits import weights as visits
from hf_gpipe.modes.visits.host_updates import HOST_UPDATE
from hf_gpipe.modes.visits.table import most_loaded
from hf_gpipe.modes.visits.visit import LOAD
from hf_gpipe.modes.visits.visit import visits as visits_in
from hf_gpipe.planner.report import report
from scripts.families import default_config
from tests.gloo import run_gloo
from tests.oracle import (
    Result,
    assert_same,
    gathered_gradients,
    padded_batch,
    plain_model,
    run_pipeline,
    run_plain,
    tiny_config,
    visits_of,
)
from tests.trainers import test_dpo
from tests.training.toy import trainer
from tests.training.toy import weights as trained_weights

#: As many stages as visits need where one process has all.
STAGES = 4


def adapters(**options: Any) -> LoraConfig:
    """LoRA on every linear layer, with values that matter from the first step on."""
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)


def model_of(family: str, *, tied: bool = False) -> PreTrainedModel:
    config = default_config(family)
    config.tie_word_embeddings = tied
    return exact_clone(config, torch.float64)


def with_layers(number: int) -> PreTrainedConfig:
    config = tiny_config("llama", tied=False)
    config.num_hidden_layers = number
    return config


def pipeline(model: PreTrainedModel | str, *, peft: Any = None, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    given = {"num_stages": STAGES, "num_micro_batches": 3, "attn_implementation": "eager"} | options
    return Pipeline(model, peft_config=peft or adapters(), **given)


def at_home(pipe: Pipeline) -> bool:
    """Whether no weight is on a visit."""
    return not any(own._there for own in visits_of(pipe).values())


@pytest.mark.parametrize(
    ("family", "tied", "options"),
    [
        ("llama", True, {}),
        ("llama", False, {"recompute": "stage", "schedule": "gpipe"}),
        ("llama", True, {"num_stages": 6, "schedule": "gpipe_fused"}),
        ("marian", False, {"num_stages": 6}),
        ("bart", True, {}),
        ("m2m_100", False, {"schedule": "zb_h1"}),
        ("llama", True, {"num_stages": 6, "resident_stages": 2}),
        ("bart", True, {"num_stages": 6, "resident_stages": 3}),
    ],
)
def test_the_numbers_of_weights_that_stay(family: str, tied: bool, options: dict[str, Any]) -> None:
    config = tiny_config(family, tied=tied)
    model, batch = plain_model(config), padded_batch(config)
    plain = run_pipeline(pipeline(copy.deepcopy(model), schedule="gpipe", num_stages=2), batch)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    pipe = pipeline(model, offload_weights="frozen", **options)
    assert_same(run_pipeline(pipe, batch), plain)
    assert at_home(pipe)
    # Nothing of the given model has changed.
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters() if name in before)


@pytest.mark.parametrize(
    ("family", "tied", "options"),
    [
        ("llama", True, {}),
        ("llama", False, {}),
        ("marian", True, {"num_stages": 6, "num_micro_batches": 2}),
        ("bart", False, {}),
        ("t5", True, {"num_stages": 5}),
        ("mixtral", False, {}),
        ("llama", True, {"num_stages": 5, "resident_stages": 2}),
        ("bart", True, {"num_stages": 6, "resident_stages": 1}),
        ("t5", True, {"num_stages": 5, "resident_stages": 2}),
    ],
)
def test_trained_weights_visit_too(family: str, tied: bool, options: dict[str, Any]) -> None:
    """Their gradients are on the host after the step, and are added to if there are any."""
    model = model_of(family, tied=tied)
    model.set_attn_implementation("eager")
    batch = clone.padded_batch(model)
    given = {"num_micro_batches": 3, "attn_implementation": "eager"} | options
    stays = Pipeline(copy.deepcopy(model), **given | {"num_stages": 2, "resident_stages": 0}, schedule="gpipe")
    comes = Pipeline(model, **{"num_stages": STAGES} | given, offload_weights="all")
    assert visits_of(comes)[0].parameters
    for pipe in (stays, comes):
        pipe.train_step(batch)
    found, expected = (Result(float(pipe.train_step(batch)), gathered_gradients(pipe)) for pipe in (comes, stays))
    assert at_home(comes)
    assert_same(found, expected, tolerance=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "t5", "qwen3", "gemma2", "opt", "bloom", "phi3", "pegasus", "mixtral"])
def test_other_families(family: str) -> None:
    model = model_of(family)
    batch = clone.padded_batch(model)
    plain = run_pipeline(pipeline(copy.deepcopy(model), schedule="gpipe", num_stages=2), batch)
    assert_same(run_pipeline(pipeline(model, offload_weights="frozen"), batch), plain)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_4_bits(tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from tests import test_quantised  # without the package it is skipped as a whole

    torch.manual_seed(0)
    config = test_quantised.config(tied=tied)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    batch = padded_batch(config)

    def step(kind: str, **options: Any) -> Result:
        bits = {"quantization_config": test_quantised.asked(kind)}
        return run_pipeline(pipeline(str(tmp_path), **options, **bits), batch)

    stays = step("nf4", schedule="breadth_first")
    for visitors in ("frozen", "all"):
        assert_same(step("nf4", offload_weights=visitors), stays, tolerance=0)
    with pytest.raises(UserError, match=r"model is in 8 bits.*quantise to 4 bits"):
        step("int8", offload_weights="frozen")


def test_a_frozen_part_visits_and_the_rest_is_trained() -> None:
    config = with_layers(4)
    model, batch = plain_model(config), padded_batch(config)
    for layer in model.model.layers[:3]:
        layer.requires_grad_(False)
    expected = run_plain(model, batch, 3)
    pipe = Pipeline(model, 6, 3, offload_weights="frozen", attn_implementation="eager")
    assert pipe.schedule_name == "breadth_first"
    assert_same(run_pipeline(pipe, batch), expected)


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_run(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(["llama", "marian", "m2m_100", "bart"]))
    config = tiny_config(family, tied=data.draw(st.booleans()), dropout=data.draw(st.sampled_from([0.0, 0.2])))
    num_stages = data.draw(st.integers(3, 6))
    options: dict[str, Any] = {
        "num_micro_batches": data.draw(st.integers(1, 4)),
        "schedule": data.draw(st.sampled_from(["breadth_first", "gpipe", "gpipe_fused", "1f1b", "zb_h1", "naive"])),
        "length_bucketing": data.draw(st.booleans()),
    }
    batches = [padded_batch(config, seed=seed) for seed in range(data.draw(st.integers(1, 2)))]
    model = plain_model(config)
    peft = adapters(lora_dropout=data.draw(st.sampled_from([0.0, 0.3])))
    common = {"seed": 3, "peft": peft, "num_stages": num_stages}
    stays = pipeline(copy.deepcopy(model), **options, **common)
    comes = pipeline(model, **options, **common, offload_weights="frozen")
    results = []
    for pipe in (stays, comes):
        losses = [float(pipe.train_step(batches)) for _ in range(2)]  # dropout is another one in each step
        gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        results.append(Result(sum(losses), gradients))
    assert_same(results[1], results[0], tolerance=1e-14)
    assert comes.eval_step(batches[0]).loss == stays.eval_step(batches[0]).loss


def in_processes(config: PreTrainedConfig, cases: list[dict[str, Any]]) -> list[Result]:
    found = []
    for options in cases:
        pipe = pipeline(plain_model(config), **options)
        found.append(run_pipeline(pipe, padded_batch(config) if pipe.world.rank == 0 else None))
    return found


def test_in_processes() -> None:
    common = {"num_processes": 2, "offload_weights": "frozen"}
    cases: list[dict[str, Any]] = [
        {"num_stages": 6, **common},
        {"num_stages": 3, "replicas": 2, "zero": 1, **common},
        {"num_stages": 6, "placement": "0 0 0 1 1 1", "schedule": "gpipe", **common},
    ]
    config = tiny_config("llama")
    expected = run_pipeline(pipeline(plain_model(config), num_stages=2), padded_batch(config))
    for of_process in run_gloo(in_processes, 2, config, cases):
        for found in of_process:
            assert_same(found, expected)


def test_generation_and_the_saved_adapters(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False)
    model = plain_model(config)
    stays, comes = pipeline(copy.deepcopy(model)), pipeline(model, offload_weights="frozen")
    prompt = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "max_new_tokens": 5}
    assert torch.equal(comes.generate(**prompt), stays.generate(**prompt))
    assert at_home(comes)
    for name, pipe in (("stays", stays), ("comes", comes)):
        pipe.save_pretrained(tmp_path / name)
    saved = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("stays", "comes")]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


def test_a_training_goes_on_with_and_without(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_stages": 4}

    def train(folder: str, resume: bool = False, **values: Any) -> dict[str, torch.Tensor]:
        plain = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
        torch.manual_seed(0)
        made = trainer(tmp_path / folder, family="llama", model=get_peft_model(plain, adapters()), **options | values)
        made.train(resume_from_checkpoint=str(tmp_path / "stays/checkpoint-2") if resume else None)
        return {name: p.detach().clone() for name, p in made.pipe.named_parameters() if p.requires_grad}

    stays = train("stays")
    frozen = {"schedule": "breadth_first", "offload_weights": "frozen"}
    every = frozen | {"offload_weights": "all"}
    for found in (
        *(train("frozen", **frozen), train("all", **every)),
        *(train("frozen again", resume=True, **frozen), train("all again", resume=True, **every)),
    ):
        assert found.keys() == stays.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, stays[name], rtol=0, atol=1e-6)


def test_on_the_cpu_the_host_is_the_checkpoint_s_file(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False)
    plain_model(config).save_pretrained(tmp_path)
    pipe = pipeline(str(tmp_path), offload_weights="frozen")
    stored = load_file(tmp_path / "model.safetensors")
    frozen = {n: p for n, p in pipe.named_parameters() if not p.requires_grad and not n.endswith("norm.weight")}
    addresses = sorted(p.data_ptr() for p in frozen.values())
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    mapped = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
    assert addresses
    assert all(any(low <= address < high for low, high in mapped) for address in addresses)
    result = run_pipeline(pipe, batch := padded_batch(config))
    expected = run_pipeline(pipeline(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)), batch)
    assert_same(result, expected)
    assert stored.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert all(torch.equal(t, stored[n]) for n, t in load_file(tmp_path / "model.safetensors").items())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_the_experts_of_a_mixture_visit_alone(family: str) -> None:
    model = model_of(family)
    batch = clone.padded_batch(model)
    plain = run_pipeline(pipeline(copy.deepcopy(model), schedule="gpipe", num_stages=2), batch)
    pipe = pipeline(model, offload_weights="experts", example=batch, optim="adamw_torch")
    names = {name for name, parameter in pipe.named_parameters() if parameter in visits_of(pipe)[0].parameters}
    assert names
    assert all(".experts." in name and "lora" not in name for name in names)
    assert len(names) == sum(".experts." in n and not p.requires_grad for n, p in pipe.named_parameters())
    (process,), hosted = pipe.plan().processes, visits_of(pipe)[0].hosted_bytes.values()
    stays = sum(p.nbytes for name, p in pipe.named_parameters() if name not in names)
    assert process.memory.parameters == pytest.approx(stays + 2 * max(hosted), rel=0.1)
    assert pipe.plan().hosted_bytes == [sum(p.nbytes for name, p in pipe.named_parameters() if name in names)]
    assert_same(run_pipeline(pipe, batch), plain)


def test_a_device_holds_two_stages() -> None:
    config = with_layers(8)
    pipe = pipeline(plain_model(config), num_stages=8, offload_weights="frozen")
    pipe.train_step(padded_batch(config))
    pipe.eval_step(padded_batch(config))
    (buffers,) = visits_of(pipe)[0]._free.values()
    assert len(buffers) == 2
    assert {buffer.memory.nbytes for buffer in buffers} == {max(visits_of(pipe)[0].hosted_bytes.values())}


def test_what_autocast_makes_of_the_weights_leaves_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drop, seen = model_of("llama").float(), visits.VisitingWeights.drop, list[int]()

    def dropping(self: visits.VisitingWeights, stage: int) -> None:
        kept = self._models[stage].weight_gradients
        assert kept is not None
        seen.append(len(kept._converted))
        drop(self, stage)
        assert not kept._converted

    monkeypatch.setattr(visits.VisitingWeights, "drop", dropping)
    options = {"autocast": torch.bfloat16, "attn_implementation": "eager"}
    pipe = Pipeline(model, STAGES, 3, offload_weights="all", **options)
    for own in visits_of(pipe).values():
        for stage_model in own._models.values():
            stage_model.defer_weight_gradients()  # as the layers of several ranks do
    pipe.train_step(clone.padded_batch(model))
    assert max(seen) > 0, "there was something to drop"


@pytest.mark.parametrize(
    ("visitors", "schedule", "resident"),
    [
        ("frozen", "breadth_first", 0),
        ("all", "breadth_first", 0),
        ("all", "round_robin", 0),
        ("frozen", "breadth_first", 2),
        ("all", "breadth_first", 2),
    ],
)
def test_the_plan_knows_the_buffers_and_the_memory_of_the_host(visitors: str, schedule: str, resident: int) -> None:
    """Stages that stay on the device were planned as if their weights visited it."""
    config = with_layers(6)
    batch = padded_batch(config)
    options: dict[str, Any] = {"example": batch, "optim": "adamw_torch", "offload_weights": visitors}
    options |= {"schedule": schedule, "resident_stages": resident}
    if visitors == "all":
        pipe = Pipeline(plain_model(config), 8, 3, attn_implementation="eager", **options)
    else:
        pipe = pipeline(plain_model(config), num_stages=8, **options)
    plan = pipe.plan()
    (process,) = plan.processes
    hosted, parameters = visits_of(pipe)[0].hosted_bytes.values(), list(pipe.parameters())
    stays = sum(p.nbytes for p in parameters if p not in visits_of(pipe)[0].parameters)
    # Each of a stage's weights begins at a multiple of 512 bytes.
    (most,) = most_loaded(plan.timeline.schedule)
    assert process.memory.parameters == pytest.approx(stays + most * max(hosted), rel=0.1)
    pipe.train_step(batch)
    (buffers,) = visits_of(pipe)[0]._free.values()
    assert len(buffers) == most == (2 if schedule == "breadth_first" else 6)
    every = sum(p.nbytes for p in visits_of(pipe)[0].parameters)
    (host,) = plan.hosted_bytes
    assert host == every * (1 if visitors == "frozen" else 4)
    trained = [p for p in parameters if p.requires_grad and p not in visits_of(pipe)[0].parameters]
    assert process.memory.optimizer == 2 * sum(p.nbytes for p in trained)
    if visitors == "all" and not resident:  # a stage's gradients are there until its D
        assert process.memory.gradients < sum(hosted) / 2
    loads = [span for span in plan.timeline.spans if span.action.kind == LOAD]
    visiting = sorted(visits_of(pipe)[0].hosted_bytes)
    assert len(visiting) == 8 - resident
    assert {span.action.stage: span.busy > 0 for span in loads} == dict.fromkeys(visiting, True)
    assert "weights that visit" in report(plan)


def test_a_step_that_fails_leaves_the_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config("llama", tied=False)
    pipe, batch = pipeline(plain_model(config), offload_weights="frozen"), padded_batch(config)
    expected = run_pipeline(pipe, batch)
    with monkeypatch.context() as patch:
        patch.setattr(visits.VisitingWeights, "enter", lambda *_, **__: 1 / 0)
        with pytest.raises(Exception, match="ZeroDivisionError"):
            pipe.train_step(batch)
    assert at_home(pipe)
    assert_same(run_pipeline(pipe, batch), expected, tolerance=0)


def test_what_cannot_be_done(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False)
    with pytest.raises(UserError, match=r"every weight is trained; use all, train adapters on the model"):
        Pipeline(plain_model(config), 4, 2, offload_weights="frozen")
    with pytest.raises(ScheduleError, match=r"2 of 2.*at least three stages for each device"):
        pipeline(plain_model(config), num_stages=2, offload_weights="frozen")
    with pytest.raises(ScheduleError, match="recompute 'stage'"):
        pipeline(plain_model(config), recompute="none", offload_weights="frozen")
    with pytest.raises(ScheduleError, match="'pipedream' updates weights within a table"):
        pipeline(plain_model(config), schedule="pipedream", offload_weights="frozen")
    with pytest.raises(ScheduleError, match=r"backwards of stage 3 are in 2 visits.*'breadth_first'"):
        pipeline(plain_model(config), num_micro_batches=2, schedule="gpipe", offload_weights="all")
    replicas = {"num_stages": 3, "replicas": 2, "num_processes": 2, "offload_weights": "all"}
    with pytest.raises(ProcessRaisedException, match="ScheduleError: offload_weights is all and stages have replicas"):
        run_gloo(in_processes, 2, config, [replicas])
    table = pipeline(plain_model(config), offload_weights="frozen").schedule(3)
    (tmp_path / "mine.txt").write_text(f"{table}")
    with pytest.raises(UserError, match=r"loads and drops weights .*offload_weights is not given"):
        pipeline(plain_model(config), schedule=str(tmp_path / "mine.txt"))
    mine = pipeline(plain_model(config), schedule=str(tmp_path / "mine.txt"), offload_weights="frozen")
    assert mine.schedule(3) == table


#: (family, whether it is tied, dropout, whether adapters alone are trained, options)
DEALT = [
    ("llama", False, 0.2, False, {"num_micro_batches": 5}),
    ("gpt2", True, 0.0, False, {"num_micro_batches": 1}),
    ("qwen3", False, 0.0, True, {"length_bucketing": True}),
    ("t5", True, 0.2, False, {"num_stages": 5}),
    ("marian", True, 0.0, True, {"num_stages": 6, "num_micro_batches": 4}),
    ("mixtral", False, 0.0, False, {"num_micro_batches": 2}),
    ("phi3", False, 0.0, True, {"num_stages": 3, "num_micro_batches": 5}),
]


def steps(pipe: Pipeline, batch: Any) -> tuple[list[Result], float]:
    """Two steps whose gradients are added up, an update, and a step after it; and the loss of an evaluation."""
    results = []
    batch = batch if pipe.world.rank == 0 else None
    for step in range(3):
        loss = float(pipe.train_step(batch))
        results.append(Result(loss, gathered_gradients(pipe)))
        if step:
            with torch.no_grad():
                for parameter in pipe.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
            pipe.zero_grad()
    return results, pipe.eval_step(batch).loss


def run_dealt(cases: list[Any], schedule: dict[str, Any]) -> list[tuple[list[Result], float]]:
    found = []
    for family, tied, dropout, has_adapters, options in cases:
        config = default_config(family)
        config.tie_word_embeddings = tied
        for name in ("dropout", "attention_dropout", "dropout_rate"):
            if hasattr(config, name):
                setattr(config, name, dropout)
        model = exact_clone(config, torch.float64).train()
        model.set_attn_implementation("eager")
        given = {"num_stages": STAGES, "num_micro_batches": 3, "seed": 3} | options | schedule
        torch.manual_seed(0)
        peft = adapters(lora_dropout=dropout) if has_adapters else None
        pipe = Pipeline(model, peft_config=peft, attn_implementation="eager", **given)
        found.append(steps(pipe, clone.padded_batch(model)))
        assert at_home(pipe)
    return found


def test_shared_stages_in_two_processes_have_the_numbers_of_stages_that_stay() -> None:
    """To the last bit, but for tied weights, whose gradients of two stages are added up at the end."""
    expected = run_dealt(DEALT, {"schedule": "breadth_first"})
    dealt = {"schedule": "round_robin", "offload_weights": "all", "num_processes": 2}
    for found in run_gloo(run_dealt, 2, DEALT, dealt):
        for case, own, others in zip(DEALT, found, expected, strict=True):
            assert own[1] == pytest.approx(others[1], rel=1e-14)
            for one, other in zip(own[0], others[0], strict=True):
                assert one.gradients.keys() == other.gradients.keys(), case
                # The losses of micro-batches on two processes are added up in another order.
                assert one.loss == pytest.approx(other.loss, rel=1e-14)
                assert_same(Result(other.loss, one.gradients), other, tolerance=1e-14 if case[1] else 0)


SHORT = {"family": "llama", "num_stages": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def trainings(folder: str, name: str, num_processes: int = 1, **options: Any) -> dict[str, Any]:
    """Results of short trainings under a schedule: adapters read back, 4 bits, NEFTune, DPO, and replicas."""
    root, found = Path(folder), {}
    batch = padded_batch(tiny_config("llama", tied=False))

    def gradients(source: str, **more: Any) -> Result:
        pipe = pipeline(str(root / source), num_processes=num_processes, **options | more)
        if source == "base":
            pipe.load_pretrained(root / "adapters")
        return run_pipeline(pipe, batch if pipe.world.rank == 0 else None)

    found["adapters read back"] = gradients("base")
    if (root / "small").exists():
        from tests import test_quantised

        found["4 bits"] = gradients("small", quantization_config=test_quantised.asked("nf4"))
    model = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    given = SHORT | options
    made = trainer(root / name, model=copy.deepcopy(model), neftune_noise_alpha=5, **given)
    made.train()
    found["NEFTune"] = trained_weights(made)
    # Without clipping dealt stages are updated beside backwards.
    made = trainer(root / f"{name}-free", model=copy.deepcopy(model), **given, max_grad_norm=0)
    made.train()
    found["no clipping"] = trained_weights(made)
    table = made.pipe.steps.executor._table
    assert table is not None
    assert (HOST_UPDATE in table.kinds) == (name == "dealt")
    found["norms"] = [(logs["loss"], logs["grad_norm"]) for logs in made.state.log_history if "grad_norm" in logs]
    torch.manual_seed(0)
    chats = plain_model(test_dpo.config(), dtype=torch.float32), None, {"peft_config": adapters()}
    made = test_dpo.trained(root / f"{name}-dpo", *chats, **options | {"num_stages": 4, "max_steps": 2})[0]
    found["DPO"] = trained_weights(made)
    if options["schedule"] == "round_robin":
        pairs = {"num_stages": 3, "replicas": 2, "zero": 1}
        made = trainer(root / f"{name}-pairs", model=copy.deepcopy(model), **given | pairs, neftune_noise_alpha=5)
        made.train()
        found["NEFTune with replicas"] = trained_weights(made)
        found["NEFTune again"] = trained_on(root, "stays", given)
    return found


def trained_on(root: Path, other: str, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a training that goes on from the checkpoint of another mesh."""
    model = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    made = trainer(root / f"from {other}", model=model, **given, neftune_noise_alpha=5)
    made.train(resume_from_checkpoint=str(root / other / "checkpoint-2"))
    return trained_weights(made)


def test_dealt_trainings_come_to_those_of_stages_that_stay(tmp_path: Path) -> None:
    config = tiny_config("llama", tied=False)
    plain_model(config).save_pretrained(tmp_path / "base")
    pipeline(str(tmp_path / "base"), schedule="gpipe").save_pretrained(tmp_path / "adapters")
    if importlib.util.find_spec("bitsandbytes"):
        from tests import test_quantised

        LlamaForCausalLM(test_quantised.config(tied=False)).save_pretrained(tmp_path / "small")
    dealt = {"schedule": "round_robin", "offload_weights": "all", "num_processes": 2}
    stays = {"schedule": "breadth_first"}
    expected = trainings(str(tmp_path), "stays", **stays)
    for found in run_gloo(partial(trainings, name="dealt", **dealt), 2, str(tmp_path)):
        assert {"NEFTune again", "NEFTune with replicas"} == found.keys() - expected.keys()
        for name, value in found.items():
            other = expected[name.split(" with ")[0].removesuffix(" again")]
            if isinstance(value, Result):
                assert_same(Result(other.loss, value.gradients), other, tolerance=0)
                assert value.loss == pytest.approx(other.loss, rel=1e-6 if name == "4 bits" else 1e-14)
            elif name == "norms":
                # The squares of stages are added up in another order.
                assert len(value) == 4
                assert [one for one, _ in value] == [one for one, _ in other]
                assert [one for _, one in value] == pytest.approx([one for _, one in other], rel=1e-12)
            elif name == "no clipping":
                assert all(torch.equal(value[key], tensor) for key, tensor in other.items())
            else:
                assert value.keys() == other.keys()
                for key, tensor in value.items():
                    torch.testing.assert_close(tensor, other[key], rtol=0, atol=1e-6, msg=f"{name}: {key}")
    again = trained_on(tmp_path, "dealt", SHORT | stays)
    assert all(torch.allclose(one, again[key], rtol=0, atol=1e-6) for key, one in expected["NEFTune"].items())


def test_an_update_that_fails_beside_backwards() -> None:
    """The step raises it, once the threads are done, and a pipeline of one process can run the next one."""
    config = tiny_config("llama", tied=False)
    batch, options = padded_batch(config), {"schedule": "round_robin", "offload_weights": "all"}
    pipe = pipeline(plain_model(config), **options)
    updated: list[int] = []

    def update_stage(stage: int) -> None:
        updated.append(stage)
        if stage == fails_at:
            raise KeyError("the cause")

    fails_at = 2
    with pytest.raises(StageError, match=r"^process 0, stage 2, action 2H, in a background thread: KeyError: 'the cau"):
        pipe.train_ahead([batch], None, lambda: updated.append(-1), update_stage)
    assert updated == [3, 2]
    assert at_home(pipe)
    pipe.zero_grad()
    fails_at = -1
    loss, norm = pipe.train_ahead([batch], None, lambda: updated.append(-1), update_stage)().tolist()
    assert updated == [3, 2, 3, 2, 1, 0, -1]
    expected = pipeline(plain_model(config))
    assert loss == pytest.approx(float(expected.train_step(batch)), rel=1e-14)
    assert norm == pytest.approx(float(expected.grad_norm()), rel=1e-14)


def test_a_visit_takes_the_buffer_that_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    load, buffers = visits.VisitingWeights.load, list[int]()

    def noted(self: visits.VisitingWeights, stage: int) -> None:
        load(self, stage)
        buffers.append(id(self._there[stage].buffer))

    monkeypatch.setattr(visits.VisitingWeights, "load", noted)
    config = with_layers(4)
    pipe, batch = pipeline(plain_model(config), schedule="round_robin", offload_weights="all"), padded_batch(config)
    for _ in range(2):
        buffers.clear()
        pipe.train_step(batch)
        of_table = visits_in(pipe.schedule(3), 0)
        assert len(set(buffers)) == most_loaded(pipe.schedule(3))[0] < len(of_table)
        left_by = {visit.drop: buffer for visit, buffer in zip(of_table, buffers, strict=True)}
        assert any(visit.after for visit in of_table)
        for visit, buffer in zip(of_table, buffers, strict=True):
            assert visit.after is None or left_by[visit.after] == buffer


def test_shared_stages_draw_alike_or_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of several models draw other masks from one seed, and one of them recomputes what another has computed."""
    monkeypatch.setattr(World, "device_models", ("NVIDIA A100", "NVIDIA H100"))
    config, dealt = with_layers(4), {"schedule": "round_robin", "offload_weights": "all"}
    without = pipeline(plain_model(config), **dealt)
    with pytest.raises(UserError, match=r"^neftune_noise_alpha=5.* several models \(NVIDIA A100, NVIDIA H100\): "):
        PipelineTrainer(without, PipelineTrainingArguments(str(tmp_path), neftune_noise_alpha=5))
    config.attention_dropout = 0.1
    with pytest.raises(UserError, match=r"^attention_dropout=0.1, and the stages are shared by GPUs of several models"):
        pipeline(plain_model(config), **dealt)
    assert pipeline(plain_model(config)).adapter.dropout == {"attention_dropout": 0.1}
    monkeypatch.setattr(World, "device_models", ("NVIDIA H100",))
    pipeline(plain_model(config), **dealt)


def test_what_cannot_be_dealt() -> None:
    config = with_layers(4)
    with pytest.raises(UserError, match=r"is round_robin and offload_weights frozen: .* set offload_weights to all"):
        pipeline(plain_model(config), schedule="round_robin", offload_weights="frozen")
    with pytest.raises(ScheduleError, match="round_robin' recomputes"):
        pipeline(plain_model(config), schedule="round_robin", offload_weights="all", recompute="none")
