"""The best model: chosen, saved, kept and loaded as by transformers' Trainer."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from hf_gpipe.data import PairCollator
from hf_gpipe.errors import UserError
from hf_gpipe.training import base, checkpoints, evaluator, loop
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, StopAt, trainer

NAN = math.nan
RESTORE = {"restore_callback_states_from_checkpoint": True}


def scores(values: list[float]) -> Callable[[Any], dict[str, float]]:
    """`compute_metrics` whose score takes these values, one in each evaluation."""
    left = iter(values)
    return lambda prediction: {"score": next(left)}


class Steps(TrainerCallback):
    """Notes the number of steps that are done."""

    now = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Steps.now = state.global_step


@pytest.mark.parametrize(
    ("values", "is_greater"),
    [
        ([NAN, 0.5, 0.7, 0.6], True),
        ([NAN, 0.5, 0.7, 0.3], False),
        ([0.5, NAN, 0.7, NAN], True),
        ([NAN, NAN, NAN, NAN], False),
        ([math.inf, 3.0, 2.0, NAN], False),
    ],
)
def test_nan_is_never_the_best(values: list[float], is_greater: bool, tmp_path: Path) -> None:
    """A first metric of NaN stayed the best: no number was better, rotation deleted the best checkpoint."""
    common: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "train_sampling_strategy": "sequential",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "greater_is_better": is_greater,
    }
    rows, evaluation, found = CausalRows(16), CausalRows(2, seed=1), []
    plain = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    for name in ("own", "plain"):
        options = {
            "train_dataset": rows,
            "eval_dataset": evaluation,
            "compute_metrics": scores(values),
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=3)],
        }
        model = plain_model(plain.config, dtype=torch.float32)
        model.load_state_dict(plain.state_dict())
        if name == "own":
            made: Any = trainer(tmp_path / name, family="llama", model=model, **options, **common)
        else:
            args = TrainingArguments(output_dir=str(tmp_path / name), use_cpu=True, disable_tqdm=True, **common)
            made = Trainer(model, args, data_collator=PairCollator(pad_token_id=0), **options)
        made.train()
        state = made.state
        best = state.best_model_checkpoint and Path(state.best_model_checkpoint).name
        # Here the newest checkpoint stays too, in Trainer only if it is the best.
        kept = {path.name for path in (tmp_path / name).glob("checkpoint-*")} - {f"checkpoint-{state.global_step}"}
        parameters = dict(made.pipe.named_parameters() if name == "own" else made.model.named_parameters())
        found.append((state.best_metric, state.best_global_step, best, state.global_step, kept, parameters))
    *own, mine = found[0]
    *others, theirs = found[1]
    assert own == others
    for parameter, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[parameter], rtol=0, atol=2e-5)


def resumed(folder: Path, values: list[float], **others: Any) -> Any:
    """A run whose first steps may be done; the score takes these values, one after each step."""
    common: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "score",
        "eval_dataset": CausalRows(2),
        "compute_metrics": scores(values),
        "max_steps": 4,
        "family": "llama",
    }
    run = trainer(folder, **common | others)
    run.train(resume_from_checkpoint=True)
    return run


def test_a_best_checkpoint_that_is_gone_is_told_when_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run died after its last step, with "Repo id must be in the form ...", and nothing of it was saved."""
    told: list[tuple[str, int]] = []
    for logger in (loop.logger, checkpoints.logger):
        monkeypatch.setattr(logger, "warning", lambda text: told.append((text, Steps.now)))
    resumed(tmp_path / "moved", [9, 1], callbacks=[StopAt(2)])
    # A best checkpoint that has moved together with the resumed one is found.
    (tmp_path / "moved").rename(tmp_path / "here")
    assert resumed(tmp_path / "here", [2, 3]).state.best_model_checkpoint == str(tmp_path / "here" / "checkpoint-1")
    assert told == []
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "here" / "checkpoint-4")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "here" / f"checkpoint-{step}")
    shutil.rmtree(tmp_path / "here" / "checkpoint-1")
    run = resumed(tmp_path / "here", [2, 3], callbacks=[Steps()])
    assert [(text.partition(" step ")[0], step) for text, step in told] == [
        ("the best model so far, of", 0),
        ("the best evaluation was that of", 4),
    ]
    assert run.state.global_step == 4
    for name, parameter in run.pipe.named_parameters():
        torch.testing.assert_close(parameter, saved.get_parameter(name), msg=name)


def test_a_best_checkpoint_that_is_damaged_does_not_cost_the_trained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(loop.logger, "warning", told.append)
    monkeypatch.setattr(checkpoints.logger, "warning", told.append)

    class Damage(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            file = tmp_path / "checkpoint-1" / "model.safetensors"
            if state.global_step == 4:
                content = bytearray(file.read_bytes())
                content[-1] ^= 1
                file.write_bytes(content)

    run = resumed(tmp_path, [9, 1, 2, 3], callbacks=[Damage()], num_stages=1)
    assert "model.safetensors" in told[0]
    assert "what is trained is not lost" in told[0]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    for name, parameter in run.pipe.named_parameters():
        torch.testing.assert_close(parameter, saved.get_parameter(name), msg=name)


def test_a_saved_state_without_its_callback_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience that was left of an EarlyStoppingCallback was dropped without a word; Trainer warns."""
    told: list[str] = []
    monkeypatch.setattr(base.logger, "warning", told.append)
    callback = EarlyStoppingCallback(early_stopping_patience=3)
    resumed(tmp_path, [3, 2], callbacks=[callback, StopAt(2)])
    again = EarlyStoppingCallback(early_stopping_patience=3)
    run = resumed(tmp_path, [1], callbacks=[again], max_steps=3, **RESTORE)
    (kept,) = [one for one in run.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]
    assert (kept.early_stopping_patience_counter, told) == (2, [])
    resumed(tmp_path, [1], **RESTORE)
    assert len(told) == 1
    assert told[0].startswith("the checkpoint has the state of EarlyStoppingCallback, and this training has no such")


def test_no_number_among_the_evaluations_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(loop.logger, "warning", told.append)
    values: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}
    trainer(
        tmp_path,
        family="llama",
        eval_dataset=CausalRows(2),
        compute_metrics=scores([NAN, NAN]),
        metric_for_best_model="score",
        load_best_model_at_end=True,
        **values,
    ).train()
    assert told == ["no evaluation gave a number as 'score', so none is the best; the model is that of step 2"]


def test_a_best_model_needs_a_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """save_strategy="best" without a metric trained to the end and saved nothing; Trainer raises an error."""
    values: dict[str, Any] = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    model, args = plain_model(tiny_config("llama")), TrainingArguments(output_dir=str(tmp_path), **values)
    with pytest.raises(ValueError, match="metric_for_best_model"):
        Trainer(model, args, eval_dataset=CausalRows(2))
    with pytest.raises(UserError, match="save_strategy='best' needs metric_for_best_model"):
        trainer(tmp_path, family="llama", eval_dataset=CausalRows(2), **values).train()
    told: list[str] = []
    monkeypatch.setattr(evaluator.logger, "warning", told.append)
    trainer(tmp_path, family="llama", max_steps=1, save_strategy="best", metric_for_best_model="loss").train()
    assert [text.split(",")[0] for text in told] == ["save_strategy='best' saves after evaluations"]
