"""Reward models on pairs: the loss, metrics and token ids of TRL's RewardTrainer, and of a plain loop."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, LlamaForSequenceClassification

from hf_gpipe import Pipeline, PipelineRewardConfig, PipelineRewardTrainer
from hf_gpipe.__main__ import main
from hf_gpipe.data import ExampleCollator
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.tasks.dpo import PreferenceExamples
from hf_gpipe.tasks.reward import RewardExamples, RewardLoss
from tests.data.chat_templates import tokenizer
from tests.trainers.test_dpo import config, rows
from tests.training.toy import Recorder, trained_alike, weights

COLLATE = ExampleCollator.for_tokenizer(tokenizer())
MARGINS = [0.5, -0.25, 1.0, 0.0, 2.0, 0.1]


def compared(count: int = 6) -> list[dict[str, Any]]:
    return [row | {"margin": MARGINS[number % 6]} for number, row in enumerate(rows(count))]


def plain_model(dtype: torch.dtype = torch.float64) -> Any:
    made = config()
    made.num_labels, made._attn_implementation = 1, "eager"
    made.pad_token_id = COLLATE.pad_token_id
    torch.manual_seed(0)
    return LlamaForSequenceClassification(made).to(dtype).train()


def plain_loss(model: Any, batch: dict[str, torch.Tensor], coefficient: float) -> tuple[torch.Tensor, torch.Tensor]:
    """TRL's formula, and the rewards (N, 2)."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    rewards = model(**inputs, use_cache=False).logits.view(-1, 2)
    chosen, rejected = rewards.unbind(1)
    loss = -F.logsigmoid(chosen - rejected - batch["labels"][::2]).mean()
    return loss + coefficient * ((chosen + rejected) ** 2).mean(), rewards.detach()


def made_trainer(folder: Path, model: Any, **values: Any) -> tuple[PipelineRewardTrainer, Recorder]:
    options = {name: values.pop(name) for name in ("peft_config", "train_dataset", "eval_dataset") if name in values}
    common: dict[str, Any] = {
        "num_stages": 3,
        "num_micro_batches": 2,
        "schedule": "gpipe",
        "recompute": "stage",
        "partition": "count",
        "max_steps": 3,
        "per_device_train_batch_size": 3,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }
    recorder = Recorder()
    made = PipelineRewardTrainer(
        model,
        PipelineRewardConfig(output_dir=str(folder), **common | values),
        processing_class=tokenizer(),
        callbacks=[recorder],
        **{"train_dataset": compared(9), **options},
    )
    return made, recorder


def trained(folder: Path, model: Any, **values: Any) -> tuple[PipelineRewardTrainer, list[dict[str, Any]]]:
    made, recorder = made_trainer(folder, model, **values)
    made.train()
    return made, recorder.logs


def test_loss_and_every_gradient() -> None:
    batch = COLLATE(list(RewardExamples(compared(5), tokenizer())))
    assert batch["labels"].tolist() == pytest.approx([0.5, 0.5, -0.25, -0.25, 1, 1, 0, 0, 2, 2])
    plain = plain_model()
    expected, _ = plain_loss(plain, batch, 0.3)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    norm = float(torch.stack([one.norm() for one in gradients.values()]).norm())
    for num_stages, count, schedule, recompute, buckets in (
        (1, 1, "gpipe", "none", False),
        (2, 2, "1f1b", "stage", False),
        (3, 3, "gpipe", "block", True),
        (3, 4, "zb_h1", "none", True),
    ):
        options: Any = {"length_bucketing": buckets, "loss": RewardLoss(0.3)}
        pipe = Pipeline(copy.deepcopy(plain), num_stages, count, schedule, recompute, **options)
        pipe.zero_grad()
        assert float(pipe.train_step(batch)) == pytest.approx(float(expected), abs=1e-10)
        for name, parameter in pipe.named_parameters():
            assert float((parameter.grad - gradients[name]).norm()) <= 1e-10 * norm, name  # type: ignore[operator]
        assert pipe.plan(batch).peak_bytes > 0


def test_training_against_a_plain_loop(tmp_path: Path) -> None:
    model = plain_model()
    start, examples = copy.deepcopy(model), RewardExamples(compared(9), tokenizer())
    optimizer = torch.optim.SGD(model.parameters())
    expected = []
    for step in range(3):
        batch = COLLATE([examples[index] for index in range(3 * step, 3 * step + 3)])
        loss, rewards = plain_loss(model, batch, 0.1)
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 3)
        optimizer.step()
        optimizer.zero_grad()
        margins = rewards[:, 0] - rewards[:, 1]
        expected.append(
            [loss.item(), float((margins > 0).double().mean()), margins.mean().item(), rewards.mean().item()]
        )
    made, logs = trained(tmp_path, start, center_rewards_coefficient=0.1, eval_dataset={"some": compared(4)})
    names = ["loss", "accuracy", "margin", "mean_reward"]
    found = [[one[name] for name in names] for one in logs if "loss" in one]
    assert found == [pytest.approx(values, abs=1e-7) for values in expected]
    parameters = weights(made)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1e-7, msg=name)
    batch = COLLATE(list(RewardExamples(compared(4), tokenizer())))
    loss, rewards = plain_loss(model, batch, 0.1)
    metrics = made.evaluate()
    assert metrics["eval_some_loss"] == pytest.approx(float(loss), abs=1e-6)
    assert metrics["eval_some_margin"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).mean()), abs=1e-6)


def test_a_language_model_gets_a_head_which_lora_trains(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = config()
    LlamaForCausalLM(made).save_pretrained(tmp_path / "base")
    base, short = str(tmp_path / "base"), {"max_steps": 1, "num_stages": 2}
    lora = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
    trainer, logs = trained(tmp_path / "out", base, peft_config=lora, **short)
    assert 0 <= logs[0]["accuracy"] <= 1
    assert "score.modules_to_save.default.weight" in dict(trainer.pipe.named_parameters())
    trainer.save_model(str(tmp_path / "adapters"))
    assert (tmp_path / "adapters/config.json").exists()  # the names of the classes, for merging
    assert main(["merge", str(tmp_path / "adapters"), "--output", str(tmp_path / "merged")]) == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    # With the trainer's padding, by which the model finds the last token of a row.
    batch = trainer.data_collator(list(RewardExamples(compared(4), tokenizer())))
    expected = trainer.evaluate(compared(4))["eval_loss"]
    assert float(plain_loss(merged, batch, 0.0)[0].detach()) == pytest.approx(expected, abs=1e-5)
    assert type(trainer.model).__name__ == "PeftModelForSequenceClassification"
    with pytest.raises(
        UserError, match="the head 'score' is new, and these adapters would not train it; set task_type"
    ):
        trained(tmp_path / "out", base, peft_config=peft.LoraConfig(target_modules=["q_proj"]), **short)
    trainer, _ = trained(tmp_path / "whole", base, **short)
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert again.config.num_labels == 1
    trainer, logs = trained(tmp_path / "more", str(tmp_path / "saved"), learning_rate=0.0, **short)
    batch = trainer.data_collator(list(RewardExamples(compared(3), tokenizer())))
    assert logs[0]["loss"] == pytest.approx(float(plain_loss(again, batch, 0.0)[0]), abs=1e-5)


def test_older_names_of_columns(tmp_path: Path) -> None:
    """Rows of ids by TRL's older names were taken for rows of text without answers."""
    from datasets import Dataset

    examples = RewardExamples(rows(3), tokenizer())
    older = [{f"{name}_input_ids": one[f"{name}_ids"] for name in ("chosen", "rejected")} for one in examples]
    with pytest.warns(FutureWarning, match="'chosen_input_ids' and 'rejected_input_ids'.*call them 'chosen_ids' and"):
        made, _ = made_trainer(tmp_path, plain_model(), train_dataset=Dataset.from_list(older))
    assert [made.train_dataset[0]["chosen_ids"]] == [examples[0]["chosen_ids"]]


def test_a_model_without_a_padding_token_gets_the_tokenizers(tmp_path: Path) -> None:
    """Configurations of published models, such as Qwen2.5, have none, and TRL trains them."""
    lacking = plain_model()
    lacking.config.pad_token_id = None
    _, logs = trained(tmp_path / "lacking", lacking)
    assert lacking.config.pad_token_id == COLLATE.pad_token_id
    _, expected = trained(tmp_path / "whole", plain_model())
    assert [log["loss"] for log in logs if "loss" in log] == [log["loss"] for log in expected if "loss" in log]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"center_rewards_coefficient: found -1 .*expected a number of at least 0"):
        PipelineRewardConfig(output_dir=str(tmp_path), center_rewards_coefficient=-1).check()
    several = plain_model()
    several.config.num_labels = several.num_labels = 2
    several.score = torch.nn.Linear(16, 2, bias=False).double()
    with pytest.raises(
        UserError,
        match=r"reward models require `num_labels=1`, .* is a LlamaForSequenceClassification with num_labels=2",
    ):
        trained(tmp_path, several)
    with pytest.raises(UserError, match="is a LlamaForCausalLM with num_labels"):
        trained(tmp_path, LlamaForCausalLM(config()))
    with pytest.raises(DataError, match="'prompt_ids': its answers are without their prompts; give the rows of text"):
        trained(tmp_path, plain_model(), train_dataset=PreferenceExamples(rows(2), tokenizer()))
    with pytest.raises(DataError, match="row 0: 'margin' is 'big'; it must be a number"):
        RewardExamples([rows(1)[0] | {"margin": "big"}], tokenizer())
    texts, tok = [{"chosen": "ab c", "rejected": "de"}], tokenizer()
    pair = RewardExamples(texts, tok)[0]  # nothing is common to them, so there is no prompt
    assert [pair["chosen_ids"], pair["rejected_ids"]] == [
        tok(f"{one}{tok.eos_token}").input_ids for one in ("ab c", "de")
    ]
    with pytest.raises(DataError, match="of 3 rows none is left in 2 tokens: 3 were dropped because they are longer;"):
        RewardExamples(rows(3), tokenizer(), max_length=2)


@pytest.mark.parametrize("has_lora", [True, False])
def test_thirty_steps_of_trl(has_lora: bool, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    common: dict[str, Any] = {
        "max_steps": 30,
        "learning_rate": 2e-3,
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "max_length": 20,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "bf16": False,
        "gradient_checkpointing": False,
        "center_rewards_coefficient": 0.01,
    }
    model, recorder, options = plain_model(torch.float32), Recorder(), {}
    if has_lora:
        peft = pytest.importorskip("peft")
        targets = ["q_proj", "v_proj", "down_proj"]
        options["peft_config"] = peft.LoraConfig(r=4, task_type="SEQ_CLS", target_modules=targets)
    datasets = {"train_dataset": compared(40), "eval_dataset": compared(4)}
    made, ours = made_trainer(tmp_path, copy.deepcopy(model), num_stages=2, **options, **datasets, **common)
    theirs = RewardTrainer(
        model,
        RewardConfig(output_dir=str(tmp_path / "trl"), use_cpu=True, disable_tqdm=True, report_to="none", **common),
        processing_class=tokenizer(),
        callbacks=[recorder],
        **{name: Dataset.from_list(rows) for name, rows in datasets.items()},
        **options,
    )
    trained_alike(made, theirs, (ours, recorder), ("accuracy", "margin", "mean_reward"))
