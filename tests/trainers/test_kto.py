"""Answers that are wanted or not: loss, gradients and metrics of a plain loop, and 30 steps of TRL's KTOTrainer."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from hf_gpipe import Pipeline, PipelineKTOConfig, PipelineKTOTrainer
from hf_gpipe.adapters.peft import without_adapters
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.tasks.kto import KTOCollator, KTOExamples, KTOLoss
from tests.data.chat_templates import tokenizer
from tests.oracle import plain_model
from tests.trainers.test_dpo import config, log_probs_of
from tests.training.toy import Recorder, trained_alike

peft = pytest.importorskip("peft")
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def text() -> str:
        return "".join(rng.choices("abcdef ", k=rng.randint(2, 12)))

    return [{"prompt": f"{text()}:", "completion": text(), "label": rng.random() < 0.6} for _ in range(count)]


def adapted(seed: int = 1) -> Any:
    """A plain model with adapters that are not as they begin."""
    torch.manual_seed(seed)
    made = peft.get_peft_model(plain_model(config()), peft.LoraConfig(**LORA))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def plain_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor], loss: KTOLoss) -> torch.Tensor:
    """The formulas of TRL."""
    mismatched = {name.removeprefix("KL_"): one for name, one in batch.items() if name.startswith("KL_")}
    with torch.no_grad():
        z = log_probs_of(model, mismatched)
        with without_adapters(model):
            z, ref = (z - log_probs_of(model, mismatched)).mean().clamp(min=0), log_probs_of(model, batch)
    ratios, wanted = log_probs_of(model, batch) - ref, batch["desirable"]
    if loss.loss_type == "kto":
        losses = torch.where(wanted, 1 - (loss.beta * (ratios - z)).sigmoid(), 1 - (loss.beta * (z - ratios)).sigmoid())
    else:
        losses = torch.where(wanted, 1 - (loss.beta * ratios).sigmoid(), (loss.beta * ratios).sigmoid())
    return (losses * torch.where(wanted, loss.desirable_weight, loss.undesirable_weight)).mean()


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_loss_and_every_gradient(loss_type: str) -> None:
    loss = KTOLoss(0.4, loss_type, 1.0, 0.7)
    examples = list(KTOExamples(rows(7), tokenizer()))
    batch = KTOCollator(0, 20, loss.reads_mismatches)(examples)
    plain = adapted()
    mismatched = KTOCollator(0, 20)(examples)
    expected = plain_loss(plain, mismatched, loss)
    expected.backward()
    found = {n.removeprefix("base_model.model."): p.grad for n, p in plain.named_parameters() if p.grad is not None}
    for num_stages, count, schedule, recompute, buckets in (
        (1, 1, "gpipe", "none", False),
        (2, 2, "1f1b", "stage", False),
        (3, 5, "zb_h1", "none", True),
        (3, 3, "gpipe", "block", False),
    ):
        pipe = Pipeline(
            copy.deepcopy(plain), num_stages, count, schedule, recompute, loss=loss, length_bucketing=buckets
        )
        pipe.has_new_adapters = True  # in place of new ones, of which all gradients would be of one matrix
        pipe.zero_grad()
        assert float(pipe.train_step(batch)) == pytest.approx(expected.item(), abs=1e-10)
        for name, parameter in pipe.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, found[name], rtol=0, atol=1e-10, msg=name)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.item(), abs=1e-10)


def made_trainer(folder: Path, model: Any, dataset: Any, **values: Any) -> tuple[PipelineKTOTrainer, Recorder]:
    common: dict[str, Any] = {"num_stages": 2, "num_micro_batches": 2, "bf16": False, "save_strategy": "no"}
    options, recorder = {name: values.pop(name) for name in ("peft_config",) if name in values}, Recorder()
    made = PipelineKTOTrainer(
        model,
        args=PipelineKTOConfig(output_dir=str(folder), use_cpu=True, **common | values),
        train_dataset=dataset,
        eval_dataset=rows(4, seed=5),
        processing_class=tokenizer(),
        callbacks=[recorder],
        **options,
    )
    return made, recorder


def test_what_is_refused(tmp_path: Path) -> None:
    for values, message in (
        ({"beta": 0.0}, "beta: found 0.0 .*expected a number above 0"),
        ({"loss_type": "bco"}, "loss_type: found 'bco' .*expected 'kto' or 'apo_zero_unpaired'"),
        ({"desirable_weight": -1.0}, "desirable_weight: found -1.0 .*expected a number of at least 0"),
        ({"per_device_train_batch_size": 1}, "loss_type='kto' reads prompts with the answers of other prompts"),
        ({"train_sampling_strategy": "random"}, "are computed once, for the mini-batches of the rows in their order"),
    ):
        with pytest.raises(UserError, match=message):
            made_trainer(tmp_path, plain_model(config()), rows(4), **values)
    for row, message in (
        ({"label": "yes"}, "row 0: 'label' is 'yes'; it must be true or 1 where the completion is wanted"),
        ({"label": 0.5}, "row 0: 'label' is 0.5"),
        ({"label": 2}, "row 0: 'label' is 2"),
        ({"label": None}, "row 0: 'label' is None"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, "row 0: 'prompt' is not, 'chosen' is text"),
    ):
        with pytest.raises(DataError, match=message):
            KTOExamples([rows(1)[0] | row], tokenizer())
    pipe = Pipeline(plain_model(config()), 2, 2, loss=KTOLoss())
    with pytest.raises(DataError, match="the batch has no 'KL_labels', which KTO reads"):
        pipe.train_step(KTOCollator(0, has_mismatches=False)(list(KTOExamples(rows(2), tokenizer()))))


def test_pairs_are_rows_of_single_answers() -> None:
    """Rows of pairs were an error. TRL takes them apart: of each 1,000 pairs all chosen answers come first."""
    pairs = [{"prompt": f"{n % 7}:", "chosen": f"a{n % 5}", "rejected": f"b{n % 3}"} for n in range(1002)]
    sides = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for part in (pairs[:1000], pairs[1000:])
        for name in ("chosen", "rejected")
        for pair in part
    ]
    expected = list(KTOExamples(sides, tokenizer()))
    assert list(KTOExamples(pairs, tokenizer())) == expected
    implicit = [{name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")} for pair in pairs[:3]]
    found = list(KTOExamples(implicit, tokenizer()))
    assert found == [*expected[:3], *expected[1000:1003]]


def test_the_auxiliary_loss_of_experts_is_on_unless_its_weight_is_0(tmp_path: Path) -> None:
    """It was only on in SFT; TRL's other trainers turn it on too, by the configuration's weight."""
    values = {name: value for name, value in config().to_dict().items() if name not in ("model_type", "dtype")}
    of_experts = MixtralConfig(**values, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5)
    logs = {}
    for weight in (None, 0.0):
        torch.manual_seed(0)
        model = MixtralForCausalLM(copy.deepcopy(of_experts))
        options = {"router_aux_loss_coef": weight, "num_micro_batches": 1, "max_steps": 1, "logging_steps": 1}
        made, recorder = made_trainer(tmp_path, copy.deepcopy(model), rows(4), **options, learning_rate=0.0)
        made.train()
        logs[weight] = recorder.logs[0]
    batch = KTOCollator(0, 1024)([made.train_dataset[number] for number in range(4)])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**inputs, output_router_logits=True).aux_loss.item()
    assert "aux_loss" not in logs[0.0]
    assert logs[None]["aux_loss"] == pytest.approx(expected, rel=1e-5)
    assert logs[None]["loss"] - logs[0.0]["loss"] == pytest.approx(0.5 * expected, rel=1e-5)


def test_labels_of_zero_and_one() -> None:
    """Labels 0 and 1, as scripts have them, were errors; TRL reads them as false and true."""
    given = rows(6)
    numbered = [row | {"label": int(row["label"])} for row in given]
    assert list(KTOExamples(numbered, tokenizer())) == list(KTOExamples(given, tokenizer()))


@pytest.mark.parametrize(("has_lora", "loss_type"), [(True, "kto"), (False, "kto"), (True, "apo_zero_unpaired")])
def test_thirty_steps_of_trl(has_lora: bool, loss_type: str, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    common: dict[str, Any] = {
        "max_steps": 30,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "max_length": 18,
        "beta": 0.3,
        "loss_type": loss_type,
        "undesirable_weight": 0.8,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "bf16": False,
        "save_strategy": "no",
    }
    options = {"peft_config": peft.LoraConfig(**LORA)} if has_lora else {}
    model, recorder = plain_model(config(), dtype=torch.float32), Recorder()
    start = copy.deepcopy(model)
    other = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "gradient_checkpointing": False}
    by_trl = KTOTrainer(
        model,
        None if has_lora else copy.deepcopy(model),
        args=KTOConfig(output_dir=str(tmp_path / "trl"), **common, **other),
        train_dataset=Dataset.from_list(rows(50)),
        eval_dataset=Dataset.from_list(rows(4, seed=5)),
        processing_class=tokenizer(),
        callbacks=[recorder],
        **options,
    )
    made, own = made_trainer(tmp_path, start, rows(50), **common, **options)
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
    trained_alike(made, by_trl, (own, recorder), names)
