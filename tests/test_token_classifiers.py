"""Classifiers of tokens: loss and gradients of a plain loop, and a head that LoRA trains."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForTokenClassification, LlamaForCausalLM, LlamaForTokenClassification

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.__main__ import main
from hf_gpipe.adapters.token_classifiers import as_token_classifier
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import DataError, UserError
from tests.trainers.test_dpo import config
from tests.training.toy import arguments

ROWS = [
    {"input_ids": [number % 9 + 1, *range(3, 6 + number)], "labels": [-100, number % 2, *[-100] * (1 + number), 1]}
    for number in range(7)
]


def plain_model(dtype: torch.dtype = torch.float64) -> Any:
    made = config()
    made.num_labels, made.classifier_dropout = 2, 0.0  # type: ignore[attr-defined]
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    return LlamaForTokenClassification(made).to(dtype).train()


def test_loss_and_every_gradient(tmp_path: Path) -> None:
    batch = PairCollator(0)(ROWS)
    plain = plain_model()
    logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    expected = F.cross_entropy(logits.transpose(1, 2), batch["labels"])  # the mean over the labels
    expected.backward()
    for num_stages, count, schedule, recompute in (
        (1, 1, "gpipe", "none"),
        (2, 3, "1f1b", "stage"),
        (3, 5, "zb_h1", "none"),
    ):
        pipe = Pipeline(copy.deepcopy(plain), num_stages, count, schedule, recompute)
        assert float(pipe.train_step(batch)) == pytest.approx(expected.item(), abs=1e-10)
        for name, parameter in pipe.named_parameters():
            wanted = dict(plain.named_parameters())[name].grad
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=1e-10, msg=name)
    assert pipe.plan(batch).peak_bytes > 0
    pipe.save_pretrained(tmp_path)
    again = Pipeline(str(tmp_path), 2, 2, attn_implementation="eager")
    assert again.eval_step(batch).loss == pytest.approx(expected.item(), abs=1e-7)


def test_a_language_model_gets_a_head_which_lora_trains(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = config()
    LlamaForCausalLM(made).save_pretrained(tmp_path / "base")
    pipe = Pipeline(
        str(tmp_path / "base"),
        2,
        2,
        config_overrides=as_token_classifier(made, ["wrong", "right"]),
        peft_config=peft.LoraConfig(task_type="TOKEN_CLS", target_modules=["q_proj"]),
    )
    args = arguments(tmp_path / "out", max_steps=2, logging_steps=1)
    trainer = PipelineTrainer(pipe, args, PairCollator(0), ROWS, ROWS)
    trainer.train()
    batch = PairCollator(0)(ROWS)
    loss = pipe.eval_step(batch).loss
    trainer.save_model(str(tmp_path / "adapters"))
    assert main(["merge", str(tmp_path / "adapters"), "--output", str(tmp_path / "merged")]) == 0
    assert json.loads((tmp_path / "merged/config.json").read_text())["label2id"] == {"wrong": 0, "right": 1}
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged").eval()
    assert merged(**batch).loss.item() == pytest.approx(loss, abs=1e-5)


def test_what_is_refused() -> None:
    plain = plain_model()
    plain.config.classifier_dropout = 0.1
    with pytest.raises(UserError, match="dropout before the head of tokens is not supported"):
        Pipeline(plain, 2, 2)
    batch = PairCollator(0)([{"input_ids": [1, 2], "labels": [-100, 2]}])
    with pytest.raises(DataError, match="labels has 2, and the model has 2 classes"):
        Pipeline(plain_model(), 2, 2).train_step(batch)
