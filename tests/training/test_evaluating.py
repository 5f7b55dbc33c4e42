"""Evaluation and prediction: transformers' Trainer's numbers, and the tokens of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EvalPrediction,
    GenerationConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_gpipe import PipelineTrainer
from hf_gpipe.adapters.modules.dropout import mix
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.job.world import World
from hf_gpipe.runtime.mesh import Mesh
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.training.generating import left_padded_prompts
from hf_gpipe.training.predicting import _Logits
from tests.gloo import run_gloo
from tests.oracle import plain_model, tiny_config
from tests.training.test_precision import config_of
from tests.training.toy import CausalRows, Rows, trainer


def sharp(family: str) -> PreTrainedModel:
    """A model whose tokens depend on all that it has read."""
    model = plain_model(tiny_config(family, tied=False), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.7, generator=generator)
    model.generation_config.pad_token_id = 0
    return model.eval()


class Completions(CausalRows):
    """The first part of each row is a prompt without targets."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [*self.rows[index], 7, 8]
        prompt = 1 + index % len(self.rows[index])
        return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


# ---------------------------------------------------------------------- losses


@pytest.mark.parametrize(("family", "smoothing"), [("llama", 0.0), ("llama", 0.2), ("marian", 0.0), ("mixtral", 0.0)])
def test_the_loss_is_the_plain_trainer_s(family: str, smoothing: float, tmp_path: Path) -> None:
    """Mini-batches of unequal length; smoothed labels and the auxiliary loss of a mixture of experts count."""
    config = config_of("mixtral") if family == "mixtral" else tiny_config(family)
    plain = plain_model(config, dtype=torch.float32)
    rows: Any = Rows(7, seed=5) if family == "marian" else CausalRows(7, seed=5)
    common: dict[str, Any] = {"per_device_eval_batch_size": 3, "label_smoothing_factor": smoothing}
    expected = Trainer(
        plain,
        TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True, **common),
        data_collator=PairCollator(pad_token_id=0),
    ).evaluate(rows)
    # The auxiliary loss of a mini-batch is not that of its micro-batches.
    made = trainer(tmp_path, model=plain, num_stages=3, num_micro_batches=1 if family == "mixtral" else 2, **common)
    assert made.evaluate(rows)["eval_loss"] == pytest.approx(expected["eval_loss"], abs=1e-5)


def test_mini_batches_without_a_target(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They teach nothing, which is said once, and no mean has a loss of theirs."""
    rows = [
        {**row, "labels": [-100] * len(row["labels"])} if number < 4 else row
        for number, row in enumerate(CausalRows(12))
    ]
    options = {"train_sampling_strategy": "sequential", "weight_decay": 0.0, "max_steps": 3}
    made = trainer(tmp_path, family="llama", train_dataset=rows[:4], eval_dataset=rows, **options)
    before = {name: parameter.detach().clone() for name, parameter in made.pipe.named_parameters()}
    with caplog.at_level("WARNING"):
        made.train()
    assert caplog.text.count("step 1: the loss and its gradient are 0") == caplog.text.count("are 0, so") == 1
    assert all(torch.equal(parameter, before[name]) for name, parameter in made.pipe.named_parameters())
    made.args.per_device_eval_batch_size = 4
    assert made.evaluate()["eval_loss"] == made.evaluate(rows[4:])["eval_loss"] > 0
    assert np.isnan(made.evaluate(rows[:4])["eval_loss"])


# ---------------------------------------------------------------------- metrics


def test_metrics_in_parts_and_predictions_in_lists(tmp_path: Path) -> None:
    calls: list[tuple[int, bool]] = []

    def compute(prediction: EvalPrediction, compute_result: bool = True) -> dict[str, Any]:
        rows = prediction.predictions
        assert isinstance(rows, torch.Tensor)
        assert isinstance(prediction.label_ids, torch.Tensor), "as in transformers' Trainer"
        calls.append((len(rows), compute_result))
        counts = np.array([count for count, _ in calls])
        metrics = {"rows": counts.sum(), "each": counts, "of": {"torch": torch.tensor([1, 2])}, "eval_loss": -1.0}
        return metrics if compute_result else {}

    made = trainer(tmp_path, compute_metrics=compute, batch_eval_metrics=True, per_device_eval_batch_size=4)
    with pytest.raises(UserError, match="give the function that parameter"):  # before its first evaluation
        trainer(tmp_path, compute_metrics=lambda prediction: {}, batch_eval_metrics=True)
    found = made.evaluate(Rows(10, seed=3))
    # As JSON has them: they are written into metrics.jsonl, and into checkpoints.
    assert (found["eval_rows"], found["eval_each"], found["eval_of"]) == (10, [4, 4, 2], {"torch": [1, 2]})
    assert calls == [(4, False), (4, False), (2, True)]
    assert found["eval_loss"] > 0, "as in transformers' Trainer"
    made = trainer(tmp_path, eval_do_concat_batches=False, per_device_eval_batch_size=4)
    prediction = made.predict(Rows(10, seed=3))
    assert [len(part) for part in prediction.predictions] == [len(part) for part in prediction.label_ids] == [4, 4, 2]
    whole = trainer(tmp_path, per_device_eval_batch_size=4).predict(Rows(10, seed=3))
    np.testing.assert_allclose(prediction.predictions[2], whole.predictions[8:, : prediction.predictions[2].shape[1]])


def test_an_evaluation_leaves_out_its_last_rows_where_the_training_does(tmp_path: Path) -> None:
    """As in Trainer; `dataloader_drop_last` had no effect on it."""
    made = trainer(tmp_path, per_device_eval_batch_size=4, dataloader_drop_last=True)
    assert len(made.predict(Rows(10, seed=3)).predictions) == 8
    assert len(made.get_eval_dataloader(Rows(10))) == 2


def test_the_order_of_arguments_is_the_plain_trainer_s(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset={"one": Rows(3), "two": Rows(4)})
    assert "valid_loss" in made.evaluate(Rows(3), None, "valid")
    assert "eval_loss" in made.evaluate("two")
    assert "eval_two_loss" in made.evaluate()
    for call in (made.evaluate, made.get_eval_dataloader):
        with pytest.raises(UserError, match="eval_dataset='three': no dataset has that name, its names are one, two;"):
            call("three")
    assert "probe_loss" in made.predict(Rows(3), ["logits"], "probe").metrics
    with pytest.raises(UserError, match="num_beams: generation needs predict_with_generate"):
        made.evaluate(Rows(3), num_beams=2)


@pytest.mark.parametrize("problem", [None, "single_label_classification", "regression", "decoder_input_ids"])
def test_predictions_of_rows_without_labels(problem: str | None, tmp_path: Path) -> None:
    """They were an error; in transformers' Trainer a test set has none, and no loss and no metrics then."""
    family = "marian" if problem == "decoder_input_ids" else "llama"
    plain = plain_model(tiny_config(family), dtype=torch.float32)
    if problem in ("single_label_classification", "regression"):
        config = LlamaConfig(**plain.config.to_dict() | {"problem_type": problem, "pad_token_id": 0, "num_labels": 2})
        plain = LlamaForSequenceClassification(config)
    rows = [{"input_ids": row["input_ids"]} for row in CausalRows(5)]
    if family == "marian":
        rows = [row | {"decoder_input_ids": [0, 3, 4]} for row in rows]

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        columns = {name: [torch.tensor(row[name]) for row in rows] for name in rows[0]}
        ids = {name: pad_sequence(column, batch_first=True) for name, column in columns.items()}
        return ids | {"attention_mask": (ids["input_ids"] != 0).long()}

    common: dict[str, Any] = {"per_device_eval_batch_size": 5, "use_cpu": True, "report_to": "none"}
    expected = Trainer(plain, TrainingArguments(str(tmp_path), **common), data_collator=collate).predict(rows)
    calls: list[EvalPrediction] = []
    options: dict[str, Any] = {"data_collator": collate, "num_micro_batches": 1, "compute_metrics": calls.append}
    made = trainer(tmp_path, model=plain, per_device_eval_batch_size=5, **options)
    found = made.predict(rows)
    assert found.label_ids is expected.label_ids is None
    assert not calls
    assert {*found.metrics} == {*expected.metrics} - {"test_model_preparation_time"}
    theirs = expected.predictions[0] if isinstance(expected.predictions, tuple) else expected.predictions
    np.testing.assert_allclose(found.predictions, theirs, atol=1e-5)
    with pytest.raises(DataError, match="a mini-batch to evaluate has no 'labels', only input_ids"):
        made.evaluate(rows)


@pytest.mark.parametrize("family", ["llama", "marian"])
def test_generated_tokens_of_rows_without_labels(family: str, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    rows = [{"input_ids": row} for row in ids]
    common: dict[str, Any] = {"model": sharp(family), "data_collator": default_data_collator}
    made = trainer(tmp_path, **common, predict_with_generate=True)
    found = made.predict(rows, max_new_tokens=4)
    expected = made.pipe.generate(input_ids=ids, max_new_tokens=4)
    assert found.predictions.tolist() == expected[:, ids.shape[1] if family == "llama" else 0 :].tolist()
    assert found.label_ids is None
    assert "test_loss" not in found.metrics
    if family == "marian":
        with pytest.raises(DataError, match="no 'labels', only input_ids; without them marian needs decoder_input_ids"):
            trainer(tmp_path, **common).predict(rows)


def test_no_rows_and_losses_alone(tmp_path: Path) -> None:
    """No rows had the loss 0, and `predict` kept predictions that nobody wanted."""
    made = trainer(tmp_path, compute_metrics=lambda _: {"other": 2.0})
    assert made.evaluate(Rows(3))["eval_other"] == 2
    assert "eval_loss" not in made.evaluate([])
    made.args.prediction_loss_only = True
    prediction = made.predict(Rows(3))
    assert prediction.predictions is prediction.label_ids is None
    assert prediction.metrics["test_loss"] > 0
    assert "test_other" not in prediction.metrics


# ---------------------------------------------------------------------- generation

GENERATIONS: list[dict[str, Any]] = [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}]


@pytest.mark.parametrize("options", GENERATIONS[:2])
def test_an_encoder_decoder_s_tokens_and_metrics(options: dict[str, Any], tmp_path: Path) -> None:
    model = sharp("marian")

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        tokens = prediction.predictions
        return {"sum": float(np.where(tokens >= 0, tokens, 0).sum()), "targets": float(prediction.label_ids.shape[0])}

    common: dict[str, Any] = {
        "per_device_eval_batch_size": 4,
        "predict_with_generate": True,
        "generation_max_length": 12,
        "use_cpu": True,
    }
    rows = Rows(8, seed=4)
    reference = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(output_dir=str(tmp_path), report_to="none", disable_tqdm=True, **common),
        data_collator=PairCollator(pad_token_id=0),
        compute_metrics=compute,
    )
    expected = reference.predict(rows, **options)
    for num_stages in (1, 3):
        made = trainer(tmp_path, model=model, num_stages=num_stages, compute_metrics=compute, **common)
        found = made.predict(rows, **options)
        width = found.predictions.shape[1]
        np.testing.assert_array_equal(found.predictions, expected.predictions[:, :width])
        assert (expected.predictions[:, width:] <= 0).all(), "the rest is padding"
        for name in ("test_loss", "test_sum", "test_targets"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-5), name


def _predict_completions(folder: str, options: dict[str, Any]) -> tuple[Any, Any]:
    made = trainer(
        Path(folder),
        model=sharp("llama"),
        num_stages=2,
        predict_with_generate=True,
        per_device_eval_batch_size=4,
        generation_config=GenerationConfig(max_new_tokens=6, pad_token_id=0, eos_token_id=2),
    )
    prediction = made.predict(Completions(7, seed=4), **options)
    return prediction.predictions, prediction.label_ids


def _predict_all(folder: str) -> list[tuple[Any, Any]]:
    return [_predict_completions(folder, options) for options in GENERATIONS]


def test_a_decoder_only_model_completes_left_padded_prompts(tmp_path: Path) -> None:
    model, rows = sharp("llama"), Completions(7, seed=4)
    processes = run_gloo(_predict_all, 2, str(tmp_path))
    for number, options in enumerate(GENERATIONS):
        expected = []
        for mini_batch, start in enumerate((0, 4)):
            batch = PairCollator(0)([rows[index] for index in range(start, min(start + 4, 7))])
            prompts = left_padded_prompts(batch, 0)
            torch.default_generator.manual_seed(mix(42, 0, mini_batch))
            ids = model.generate(**prompts, max_new_tokens=6, pad_token_id=0, **options)
            expected.append(ids[:, prompts["input_ids"].shape[1] :])
        for process in processes:
            tokens, labels = process[number]
            np.testing.assert_array_equal(tokens, torch.cat(expected).numpy())
            assert labels.shape[0] == 7


def test_prompts_are_what_comes_before_the_targets() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 4, 3, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "labels": torch.tensor([[-100, -100, -100, 8], [-100, 4, 3, -100]]),
    }
    prompts = left_padded_prompts(batch, 0)
    assert prompts["input_ids"].tolist() == [[5, 6, 7], [0, 0, 9]]
    assert prompts["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    with pytest.raises(DataError, match="needs a prompt"):
        left_padded_prompts(batch | {"labels": batch["input_ids"]}, 0)


def test_generation_in_an_evaluation_while_training(tmp_path: Path) -> None:
    seen: list[np.ndarray] = []

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction.predictions)
        return {"length": prediction.predictions.shape[1]}

    made = trainer(
        tmp_path,
        eval_dataset=Rows(5, seed=1),
        compute_metrics=compute,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=4,
        predict_with_generate=True,
        generation_max_length=9,
        generation_num_beams=2,
    )
    made.train()
    assert len(seen) == 2
    assert all(tokens.shape[0] == 5 and tokens.shape[1] <= 9 for tokens in seen)
    with pytest.raises(UserError, match="generation_config='nowhere'"):
        PipelineTrainer(
            tiny_config("llama"), args=made.args.__class__(str(tmp_path), use_cpu=True, generation_config="nowhere")
        )


def test_logits_leave_the_device_one_micro_batch_at_a_time() -> None:
    logits = _Logits(lambda logits, labels: (logits.argmax(-1), [logits]), 4, is_autocast=False)
    for _ in range(2):
        logits.add(torch.zeros(2, 3, 5, dtype=torch.bfloat16), {"labels": torch.zeros(2, 3)})
    assert all(isinstance(kept, np.ndarray) for (ids, (full,)), _ in logits._parts for kept in (ids, full))
    tokens, (full,) = logits.collected(Mesh.of(World.current(), Placement([0])))
    assert tokens.tolist() == [[0, 0, 0, -100]] * 4
    assert full.shape == (4, 4, 5)
