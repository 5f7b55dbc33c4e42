"""A loss that is written as one class, which reads what no loss of the package reads together."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_gpipe import Loss, LossInputs, Pipeline, Reads
from hf_gpipe.errors import StageError, UserError
from hf_gpipe.runtime.cutting import split_rows
from tests.oracle import Result, assert_same, padded_batch, plain_model, run_pipeline, tiny_config


class Contrast(Loss):
    """Of pairs of rows: their likelihoods are compared, and their mean hidden states pushed apart."""

    reads = Reads.ROWS | Reads.HIDDEN
    rows_per_unit = 2

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        first, second = read.log_probs.view(-1, 2).unbind(1)
        mask = (read.inputs["labels"] != -100)[:, :, None]
        pooled = (read.hidden * mask).sum(1) / mask.sum(1)
        return -F.logsigmoid(0.3 * (first - second)) + 5 * F.cosine_similarity(pooled[::2], pooled[1::2]) ** 2


class Centred(Contrast):
    """Its units depend on each other by their hidden states."""

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        return super().unit_losses(read) + read.hidden.mean()


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_loss_in_one_class(num_stages: int, schedule: str, num_micro_batches: int) -> None:
    config = tiny_config("marian")
    model, batch = plain_model(config), padded_batch(config)
    value = 0.0
    for part in split_rows(batch, num_micro_batches, 2):
        output = model(**part, use_cache=False, output_hidden_states=True)
        nll = F.cross_entropy(output.logits.transpose(1, 2), part["labels"], reduction="none")
        losses = Contrast().unit_losses(LossInputs(part, 3, token_losses=nll, hidden=output.decoder_hidden_states[-1]))
        (losses.sum() / 3).backward()
        value += losses.sum().item() / 3
    expected = Result(value, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    pipe = Pipeline(model, num_stages, num_micro_batches, schedule, loss=Contrast())
    assert_same(run_pipeline(pipe, batch), expected)
    assert pipe.eval_step(batch).loss == pytest.approx(expected.loss, rel=1e-10)
    assert pipe.eval_on(batch, lambda *_: None).loss == pytest.approx(expected.loss, rel=1e-10), "with whole logits"


def test_units_that_depend_on_each_other() -> None:
    model = plain_model(tiny_config("marian"))
    with pytest.raises(StageError, match="a Centred gave a loss of the first unit that depends on the rows of other"):
        Pipeline(model, 2, 1, loss=Centred()).train_step(padded_batch(model.config))


def test_a_method_of_an_older_name_is_an_error() -> None:
    def losses(self: Loss, read: LossInputs) -> torch.Tensor:
        return read.hidden.mean(dim=(1, 2))

    with pytest.raises(UserError, match=r"Mine\.of_units: .* unit_losses"):
        type("Mine", (Loss,), {"reads": Reads.HIDDEN, "of_units": losses})
