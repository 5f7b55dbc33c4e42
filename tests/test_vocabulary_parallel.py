"""The head divided by the vocabulary over the stages of a pipeline: the numbers and files of the plain model."""

from __future__ import annotations

import copy
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import GPT2Config, T5Config

from hf_gpipe import LogitsLoss, Pipeline
from hf_gpipe.adapters import adapter_for
from hf_gpipe.errors import ScheduleError, UserError
from hf_gpipe.losses.loss import TokenLoss
from hf_gpipe.modes.divided_head import head_part
from hf_gpipe.modes.divided_head.table import DIVIDED_HEAD, HELD_LOGITS
from hf_gpipe.planner.machines.devices import device
from hf_gpipe.planner.of_model import planner_of
from hf_gpipe.planner.search.choose import best_plan
from hf_gpipe.planner.workload import PlanInputs, Workload
from hf_gpipe.schedule import Costs, Schedule, build, check_table, simulate
from hf_gpipe.schedule.kinds import Held
from hf_gpipe.schedule.occupancy import most_of_equal_stages
from hf_gpipe.settings.pipeline import PipelineConfig
from hf_gpipe.tasks.grpo.loss import GRPOLoss
from tests.gloo import run_gloo
from tests.oracle import VOCABULARY, assert_same, padded_batch, plain_model, run_pipeline, run_plain, tiny_config
from tests.training import toy


def config_of(family: str, *, tied: bool = True) -> Any:
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
        return GPT2Config(vocab_size=VOCABULARY, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    if family == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        special = {"decoder_start_token_id": 0, "pad_token_id": 0}
        return T5Config(vocab_size=VOCABULARY, tie_word_embeddings=tied, **special, **sizes)
    return tiny_config(family, tied=tied)


# ---------------------------------------------------------------------- tables


@given(
    st.sampled_from(DIVIDED_HEAD),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([Fraction(1, 16), Fraction(1, 4), 1, 2]),
)
@settings(deadline=None, max_examples=60)
def test_a_step_is_as_short_as_with_stages_that_share_the_head(
    name: str, num_stages: int, times: int, share: Fraction
) -> None:
    """Of a head whose part takes a share of a stage; and few micro-batches are under way."""
    table = build(name, num_stages, times * num_stages, recompute="none")
    timeline = simulate(table, Costs(Fraction(1), Fraction(2), others={"S": share, "T": 2 * share}))
    assert timeline.total_seconds <= (table.num_micro_batches + num_stages - 1) * 3 * (1 + share)
    for stage, most in enumerate(most_of_equal_stages(table)):
        under_way = table.num_micro_batches if name == "vocab_gpipe" else num_stages - stage + 2
        assert most[Held.GRAPH] <= under_way
        assert most[HELD_LOGITS] <= 2


def test_wrong_tables_and_placements_are_errors() -> None:
    text = build("vocab_1f1b", 2, 2, recompute="none").text()
    for old, new, message in (
        (" 1T0", "", "1T0 is missing from process 1; where the head is divided"),
        ("0S0 0S1", "0S1 0S0", "must receive in the order in which stage 0 sends"),
        ("1T0 1S1", "1S1 1T0", "") if "1T0 1S1" in text else ("1S0 1S1", "1S1 1S0", "order"),
        ("1S0", "1B0 1S0", "occurs twice|comes before"),
    ):
        if message:
            with pytest.raises(ScheduleError, match=message):
                check_table(Schedule.from_text(text.replace(old, new, 1)))
    stuck = (
        text.replace("0S0 ", "", 1).replace(" 0B0", " 0B0 0S0", 1).replace("0T0 ", "", 1).replace("0S0", "0S0 0T0", 1)
    )
    with pytest.raises(ScheduleError, match=r"needs|deadlock|order"):
        check_table(Schedule.from_text(stuck))
    with pytest.raises(ScheduleError, match=r"\[2, 1\] replicas.*one number of replicas"):
        build("vocab_1f1b", 2, 4, replicas=[2, 1])
    with pytest.raises(ScheduleError, match="has no order for rows that are cut into chunks"):
        build("vocab_gpipe", 2, 4, group_size=2)


# ---------------------------------------------------------------------- one process


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "marian"])
def test_one_process_computes_what_the_plain_model_computes(family: str) -> None:
    """Of 50 tokens 3 and 4 stages have unequal parts."""
    for case, (tied, num_stages) in enumerate([(False, 2), (True, 4), (False, 3)]):
        if family == "gpt2" and not tied:
            continue
        schedule, recompute = DIVIDED_HEAD[case % 2], ("none", "stage", "block")[case]
        model = plain_model(config_of(family, tied=tied))
        if family == "marian":  # a bias of the logits
            torch.nn.init.normal_(model.final_logits_bias)
        batch = padded_batch(model.config)
        pipe = Pipeline(copy.deepcopy(model), num_stages, 3, schedule, recompute, attn_implementation="eager")
        assert_same(run_pipeline(pipe, batch), run_plain(model, batch, 3))
    seen: list[torch.Tensor] = []
    evaluated = pipe.eval_on(batch, lambda logits, inputs: seen.append(logits))
    with torch.no_grad():
        expected = model.eval()(**batch).logits
    assert evaluated.loss == pipe.eval_step(batch).loss
    assert torch.allclose(seen[0][0, 0], expected[0, 0], atol=1e-12)
    prompt = {"input_ids": batch["input_ids"][:2, :3]}
    tokens = pipe.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, model.generate(**prompt, max_new_tokens=4, do_sample=False))


def test_losses_are_those_of_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smoothed labels, clipped logits, the dynamic loss; some positions at a time."""
    monkeypatch.setattr(head_part, "slice_positions", lambda width, columns: 7)
    model = plain_model(tiny_config("llama", tied=False))
    batch = padded_batch(model.config)
    batch["labels"][1, :4] = -100
    for loss in (TokenLoss(0.1, 0.05), TokenLoss(is_dynamic=True)):
        found, expected = (
            run_pipeline(Pipeline(copy.deepcopy(model), 3, 2, schedule, "none", loss=loss, dtype="float64"), batch)
            for schedule in ("vocab_1f1b", "1f1b")
        )
        assert_same(found, expected)


def test_what_does_not_go_together_is_an_error(tmp_path: Path) -> None:
    """A loss that divides the logits by a temperature was computed without the temperature."""
    config, smaller = tiny_config("llama"), tiny_config("llama")
    smaller.vocab_size -= 1
    smaller.save_pretrained(tmp_path)
    config.name_or_path = str(tmp_path)  # PEFT then saves the embeddings and the head with the adapters
    model = plain_model(config)
    for settings_, message in (
        ({"partition": [2, 3, 1]}, "'vocab_1f1b' divides the head.*the last stage has the head alone"),
        ({"boundary_dtype": "float32"}, "schedule is vocab_1f1b and boundary_dtype is float32"),
        ({"loss": GRPOLoss(temperature=0.5)}, "'vocab_1f1b' divides the head.*changes the logits in a way of its own"),
        ({"loss": LogitsLoss(_sum_of_logits)}, "'vocab_1f1b' divides the head.*more than the losses of tokens"),
        (
            {"peft_config": peft_of("q_proj")},
            "'vocab_1f1b' divides the head.*its PEFT adapters are saved with the head",
        ),
    ):
        with pytest.raises(UserError, match=message):
            Pipeline(copy.deepcopy(model), 3, 2, "vocab_1f1b", "none", **settings_)  # type: ignore[arg-type]


def _sum_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.logits.sum()


# ---------------------------------------------------------------------- several processes


def peft_of(*targets: str) -> Any:
    """LoRA beside the head."""
    lora = pytest.importorskip("peft").LoraConfig(r=4, target_modules=list(targets))
    lora.init_lora_weights = False
    return lora


def trained(family: str, tied: bool, num_stages: int, folder: str | None, options: dict[str, Any]) -> list[float]:
    """Losses of two steps, the norm of the gradient and the loss of an evaluation."""
    if family == "lora":
        options = options | {"peft_config": peft_of("q_proj", "up_proj", "embed_tokens")}
        family = "llama"
    model = plain_model(config_of(family, tied=tied))
    batch = padded_batch(model.config)
    pipe = Pipeline(model, num_stages, 4, recompute="none", attn_implementation="eager", **options)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    if options.get("zero"):
        pipe.shard_optimizer(optimizer)
    numbers = []
    for _ in range(2):
        pipe.zero_grad()
        numbers += [float(pipe.train_step(batch)), float(pipe.grad_norm())]
        optimizer.step()
    numbers.append(pipe.eval_step(batch).loss)
    tokens = pipe.generate(input_ids=batch["input_ids"][:2, :3], max_new_tokens=3, do_sample=False)
    numbers += tokens.flatten().tolist()
    if folder is not None:
        pipe.save_pretrained(folder)
        for parameter in pipe.parameters():
            parameter.data.zero_()
        pipe.load_pretrained(folder)
        numbers.append(pipe.eval_step(batch).loss)
    return numbers


def all_trained(cases: list[tuple[Any, ...]]) -> list[list[float]]:
    return [trained(*case) for case in cases]


def test_several_processes_and_files_are_those_of_one_without_divided_heads(tmp_path: Path) -> None:
    untied = [(family, False, 3) for family in ("lora", "t5")]
    three = [*untied, *((family, True, 3) for family in ("lora", "marian"))]
    four = [("llama", False, 2), ("gpt2", True, 2)]
    for size, models, extra in ((3, three, {}), (4, four, {"replicas": 2, "zero": 1})):
        folders = [str(tmp_path / f"{size}-{number}") for number in range(len(models))]
        cases = [
            (*one, folder, {"schedule": DIVIDED_HEAD[number % 2], **extra})
            for number, (one, folder) in enumerate(zip(models, folders, strict=True))
        ]
        found = run_gloo(all_trained, size, cases)
        plain = [(*one, f"{folder}-plain", {"schedule": "1f1b"}) for one, folder in zip(models, folders, strict=True)]
        expected = all_trained(plain)
        for of_process in found:
            assert _are_close(of_process, expected)
        for folder in folders:
            ours, theirs = (
                {name: t for path in sorted(Path(one).glob("*.safetensors")) for name, t in load_file(path).items()}
                for one in (folder, f"{folder}-plain")
            )
            assert ours.keys() == theirs.keys()
            assert all(torch.allclose(ours[name], theirs[name], atol=1e-12) for name in ours)


def _are_close(found: list[list[float]], expected: list[list[float]]) -> bool:
    return all(one == pytest.approx(other, rel=1e-9) for one, other in zip(found, expected, strict=True))


def resumed(folder: str, schedule: str, steps: int, *, resumes: bool) -> list[float]:
    """The losses that are logged by a training, which writes a checkpoint every other step."""
    recorder = toy.Recorder()
    trainer = toy.trainer(
        Path(folder),
        family="llama",
        model=tiny_config("llama", tied=False),
        callbacks=[recorder],
        schedule=schedule,
        recompute="none",
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="constant",
    )
    trainer.train(resume_from_checkpoint=resumes)
    return recorder.losses


def test_a_run_resumes_with_a_divided_head_and_without(tmp_path: Path) -> None:
    """The state of the optimizer is that of whole tensors in the checkpoint."""
    expected = resumed(str(tmp_path / "plain"), "1f1b", 6, resumes=False)
    own = str(tmp_path / "own")
    resumed(own, "1f1b", 2, resumes=False)
    found = run_gloo(partial(resumed, resumes=True), 2, own, "vocab_1f1b", 4)[0]
    assert found == pytest.approx(expected[2:4], abs=2e-4)
    assert resumed(own, "1f1b", 6, resumes=True) == pytest.approx(expected[4:], abs=2e-4)
    state = load_file(next((tmp_path / "own" / "checkpoint-4" / "training_state").glob("*2-of*2.safetensors")))
    assert state["lm_head.weight/exp_avg"].shape == (VOCABULARY, 16)


def test_auto_divides_the_head_where_it_makes_the_last_stage_slow_or_full() -> None:
    """A table of names: what a step takes and what the fullest process holds, and what is chosen."""
    chosen = {}
    for vocabulary in (500, 100_000):
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4}
        config = tiny_config("llama", tied=False)
        config.update({**sizes, "num_key_value_heads": 4, "vocab_size": vocabulary, "head_dim": 64})
        example = Workload(32, 256, 256, has_padding=False)
        planner = planner_of(adapter_for(config), PlanInputs(example=example, optim="adamw_torch"), device("a100-80"))
        asked = PipelineConfig(num_stages=4, num_processes=4, num_micro_batches=16, recompute="none", partition="auto")
        plans = {name: best_plan(planner, asked.replace(schedule=name)) for name in ("1f1b", "vocab_1f1b", "auto")}
        chosen[vocabulary] = plans["auto"].settings.schedule in DIVIDED_HEAD
    assert plans["vocab_1f1b"].step_seconds < 0.65 * plans["1f1b"].step_seconds
    assert plans["vocab_1f1b"].settings.partition[-1] > 1
    last = {name: plan.processes[-1].memory for name, plan in plans.items()}
    assert last["vocab_1f1b"].optimizer < last["1f1b"].optimizer
    assert chosen == {500: False, 100_000: True}
