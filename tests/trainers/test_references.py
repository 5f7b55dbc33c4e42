"""References in memory: a copy of the trained weights, which may follow the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_gpipe import PipelineDPOTrainer
from hf_gpipe.data import PreferenceCollator, PreferenceExamples
from hf_gpipe.errors import UserError
from tests.data.chat_templates import tokenizer
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.trainers.test_dpo import arguments, config, log_probs_of, rows
from tests.training.toy import Recorder, weights

SYNC: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.7}


def tied() -> Any:
    made: Any = tiny_config("llama")
    made.vocab_size = 320
    return made


def _followed(folder: str) -> tuple[list[float], float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    made = PipelineDPOTrainer(
        plain_model(tied()),
        args=arguments(folder, schedule="1f1b", max_steps=5, **SYNC),
        train_dataset=rows(),
        processing_class=tokenizer(),
        callbacks=[recorder := Recorder()],
    )
    made.train()
    reference = {name: p.detach() for name, p in made.ref_model.named_parameters() if not p.is_meta}
    evaluated = made.evaluate(rows(4, seed=2))["eval_loss"]
    return [one["loss"] for one in recorder.logs if "loss" in one], evaluated, weights(made), reference


def _loss(model: PreTrainedModel, reference: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        before = log_probs_of(reference, batch)
    ratios = (log_probs_of(model, batch) - before).view(-1, 2)
    return -F.logsigmoid(0.5 * (ratios[:, 0] - ratios[:, 1])).mean()


def test_the_trained_model_is_no_reference(tmp_path: Path) -> None:
    """Its weights would be those of the reference in each step of a stream, which then learnt from nothing."""
    model = plain_model(tied())
    with pytest.raises(UserError, match="`model` and `ref_model` are the same object, whose weights are trained"):
        PipelineDPOTrainer(model, model, arguments(tmp_path), train_dataset=rows(), processing_class=tokenizer())


def test_a_reference_that_follows_in_two_processes_against_a_plain_loop(tmp_path: Path) -> None:
    """TR-DPO with a tied weight, of which both processes have a copy: after a move both copies must have moved alike,
    also in an evaluation, in which the copies are refreshed once."""
    results = run_gloo(_followed, 2, str(tmp_path))
    model = plain_model(tied())
    reference, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters())
    examples, losses = PreferenceExamples(rows(), tokenizer()), []
    for step in range(5):
        batch = PreferenceCollator(0)([examples[index] for index in range(3 * step, 3 * step + 3)])
        loss = _loss(model, reference, batch)
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2:
            for before, now in zip(reference.parameters(), model.parameters(), strict=True):
                before.data = 0.3 * before.data + 0.7 * now.data
    held_out = PreferenceCollator(0)(list(PreferenceExamples(rows(4, seed=2), tokenizer())))
    for logged, evaluated, trained, kept in results:
        assert logged == pytest.approx(losses, abs=1e-7)
        assert evaluated == pytest.approx(float(_loss(model, reference, held_out)), abs=1e-7)
        for name, tensor in trained.items():
            torch.testing.assert_close(tensor, model.get_parameter(name), rtol=0, atol=1e-7, msg=name)
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor, reference.get_parameter(name), rtol=0, atol=1e-7, msg=name)
    assert {name for *_, kept in results for name in kept} == dict(reference.named_parameters()).keys()


def test_ref_model_is_the_model_that_was_given(tmp_path: Path) -> None:
    """A trainer had no ref_model, which scripts of TRL read."""
    other = plain_model(config(), seed=3)
    for given, expected in ((other, other), (None, None)):
        made = PipelineDPOTrainer(
            plain_model(config()), given, arguments(tmp_path), train_dataset=rows(4), processing_class=tokenizer()
        )
        assert made.ref_model is expected


def test_what_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    for values, message in (
        (
            {"ref_model_sync_steps": 3},
            "ref_model_sync_steps is 3 .* and sync_ref_model is false, so the reference stays",
        ),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "precompute_ref_log_probs is true .*changes"),
        ({"sync_ref_model": True, "loss_type": "orpo"}, "sync_ref_model is true .*loss_type is orpo, so no reference"),
        ({"sync_ref_model": True, "ref_model_mixup_alpha": 0.0}, "ref_model_mixup_alpha: found 0.0"),
        ({"truncation_mode": "keep_end"}, "truncation_mode='keep_end'"),
    ):
        with pytest.raises(UserError, match=message):
            arguments(tmp_path, **values)
    args, data = arguments(tmp_path, **SYNC), {"train_dataset": rows(4), "processing_class": tokenizer()}
    with pytest.raises(UserError, match="ref_model is another reference; leave one of them out"):
        PipelineDPOTrainer(config(), config(), args, **data)
    with pytest.raises(UserError, match="the model without its new adapters, which never changes"):
        PipelineDPOTrainer(config(), args=args, peft_config=LoraConfig(target_modules=["q_proj"]), **data)
    with pytest.raises(UserError, match="`train_dataset` is required"):
        PipelineDPOTrainer(config(), args=arguments(tmp_path), processing_class=tokenizer())
    args = arguments(tmp_path, save_strategy="steps", save_steps=2, **SYNC)
    made = PipelineDPOTrainer(config(), args=args, **data)
    made.train()
    with pytest.raises(UserError, match="checkpoints do not have the reference, which has moved"):
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
