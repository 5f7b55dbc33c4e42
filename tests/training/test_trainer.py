"""The trainer: the plain Trainer's numbers and events, on any number of stages, and the same in every process."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hf_gpipe import Pipeline, PipelineTrainer
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import CheckpointError, DataError, UserError
from hf_gpipe.job import failures
from hf_gpipe.training import loop
from hf_gpipe.training.optim import make_optimizer
from hf_gpipe.training.stopping import TrainingStopped
from tests.data.chat_templates import tokenizer
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.training.toy import CausalRows, Recorder, Rows, StopAt, Stream, arguments, trainer, weights


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance, msg=name)


# ---------------------------------------------------------------------- beside transformers' Trainer


@pytest.mark.parametrize(("accumulation", "optim"), [(1, "adafactor"), (2, "adamw_torch_fused")])
def test_the_plain_trainer_s_numbers_and_events(accumulation: int, optim: str, tmp_path: Path) -> None:
    """Llama, whose own loss counts the tokens of all accumulated mini-batches, so that the two agree."""
    common: dict[str, Any] = {
        "max_steps": 7,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 1e-2,
        "optim": optim,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "train_sampling_strategy": "sequential",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    rows, evaluation = CausalRows(22), CausalRows(5, seed=1)
    plain_events, events = Recorder(), Recorder()
    plain = plain_model(tiny_config("llama", tied=False), dtype=torch.float32)
    own = trainer(
        tmp_path / "own",
        model=plain_copy(plain),
        train_dataset=rows,
        eval_dataset=evaluation,
        callbacks=[events],
        **common,
    )
    own.train()
    reference = Trainer(
        plain,
        TrainingArguments(output_dir=str(tmp_path / "plain"), use_cpu=True, disable_tqdm=True, **common),
        data_collator=PairCollator(pad_token_id=0),
        train_dataset=rows,
        eval_dataset=evaluation,
        callbacks=[plain_events],
    )
    reference.train()
    assert events.events == plain_events.events
    assert_close(weights(own), dict(plain.named_parameters()), 2e-5)
    assert events.losses == pytest.approx(plain_events.losses, abs=1e-4)
    for ours, theirs in zip(events.logs, plain_events.logs, strict=True):
        own_metrics = {"total_flos", "tokens_per_second", "training_seconds", "seconds_left"}
        own_metrics |= {name for name in ours if name.startswith("peak_memory_bytes")}
        assert ours.keys() - own_metrics == theirs.keys() - own_metrics
        for name in ("learning_rate", "epoch"):
            assert ours.get(name) == pytest.approx(theirs.get(name))
        if "grad_norm" in ours:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def plain_copy(model: Any) -> Any:
    copy = plain_model(model.config, dtype=torch.float32)
    copy.load_state_dict(model.state_dict())
    return copy


# ---------------------------------------------------------------------- stages, processes, accumulation


def test_stages_change_nothing(tmp_path: Path) -> None:
    """Dropout is on, and the number of layers divides by none of them."""
    results = []
    for num_stages, recompute in [(1, "none"), (2, "stage"), (7, "block")]:
        recorder = Recorder()
        made = trainer(tmp_path, num_stages=num_stages, recompute=recompute, callbacks=[recorder], dropout=0.2)
        made.train()
        results.append((recorder.losses, weights(made)))
    assert results[0][0][0] != results[0][0][-1]
    for losses, parameters in results[1:]:
        assert losses == pytest.approx(results[0][0], abs=1e-5)
        assert_close(parameters, results[0][1], 1e-4)


def _train(folder: str) -> tuple[Any, ...]:
    """Only the main process has data, and only process 1 asks for a checkpoint and for the end."""
    recorder = Recorder()
    made = trainer(
        Path(folder),
        callbacks=[recorder, _SaveAndStop()],
        compute_metrics=_accuracy,
        max_steps=20,
        eval_steps=2,
        eval_strategy="steps",
        eval_dataset=Rows(5, seed=3),
        gradient_accumulation_steps=2,
    )
    if not made.world.is_main:
        made.train_dataset = made.eval_dataset = None
    output = made.train()
    evaluation = made.evaluate()
    prediction = made.predict(Rows(5, seed=3) if made.world.is_main else None)
    made.save_model()
    saved = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return recorder.events, recorder.logs, tuple(output), evaluation, prediction, weights(made), saved


class _SaveAndStop(TrainerCallback):
    """Decides in process 1 alone, as a callback that looks at the clock would."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero or state.max_steps < 20:
            control.should_save = state.global_step == 3
            control.should_training_stop = state.global_step == 4


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    found, labels = prediction.predictions.argmax(-1), prediction.label_ids
    return {"accuracy": np.float64((found == labels)[labels != -100].mean())}


def test_two_processes_do_the_same(tmp_path: Path) -> None:
    first, second = run_gloo(_train, 2, str(tmp_path))
    for ours, theirs in zip(first[:4], second[:4], strict=True):
        assert ours == theirs
    np.testing.assert_array_equal(first[4].predictions, second[4].predictions)
    assert first[4].metrics == second[4].metrics
    assert first[6] == ["checkpoint-3"]
    assert first[2][0] == 4, "process 1 asked to stop after 4 updates"
    alone = trainer(tmp_path / "one", gradient_accumulation_steps=2, max_steps=20, callbacks=[StopAt(4)])
    alone.train()
    assert_close(first[5], weights(alone), 1e-5)
    metrics = first[3]
    assert metrics["eval_loss"] == pytest.approx(alone.evaluate(Rows(5, seed=3))["eval_loss"], abs=1e-5)
    assert 0 <= metrics["eval_accuracy"] <= 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == [logs["loss"] for logs in first[1] if "loss" in logs]
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_accumulation_is_one_larger_mini_batch(family: str, tmp_path: Path) -> None:
    """Without dropout: its seeds count micro-batches. With M twice as large the micro-batches are the same rows."""
    common = {"family": family, "dropout": 0.0, "train_sampling_strategy": "sequential", "num_train_epochs": 2.0}
    small = trainer(tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=-1, **common)
    large = trainer(tmp_path, per_device_train_batch_size=8, num_micro_batches=4, max_steps=-1, **common)
    assert small.train().global_step == large.train().global_step == 6
    assert_close(weights(small), weights(large), 1e-6)


# ---------------------------------------------------------------------- data


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_have_their_own_order_and_every_row_once(workers: int, tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Spy(Rows):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            return super().__getitem__(index) | {"labels": [3 + index]}

    def spy(rows: list[dict[str, list[int]]]) -> Any:
        return PairCollator(0)(rows)

    made = trainer(tmp_path, train_dataset=Spy(10), data_collator=spy, dataloader_num_workers=workers)
    batches = made.train_batches()
    assert batches is not None
    for epoch in range(2):
        seen.append([label - 3 for batch in batches.epoch(epoch) for label in batch["labels"].flatten().tolist()])
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(10))
    assert seen[0] != seen[1]
    again = [label - 3 for batch in batches.epoch(1, start=1) for label in batch["labels"].flatten().tolist()]
    assert again == seen[1][4:]


@pytest.mark.parametrize("dataset", [Rows(24), Stream(24)])
@pytest.mark.parametrize("workers", [0, 2])
def test_random_collators_are_a_function_of_the_place(dataset: Any, workers: int, tmp_path: Path) -> None:
    if isinstance(dataset, Stream) and workers:
        pytest.skip("an iterable dataset is read in the main process")

    def collate(rows: list[dict[str, list[int]]]) -> Any:
        return PairCollator(0)(rows) | {"noise": torch.rand(len(rows), 1), "more": torch.tensor(np.random.rand(4, 1))}

    made = trainer(tmp_path, train_dataset=dataset, data_collator=collate, dataloader_num_workers=workers)
    batches = made.train_batches()
    assert batches is not None
    whole = list(batches.epoch(1))
    torch.rand(3)
    for found, expected in zip(batches.epoch(1, start=2), whole[2:], strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(whole[0]["noise"], whole[1]["noise"])


def test_rows_of_similar_length_share_a_mini_batch(tmp_path: Path) -> None:
    padding = {}
    for strategy in ("random", "group_by_length"):
        batches = trainer(tmp_path, train_dataset=Rows(40), train_sampling_strategy=strategy).train_batches()
        assert batches is not None
        masks = [batch["attention_mask"] for batch in batches.epoch(0)]
        assert sum(len(mask) for mask in masks) == 40
        padding[strategy] = sum(int((mask == 0).sum()) for mask in masks)
    assert padding["group_by_length"] < padding["random"] / 3


def test_an_iterable_dataset(tmp_path: Path) -> None:
    """The stream ends within the training and starts again; 6 rows are left for the last mini-batch."""
    made = trainer(tmp_path, train_dataset=Stream(10), max_steps=7)
    assert made.train().global_step == 7
    with pytest.raises(UserError, match="max_steps"):
        trainer(tmp_path, train_dataset=Stream(10), max_steps=-1).train()
    assert trainer(tmp_path, train_dataset=Stream(0)).train().global_step == 0


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    class Wide(Rows):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) | {"comment": "no tensor"}

    keys: set[str] = set()

    def collate(rows: list[dict[str, Any]]) -> Any:
        keys.update(*rows)
        return PairCollator(0)(rows)

    trainer(tmp_path, train_dataset=Wide(), data_collator=collate, max_steps=1).train()
    assert keys == {"input_ids", "labels"}


# ---------------------------------------------------------------------- evaluation


def test_evaluation_of_several_datasets_and_early_stopping(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        max_steps=40,
        learning_rate=0.0,
        eval_dataset={"a": Rows(3, seed=1), "b": Rows(5, seed=2)},
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="b_loss",
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    # The learning rate is 0, so nothing gets better: after the first evaluation, two more are allowed.
    assert made.train().global_step == 6
    assert made.state.best_global_step == 2
    assert made.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert {"eval_a_loss", "eval_b_loss"} <= made.evaluate().keys()


def test_a_best_model_that_was_not_saved_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(loop.logger, "warning", told.append)
    saving = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    # The learning rate is 0, so nothing gets better than the first evaluation, after which nothing is saved.
    evaluating = {"eval_dataset": Rows(3, seed=1), "eval_strategy": "steps", "eval_steps": 1}
    trainer(tmp_path, max_steps=2, learning_rate=0.0, **saving, **evaluating).train()
    assert told == [
        "the best evaluation was that of step 1, of which there is no checkpoint; the model is that of step 2. Save as "
        "often as you evaluate to get the best one"
    ]


def test_predictions_are_the_plain_model_s(tmp_path: Path) -> None:
    config = tiny_config("marian")
    plain = plain_model(config, dtype=torch.float32).eval()
    made = trainer(tmp_path, model=plain, per_device_eval_batch_size=3)
    rows = Rows(7, seed=3)
    prediction = made.predict(rows)
    collate = PairCollator(0)
    batch = collate([rows[index] for index in range(7)])
    with torch.no_grad():
        logits = plain(**batch).logits
    is_target = batch["labels"] != -100
    assert prediction.predictions.shape == (*batch["labels"].shape, config.vocab_size)
    np.testing.assert_array_equal(prediction.label_ids, batch["labels"].numpy())
    torch.testing.assert_close(torch.tensor(prediction.predictions)[is_target], logits[is_target], rtol=0, atol=1e-5)
    losses = []
    for start in (0, 3, 6):
        part = is_target[start : start + 3]
        of_part = logits[start : start + 3][part], batch["labels"][start : start + 3][part]
        losses += [float(torch.nn.functional.cross_entropy(*of_part))] * len(part)
    assert prediction.metrics["test_loss"] == pytest.approx(sum(losses) / 7, abs=1e-5), "Trainer's: a mean over rows"


def test_less_of_the_logits_may_be_kept(tmp_path: Path) -> None:
    widths: list[torch.Size] = []

    def preprocess(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        widths.append(logits.shape)
        return logits.argmax(-1), logits.logsumexp(-1).mean(-1)

    made = PipelineTrainer(
        tiny_config("marian"),
        arguments(tmp_path, include_for_metrics=["inputs", "loss"]),
        PairCollator(0),
        eval_dataset=Rows(9, seed=3),
        compute_metrics=lambda p: {"rows": len(p.predictions[1]), "inputs": p.inputs.shape[0], "losses": len(p.losses)},
        preprocess_logits_for_metrics=preprocess,
    )
    metrics = made.evaluate()
    assert (metrics["eval_rows"], metrics["eval_inputs"], metrics["eval_losses"]) == (9, 9, 9)
    assert [shape[0] for shape in widths] == [4, 4, 1], "it sees one micro-batch at a time"
    predictions, means = made.predict(Rows(9, seed=3)).predictions
    assert predictions.shape == (9, 9)
    assert means.shape == (9,)


def test_what_is_as_wide_as_a_micro_batch_by_chance_has_no_columns_of_its_own(tmp_path: Path) -> None:
    """Of four numbers for each row, those of a micro-batch of four columns were filled up with -100."""
    plain = plain_model(tiny_config("marian"), dtype=torch.float32).eval()
    rows = Rows(4)
    rows.rows = [[3, 4, 5], [6, 7, 8], [3, 4, 5, 6, 7], [8, 7, 6, 5, 4]]  # with the end 4, 4, 6 and 6 targets
    keep = lambda logits, labels: (logits.amax(1)[:, :4], logits.argmax(-1))  # noqa: E731  it is short
    made = trainer(
        tmp_path, model=plain, num_micro_batches=2, per_device_eval_batch_size=4, preprocess_logits_for_metrics=keep
    )
    values, tokens = made.predict(rows).predictions
    with torch.no_grad():
        halves = [PairCollator(0)([rows[index] for index in pair]) for pair in ((0, 1), (2, 3))]
        expected = [keep(plain(**half).logits, half["labels"]) for half in halves]
    torch.testing.assert_close(torch.tensor(values), torch.cat([of_half for of_half, _ in expected]))
    assert tokens[:2].tolist() == [[*row, -100, -100] for row in expected[0][1].tolist()]
    assert tokens[2:].tolist() == expected[1][1].tolist()


def test_evaluation_needs_labels(tmp_path: Path) -> None:
    made = trainer(tmp_path, data_collator=lambda rows: {"input_ids": torch.ones(len(rows), 3, dtype=torch.long)})
    with pytest.raises(DataError, match="labels"):
        made.evaluate(Rows(3))


# ---------------------------------------------------------------------- optimizers, numbers that are not


def test_an_optimizer_of_one_s_own(tmp_path: Path) -> None:
    pipe = Pipeline(tiny_config("marian"), 3, 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    made = trainer(tmp_path, model=pipe, num_stages=3, optimizers=(optimizer, None), lr_scheduler_type="constant")
    before = weights(made)
    made.train()
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(made).items())
    other = torch.optim.SGD(list(pipe.parameters())[1:], lr=0.1)
    with pytest.raises(UserError, match="optimizers"):
        trainer(tmp_path, model=pipe, num_stages=3, optimizers=(other, None))
    with pytest.raises(UserError, match="num_stages=2, but the given Pipeline has 3"):
        trainer(tmp_path, model=pipe, num_stages=2)


@pytest.mark.parametrize("family", ["llama", "marian", "llama with LoRA"])
def test_weight_decay_spares_what_the_plain_trainer_spares(family: str, tmp_path: Path) -> None:
    """PEFT's layers were not asked for, so their parameters got no weight decay."""
    model = plain_model(tiny_config(family.split()[0]))
    if "LoRA" in family:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    plain = Trainer(model, TrainingArguments(str(tmp_path), weight_decay=0.1, use_cpu=True, report_to="none"))
    pipe = Pipeline(model, 2)
    made = make_optimizer(pipe, arguments(tmp_path, weight_decay=0.1))

    def groups(optimizer: torch.optim.Optimizer, named: Any) -> list[tuple[float, set[str]]]:
        name_of = {parameter: name.removeprefix("base_model.model.") for name, parameter in named}
        return [(group["weight_decay"], {name_of[p] for p in group["params"]}) for group in optimizer.param_groups]

    found, expected = groups(made, pipe.named_parameters()), groups(plain.create_optimizer(), model.named_parameters())
    assert found == expected
    assert found[0][0] == 0.1
    assert found[0][1]


def _train_with_a_head_alone(folder: str) -> tuple[int, list[str]]:
    """The last stage is the head, whose weight is tied to the embedding and belongs to the first."""
    made = trainer(Path(folder), family="llama", partition=[5, 1], save_strategy="steps", save_steps=6)
    return made.train().global_step, [name for name, _ in made.pipe.named_parameters()]


def test_a_process_without_parameters_of_its_own(tmp_path: Path) -> None:
    first, second = run_gloo(_train_with_a_head_alone, 2, str(tmp_path))
    assert first[0] == second[0] == 6
    assert len(first[1]) > 0
    assert second[1] == []


def test_a_loss_that_is_not_a_number_is_filtered_as_in_the_plain_trainer(tmp_path: Path) -> None:
    class Poison(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                with torch.no_grad():
                    next(made.pipe.parameters()).fill_(math.nan)

    recorder = Recorder()
    made = trainer(tmp_path, callbacks=[Poison(), recorder], logging_steps=2)
    made.train()
    assert all(math.isfinite(loss) for loss in recorder.losses)
    recorder = Recorder()
    made = trainer(tmp_path, callbacks=[Poison(), recorder], logging_steps=2, logging_nan_inf_filter=False)
    made.train()
    assert math.isnan(recorder.losses[-1])


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"model": None}, "model or model_init"),
        ({"args": {"output_dir": "out"}}, "args is a dict; this trainer needs a PipelineTrainingArguments"),
    ],
)
def test_what_the_constructor_refuses(keywords: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        PipelineTrainer(**{"model": tiny_config("llama"), "args": arguments(tmp_path)} | keywords)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train_dataset"):
        trainer(tmp_path, train_dataset=None).train()
    with pytest.raises(UserError, match="no mini-batch"):
        trainer(tmp_path, train_dataset=Rows(3), dataloader_drop_last=True).train()
    with pytest.raises(UserError, match="eval_dataset"):
        trainer(tmp_path).evaluate()


def test_saved_models_are_in_hub_format(tmp_path: Path) -> None:
    made = trainer(tmp_path, family="llama", save_strategy="steps", save_steps=3)
    made.train()
    made.save_model(tmp_path / "final")
    for directory in (tmp_path / "final", tmp_path / "checkpoint-6"):
        loaded = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
        for name, tensor in weights(made).items():
            assert torch.equal(loaded[name], tensor), name


def test_metrics_and_state_are_told_as_by_the_plain_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path / "out")
    made.save_metrics("test", {"test_loss": 2.0})
    metrics = made.train().metrics
    made.log_metrics("train", metrics)
    made.save_metrics("train", metrics)
    made.save_state()
    assert "***** train metrics *****" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/train_results.json").read_text()) == metrics
    assert json.loads((tmp_path / "out/all_results.json").read_text()) == {"test_loss": 2.0, **metrics}
    assert TrainerState.load_from_json(str(tmp_path / "out/trainer_state.json")).global_step == 6


def test_a_script_s_own_metrics_are_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path, compute_metrics=lambda prediction: {"accuracy": 0.25}, eval_dataset=Rows(4))
    made.evaluate()
    made.log({"temperature": 2, "of": "mine"})
    evaluated, logged = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"step 0/0  eval_loss \d\.\d{4}  eval_accuracy 0\.25", evaluated)
    assert logged == "step 0/0  temperature 2  of mine"


class Interrupts(TrainerCallback):
    """Sends this process SIGTERM in a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # a thread of the trainer's reads it


def test_a_stop_does_not_lose_the_evaluation_of_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The learning rate follows the evaluations, so that a lost one changes the weights."""
    values: dict[str, Any] = {
        "eval_dataset": Rows(6, seed=5),
        "eval_strategy": "steps",
        "eval_steps": 2,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
        "enable_jit_checkpoint": True,
    }
    undisturbed = trainer(tmp_path / "undisturbed", **values)
    undisturbed.train()
    stopped = trainer(tmp_path / "stopped", callbacks=[Interrupts(4)], **values)
    with pytest.raises(TrainingStopped):
        stopped.train_from(None, resume_hint="start again some day")
    assert "checkpoint-4: start again some day to go on from there" in capsys.readouterr().err
    assert [line["step"] for line in stopped.state.log_history if "eval_loss" in line] == [2]
    resumed = trainer(tmp_path / "stopped", **values)
    resumed.train(resume_from_checkpoint=True)
    for key in ("eval_loss", "learning_rate", "loss"):
        found, expected = (
            [line[key] for line in one.state.log_history if key in line] for one in (resumed, undisturbed)
        )
        assert found == expected, key
    assert len({line["learning_rate"] for line in undisturbed.state.log_history if "learning_rate" in line}) > 1
    assert_close(weights(resumed), weights(undisturbed), 0.0)
    with pytest.raises(TrainingStopped):
        stopped.train()
    assert stopped.state.log_history[0]["step"] == 1, "a training that begins anew has nothing to make up for"


class _Broken(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise ValueError("boom")


def test_a_callback_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="boom") as caught:
        trainer(tmp_path, callbacks=[_Broken()]).train()
    told = failures.describe(caught.value).message
    assert told.endswith("process 0, training step 2, in _Broken.on_step_end: ValueError: boom")


class _NoFile(TrainerCallback):
    """Puts something in the way of the file of metrics, as a file system does that becomes read-only."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        file = Path(args.output_dir) / "metrics.jsonl"
        if state.global_step == 2:
            file.unlink()
            file.mkdir()


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write \S+/metrics.jsonl: Is a directory; earlier checkpoints"):
        trainer(tmp_path, callbacks=[_NoFile()]).train()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_weights_of_another_type_are_not_resumed(tmp_path: Path) -> None:
    """A run that began in float32 went on in bfloat16: its weights were rounded, and nothing was said."""
    trainer(tmp_path, family="llama", max_steps=1, save_strategy="steps", save_steps=1).train()
    other = plain_model(tiny_config("llama"), dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="has weights of float32, and this run of bfloat16; give dtype='float32'"):
        trainer(tmp_path, model=other, family="llama", max_steps=2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("kind", ["a language model", "a classifier"])
def test_the_tokenizer_s_special_tokens_become_the_model_s(kind: str, tmp_path: Path) -> None:
    """A saved model went on after the end of a turn, and a classifier looked for another padding token than Trainer's.

    Trainer sets the tokens at the start of a training, and evaluates with them afterwards.
    """
    own = tokenizer()
    own.eos_token, own.pad_token, own.bos_token = "<|im_end|>", "<|eot_id|>", "<|im_start|>"
    config = tiny_config("llama")
    config.vocab_size, config.num_labels, config.eos_token_id, config.bos_token_id = len(own), 2, 2, None
    is_classifier = kind == "a classifier"
    auto = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager")
    rows = [{"input_ids": [5 + number] * (2 + number % 3)} for number in range(4)]
    for number, row in enumerate(rows):
        row["labels"] = number % 2 if is_classifier else row["input_ids"]
    collate = DataCollatorWithPadding(own) if is_classifier else DataCollatorForSeq2Seq(own)
    common = {"train_dataset": rows, "eval_dataset": rows, "data_collator": collate, "processing_class": own}
    given = {"max_steps": 1, "learning_rate": 0.0, "report_to": [], "use_cpu": True, "save_strategy": "no"}
    theirs = Trainer(copy.deepcopy(model), TrainingArguments(str(tmp_path / "theirs"), **given), **common)
    ours = PipelineTrainer(model, arguments(tmp_path / "ours", **given, weight_decay=0.0), **common)
    found = []
    for made in (ours, theirs):
        made.train()
        made.save_model()
        saved = auto.from_pretrained(made.args.output_dir)
        names = ("eos_token_id", "bos_token_id", "pad_token_id")
        configs = [saved.config, *([] if is_classifier else [saved.generation_config])]
        tokens = [getattr(one, name) for one in configs for name in names]
        assert own.pad_token_id in tokens
        found.append((made.evaluate()["eval_loss"], tokens))
    assert found[0][1] == found[1][1]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
