"""Losses of the user's own, of logits and of rows: those of the plain model, and of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer, TrainingArguments

from hf_gpipe import LogitsLoss, Pipeline, PipelineTrainer, RowLoss
from hf_gpipe.adapters import StageModel
from hf_gpipe.data import PairCollator
from hf_gpipe.errors import DataError, StageError, UserError
from hf_gpipe.runtime import head
from hf_gpipe.runtime.cutting import split_rows, split_tokens
from tests.oracle import (
    Batch,
    Result,
    assert_same,
    padded_batch,
    plain_model,
    run_pipeline,
    run_plain,
    tiny_config,
)
from tests.training.toy import CausalRows, Recorder, arguments


def focal(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum over tokens of the focal loss."""
    nll = token_nll(outputs.logits, labels)
    return ((1 - torch.exp(-nll)) ** 2 * nll).sum() / num_items_in_batch


def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.logits.float().mean()


def margins(log_probs: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Of pairs of rows."""
    first, second = log_probs.view(-1, 2).unbind(1)
    return -F.logsigmoid(0.3 * (first - second)) + 0.01 * first**2


def token_nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each token (B, T - 1), 0 where there is no target."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")


def run_rows(model: PreTrainedModel, batch: Batch) -> Result:
    """The oracle of `margins`, over the whole mini-batch."""
    model.zero_grad()
    nll = token_nll(model(**batch, use_cache=False).logits, batch["labels"])
    losses = margins(-nll.sum(1), batch)
    losses.mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Result(losses.mean().item(), gradients)


@pytest.mark.parametrize(
    ("num_stages", "options"),
    [
        (1, {"recompute": "none"}),
        (2, {"recompute": "stage", "schedule": "gpipe", "length_bucketing": True}),
        (3, {"recompute": "block", "schedule": "zb_h1"}),
    ],
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_pairs_of_rows(num_stages: int, options: Any, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three pairs in two micro-batches; chunks of 7 positions end within rows, or all logits are made at once."""
    monkeypatch.setattr(head, "slice_positions", lambda width, vocabulary: 7)
    if is_whole:
        monkeypatch.setattr(StageModel, "deferred_logits", lambda self: None)
    config = tiny_config("llama", tied=num_stages == 2)
    model, batch = plain_model(config), padded_batch(config)
    expected = run_rows(model, batch)
    calls = []

    def function(log_probs: torch.Tensor, inputs: Any) -> torch.Tensor:
        calls.append((len(log_probs), torch.is_grad_enabled()))
        return margins(log_probs, inputs)

    pipe = Pipeline(model, num_stages, 2, loss=RowLoss(function, 2), **options)
    assert_same(run_pipeline(pipe, batch), expected)
    assert sorted(calls) == [(2, True), (4, True)]
    evaluation = pipe.eval_step(batch)
    assert evaluation.loss == pytest.approx(expected.loss, rel=1e-10)
    assert evaluation.row_tokens.tolist() == [1, 0] * 3
    with torch.no_grad():
        nll = token_nll(model(**batch).logits, batch["labels"])
    torch.testing.assert_close(pipe.log_probs(batch), -nll.sum(1), rtol=1e-10, atol=0)
    with pytest.raises(DataError, match="5 rows, and the loss needs them in groups of 2"):
        pipe.train_step({name: tensor[:5] for name, tensor in batch.items()})


def test_evaluation_in_chunks_with_smoothed_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "slice_positions", lambda width, vocabulary: 7)
    config = tiny_config("llama")
    model, batch = plain_model(config), padded_batch(config)
    found = Pipeline(model, 2, 2, label_smoothing=0.1).eval_step(batch)
    with torch.no_grad():
        logits = model(**batch).logits[:, :-1].transpose(1, 2)
    nll, smoothed = (
        F.cross_entropy(logits, batch["labels"][:, 1:], reduction="none", label_smoothing=smoothing).sum(1)
        for smoothing in (0.0, 0.1)
    )
    torch.testing.assert_close(found.row_nll, nll, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.row_losses, smoothed, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("family", "num_stages", "recompute"), [("llama", 3, "stage"), ("marian", 2, "none")])
def test_a_function_of_logits(family: str, num_stages: int, recompute: str) -> None:
    """The plain cross-entropy written as a function; in an encoder-decoder labels are those of each position."""
    config = tiny_config(family)
    causal = not config.is_encoder_decoder

    def function(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        logits = outputs.logits[:, :-1] if causal else outputs["logits"]
        targets = labels[:, 1:] if causal else labels
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss / num_items_in_batch.item()

    model, batch = plain_model(config), padded_batch(config)
    expected = run_plain(model, batch, 3)
    pipe = Pipeline(model, num_stages, 3, recompute=recompute, loss=LogitsLoss(function))
    assert_same(run_pipeline(pipe, batch), expected)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)


def test_transformers_trainer_with_the_same_function(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "max_steps": 5,
        "per_device_train_batch_size": 5,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "no",
    }
    others: dict[str, Any] = {
        "data_collator": PairCollator(pad_token_id=0),
        "train_dataset": CausalRows(43),
        "eval_dataset": CausalRows(8, seed=1),
        "compute_loss_func": focal,
    }
    plain = plain_model(tiny_config("llama"), dtype=torch.float32)
    found, expected = Recorder(), Recorder()
    args = arguments(tmp_path / "own", num_micro_batches=3, weight_decay=0.0, **common)
    # A copy is taken of the weights before the other trainer changes them.
    start = plain_model(tiny_config("llama"), dtype=torch.float32)
    own = PipelineTrainer(start, args, callbacks=[found], **others)
    own.train()
    options = TrainingArguments(output_dir=str(tmp_path / "plain"), use_cpu=True, disable_tqdm=True, **common)
    Trainer(plain, options, callbacks=[expected], **others).train()
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    evaluated = [[logs["eval_loss"] for logs in one.logs if "eval_loss" in logs] for one in (found, expected)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    parameters = dict(own.model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=2e-5, msg=name)
    assert own.compute_loss_func is focal


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (mean, r"compute_loss_func gave \S+ for several rows at once, and .* num_items_in_batch"),
        (lambda *_, **__: None, "compute_loss_func returned NoneType; it must return the loss"),
        (lambda outputs, *_, **__: outputs.logits, r"compute_loss_func returned \(6, \d+, 50\)"),
    ],
)
def test_a_function_that_is_no_sum(function: Any, message: str) -> None:
    config = tiny_config("llama")
    pipe = Pipeline(plain_model(config), 2, 1, loss=LogitsLoss(function))
    with pytest.raises(StageError, match=message):
        pipe.train_step(padded_batch(config))


def scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log-probability of the targets of each row, (B,)."""
    return -token_nll(logits, labels).sum(1)


def adjacent(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum over pairs of rows next to each other; 0 for an odd row out."""
    of_rows = scores(outputs.logits, labels)
    pairs = of_rows[: len(of_rows) // 2 * 2].view(-1, 2)
    return -F.logsigmoid(pairs[:, 0] - pairs[:, 1]).sum() / num_items_in_batch


def squares(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The squared differences of all pairs of rows, which are 0 for equal rows."""
    of_rows = scores(outputs.logits, labels)
    return ((of_rows[:, None] - of_rows[None]) ** 2).sum() / num_items_in_batch


def unlike(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of pairs of rows with unlike labels, beside the cross-entropy."""
    of_rows = scores(outputs.logits, labels)
    is_unlike = (labels[:, None] != labels[None]).any(2)
    return (token_nll(outputs.logits, labels).sum() + is_unlike.mul(of_rows).sum()) / num_items_in_batch


def its_own_mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def mean_of_rows(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return scores(outputs.logits, labels).neg().mean()


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 6])
@pytest.mark.parametrize("function", [adjacent, squares, unlike, its_own_mean, mean_of_rows])
def test_a_function_that_compares_rows_or_takes_their_mean(function: Any, num_micro_batches: int) -> None:
    """A loss of pairs gave another value for each number of micro-batches, because one row's loss of 0 was not checked.

    With six micro-batches each one has a single row.
    """
    config = tiny_config("llama")
    pipe = Pipeline(plain_model(config), 2, num_micro_batches, loss=LogitsLoss(function))
    with pytest.raises(StageError, match=r"several rows at once.*rows_per_unit"):
        pipe.train_step(padded_batch(config))
    with pytest.raises(StageError, match="several rows at once"):
        pipe.eval_step(padded_batch(config))


def in_place(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum that changes its arguments."""
    outputs.logits = outputs.logits.float().div_(2.0)
    labels[:, 0] = -100
    return token_nll(outputs.logits, labels).sum() / num_items_in_batch


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum over tokens, in half precision, of a smoothed cross-entropy and the square of the partition function."""
    logits = outputs.logits[:, :-1].bfloat16()
    nll = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", label_smoothing=0.1)
    return (nll + 1e-2 * logits.logsumexp(-1) ** 2 * (labels[:, 1:] != -100)).sum() / int(num_items_in_batch)


@pytest.mark.parametrize("num_micro_batches", [1, 3, 6])
@pytest.mark.parametrize("function", [focal, in_place, smoothed])
def test_sums_are_supported(function: Any, num_micro_batches: int) -> None:
    config = tiny_config("llama")
    model, batch = plain_model(config), padded_batch(config)
    found = run_pipeline(Pipeline(model, 2, num_micro_batches, loss=LogitsLoss(function)), batch)
    num_items = (batch["labels"][:, 1:] != -100).sum()
    model.zero_grad()
    expected = function(model(**batch, use_cache=False), batch["labels"].clone(), num_items_in_batch=num_items)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tolerance = 1e-10 if function is focal else 1e-6 if function is in_place else 2e-2
    assert_same(found, Result(expected.item(), gradients), tolerance)


@pytest.mark.parametrize(("num_stages", "schedule"), [(1, "gpipe"), (3, "zb_h1")])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8])
def test_a_function_of_pairs_of_rows(num_stages: int, schedule: str, num_micro_batches: int) -> None:
    """With rows_per_unit=2 the value is that of the whole mini-batch for any number of micro-batches."""
    config = tiny_config("llama")
    model, batch = plain_model(config), padded_batch(config)
    num_items = (batch["labels"][:, 1:] != -100).sum()
    model.zero_grad()
    expected = adjacent(model(**batch, use_cache=False), batch["labels"], num_items_in_batch=num_items)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    pipe = Pipeline(model, num_stages, num_micro_batches, schedule, loss=LogitsLoss(adjacent, rows_per_unit=2))
    assert_same(run_pipeline(pipe, batch), Result(expected.item(), gradients))
    assert pipe.eval_step(batch).loss == pytest.approx(expected.item(), rel=1e-10)
    with pytest.raises(DataError, match="5 rows, and the loss needs them in groups of 2"):
        pipe.train_step({name: tensor[:5] for name, tensor in batch.items()})


def test_a_loss_of_rows_that_mixes_units() -> None:
    """The mean over a micro-batch was subtracted, whose value depends on the number of micro-batches."""
    config = tiny_config("llama")
    loss = RowLoss(lambda log_probs, inputs: log_probs.mean() - log_probs)
    pipe = Pipeline(plain_model(config), 2, 2, loss=loss)
    with pytest.raises(StageError, match="depends on the rows of other units"):
        pipe.train_step(padded_batch(config))


def test_a_loss_of_rows_on_scores() -> None:
    """The log-probability of the only class is 0, so the loss of each pair was ln 2 whatever the model said."""
    config = tiny_config("llama")
    config.num_labels, config.architectures = 1, ["LlamaForSequenceClassification"]
    with pytest.raises(UserError, match=r"num_labels=1 and the problem_type regression.*give a LogitsLoss"):
        Pipeline(config, 2, 2, loss=RowLoss(lambda log_probs, inputs: log_probs, 2))


def test_what_does_not_go_with_a_loss(tmp_path: Path) -> None:
    config = tiny_config("llama")
    for options, message in (
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 is of the cross-entropy"),
        ({"packing": True}, "a LogitsLoss is computed from rows, and packed rows are one"),
        ({"loss": focal}, "loss is a function; give a LogitsLoss or a RowLoss"),
    ):
        with pytest.raises(UserError, match=message):
            Pipeline(config, 1, 1, **{"loss": LogitsLoss(focal), **options})
    with pytest.raises(UserError, match="loss is given, and the model is a Pipeline"):
        PipelineTrainer(Pipeline(config, 2, 2), arguments(tmp_path), compute_loss_func=focal)
    trainer = PipelineTrainer(config, arguments(tmp_path), compute_loss_func=LogitsLoss(adjacent, rows_per_unit=2))
    assert trainer.pipe.loss.rows_per_unit == 2
    pipe = Pipeline(config, 1, 1, loss=RowLoss(lambda log_probs, inputs: log_probs.sum(), 2))
    with pytest.raises(StageError, match=r"the function of a RowLoss gave \(\); it must give a tensor \(3,\)"):
        pipe.train_step(padded_batch(config))


@settings(deadline=None, max_examples=60)
@given(num_units=st.integers(1, 9), rows_per_unit=st.integers(1, 3), count=st.integers(1, 12), data=st.data())
def test_units_are_never_divided(num_units: int, rows_per_unit: int, count: int, data: st.DataObject) -> None:
    rows = num_units * rows_per_unit
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, 6), min_size=rows, max_size=rows)))
    batch = {"input_ids": torch.arange(rows)}

    class Lengths:
        @staticmethod
        def row_lengths(batch: Batch) -> torch.Tensor:
            return lengths

    for parts in (
        split_rows(batch, count, rows_per_unit),
        split_tokens(batch, count, Lengths(), rows_per_unit),  # type: ignore[arg-type]  # all of it that is used
    ):
        assert len(parts) == min(count, num_units)
        for part in parts:
            units = part["input_ids"].view(-1, rows_per_unit)
            assert torch.equal(units, units[:, :1] + torch.arange(rows_per_unit))
            assert (units[:, 0] % rows_per_unit == 0).all()
        assert torch.cat([part["input_ids"] for part in parts]).sort().values.tolist() == list(range(rows))


def test_the_planner_traces_a_function_of_its_own() -> None:
    """Fake tensors have no values, which a user's function may read."""

    def reads_values(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        assert float(outputs.logits.detach().abs().max()) >= 0
        return focal(outputs, labels, num_items_in_batch)

    config = tiny_config("llama")
    batch = padded_batch(config)
    plan = Pipeline(config, 1, 2, loss=LogitsLoss(reads_values)).plan(batch)
    assert plan.costs.whole_logits == "the loss is a function of them"
