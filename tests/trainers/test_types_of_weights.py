"""In which type the trainers of TRL's interface read and train the weights of a checkpoint in bfloat16."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from hf_gpipe import (
    Pipeline,
    PipelineDPOConfig,
    PipelineDPOTrainer,
    PipelineGRPOConfig,
    PipelineGRPOTrainer,
    PipelineKTOConfig,
    PipelineKTOTrainer,
    PipelineRewardConfig,
    PipelineRewardTrainer,
    PipelineSFTConfig,
    PipelineSFTTrainer,
)
from hf_gpipe.errors import UserError
from hf_gpipe.training import optim
from tests.data.chat_templates import tokenizer
from tests.oracle import plain_model
from tests.trainers.test_dpo import config, plain_losses, rows, trained
from tests.training.toy import trainer as toy_trainer

ANSWERS = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in rows(4)]
TRAINERS: dict[str, tuple[type, type, Any, dict[str, Any]]] = {
    "SFT": (PipelineSFTTrainer, PipelineSFTConfig, [{"text": row["chosen"]} for row in rows(4)], {}),
    "DPO": (PipelineDPOTrainer, PipelineDPOConfig, rows(4), {}),
    "KTO": (PipelineKTOTrainer, PipelineKTOConfig, ANSWERS, {"per_device_train_batch_size": 2}),
    "Reward": (PipelineRewardTrainer, PipelineRewardConfig, rows(4), {}),
    "GRPO": (
        PipelineGRPOTrainer,
        PipelineGRPOConfig,
        [{"prompt": row["prompt"]} for row in rows(4)],
        {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4},
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint in bfloat16, with its tokenizer."""
    plain_model(config(), dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    words = tokenizer()
    words.pad_token = words.eos_token
    words.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def made(name: str, model: Any, folder: Path, **values: Any) -> Any:
    """A trainer with its defaults; GRPO's has a reward too."""
    trainer, arguments, dataset, own = TRAINERS[name]
    fixed = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "num_stages": 2, "num_micro_batches": 1}
    rewards = {"reward_funcs": length} if name == "GRPO" else {}
    words = tokenizer()
    words.pad_token = words.eos_token
    return trainer(
        model, args=arguments(**fixed, **own, **values), train_dataset=dataset, processing_class=words, **rewards
    )


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_step_of_dpo_is_that_of_weights_read_in_float32(saved: str, tmp_path: Path) -> None:
    """The weights were read and trained in bfloat16, which loses most updates at the learning rates of DPO."""
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    start = copy.deepcopy(plain)
    losses = plain_losses(plain, start, "sigmoid", rate=1e-4)
    mine, logs = trained(tmp_path, saved, learning_rate=1e-4, label_smoothing=0.1)
    assert [log["loss"] for log in logs if "loss" in log] == pytest.approx(losses, abs=1e-6)
    changed = 0.0
    for name, parameter in mine.pipe.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=0, atol=1e-6, msg=name)
        changed += float((parameter != start.get_parameter(name)).sum())
    # The embeddings of tokens that the rows lack do not change.
    assert changed > 0.5 * sum(parameter.numel() for parameter in plain.parameters())


@pytest.mark.parametrize("name", TRAINERS)
def test_a_checkpoint_is_read_in_the_type_that_trl_reads_it_in(name: str, saved: str, tmp_path: Path) -> None:
    """Only SFT read float32 as TRL does; the others trained in bfloat16, and had no model_init_kwargs."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    _, _, dataset, own = TRAINERS[name]
    in_memory = LlamaForCausalLM.from_pretrained(saved)
    for model, given in (
        (saved, None),
        (saved, {"dtype": "bfloat16"}),
        (saved, {"dtype": "auto"}),
        *([(in_memory, None)] if name != "Reward" else []),
    ):
        values = {"model_init_kwargs": given}
        mine = made(name, copy.deepcopy(model), tmp_path / "mine", **values)
        args = getattr(trl, f"{name}Config")(
            output_dir=str(tmp_path / "theirs"), use_cpu=True, report_to="none", **own, **values
        )
        rewards = {"reward_funcs": length} if name == "GRPO" else {}
        theirs = getattr(trl, f"{name}Trainer")(
            copy.deepcopy(model),
            args=args,
            train_dataset=Dataset.from_list(dataset),
            processing_class=tokenizer() if name != "Reward" else mine.processing_class,
            **rewards,
        )
        assert {one.dtype for one in mine.pipe.parameters()} == {one.dtype for one in theirs.model.parameters()}
        assert (mine.args.bf16, mine.args.fp16) == (theirs.args.bf16, theirs.args.fp16) == (True, False)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_checkpoint_is_read_in_float32_unless_another_type_is_asked_for(
    name: str, saved: str, tmp_path: Path
) -> None:
    """The rule of the test above, where TRL is not installed."""
    for given, dtype in ((None, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        mine = made(name, saved, tmp_path, model_init_kwargs=given)
        assert {one.dtype for one in mine.pipe.parameters()} == {dtype}
        assert mine.args.bf16


def test_a_reference_is_read_in_the_type_of_the_model(saved: str, tmp_path: Path, monkeypatch: Any) -> None:
    """A ref_model by its path was read in the type of its files, whatever the model's was."""
    found = []
    own = PipelineDPOTrainer._precompute
    monkeypatch.setattr(
        PipelineDPOTrainer, "_precompute", lambda self, pipe: (found.append(pipe.adapter.dtype), own(self, pipe))
    )
    trained(tmp_path, saved, options={"ref_model": saved}, max_steps=1)
    assert found == [torch.float32]


def test_options_of_a_model_that_is_not_read_are_an_error(saved: str, tmp_path: Path) -> None:
    """A Pipeline has its options already: model_init_kwargs had no effect on it."""
    given = {"model_init_kwargs": {"dtype": "bfloat16"}}
    arguments = PipelineSFTConfig(output_dir=str(tmp_path), use_cpu=True, **given)
    pipe = Pipeline(saved, 2, 1, loss=arguments.make_loss())
    with pytest.raises(UserError, match="model_init_kwargs is given, and the model is a Pipeline"):
        made("SFT", pipe, tmp_path, **given)
    with pytest.raises(UserError, match="quantization_config is an argument of the trainer and in model_init_kwargs"):
        trained(tmp_path, saved, options={"quantization_config": 1}, model_init_kwargs={"quantization_config": 2})
    with pytest.raises(UserError, match="model_init_kwargs are for a model that is read"):
        made("DPO", LlamaForCausalLM.from_pretrained(saved), tmp_path, **given)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(optim.logger, "warning", said.append)
    return said


@pytest.mark.parametrize(
    ("values", "is_lost"),
    [
        ({"learning_rate": 1e-6}, True),
        ({"learning_rate": 1e-6, "optim": "adafactor"}, True),
        ({"learning_rate": 1e-3}, False),
        ({"learning_rate": 1e-6, "fp32_master_weights": True}, False),
        # The updates of SGD are not of the size of its learning rate.
        ({"learning_rate": 1e-6, "optim": "sgd"}, False),
    ],
)
def test_updates_that_rounding_loses_are_told(
    values: dict[str, Any], is_lost: bool, tmp_path: Path, warnings: list[str]
) -> None:
    """A run whose weights stood still said nothing."""
    model = plain_model(config(), dtype=torch.bfloat16)
    before = copy.deepcopy(model)
    run = toy_trainer(tmp_path, family="llama", model=model, weight_decay=0, warmup_steps=0, max_steps=1, **values)
    run.train()
    changed = [parameter != before.get_parameter(name) for name, parameter in run.pipe.named_parameters()]
    if is_lost:
        assert sum(int(one.sum()) for one in changed) < sum(one.numel() for one in changed) / 2
    assert len(warnings) == is_lost
    assert all("rounding loses updates" in text and "fp32_master_weights=True" in text for text in warnings)


def test_adapters_in_float32_lose_nothing(tmp_path: Path, warnings: list[str], saved: str) -> None:
    peft = pytest.importorskip("peft")
    args = PipelineSFTConfig(output_dir=str(tmp_path), use_cpu=True, num_stages=2, max_steps=1, learning_rate=1e-6)
    run = PipelineSFTTrainer(
        LlamaForCausalLM.from_pretrained(saved),
        args=args,
        train_dataset=[{"text": "abc"}] * 8,
        processing_class=tokenizer(),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]),
    )
    assert {one.dtype for one in run.pipe.parameters() if one.requires_grad} == {torch.float32}
    run.train()
    assert not warnings
