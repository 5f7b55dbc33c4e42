"""Losses in place of the target tokens' cross-entropy: functions of rows' log-probabilities, or of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.classifiers import ONE_CLASS, problem_of
from hf_gpipe.errors import UserError
from hf_gpipe.losses.additivity import adds_up
from hf_gpipe.losses.loss import PLAIN, Loss, LossInputs, Reads, TokenLoss


@dataclass(frozen=True)
class RowLoss(Loss):
    """A loss of the log-probabilities of rows.

    The log-probabilities are computed some positions at a time, so no micro-batch has all its logits.

    Attributes:
        function: (log-probabilities (B,), each the sum over the targets of a row; the micro-batch's inputs) -> the loss
            of each unit, (B / rows_per_unit,), from the rows of that unit alone. It is called once for each
            micro-batch, in training with gradients, in evaluation without.
        rows_per_unit, needs_reference, entries: as of `Loss`.
    """

    function: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
    rows_per_unit: int = 1
    needs_reference: bool = False
    entries: tuple[str, ...] = ()

    reads = Reads.ROWS

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        return self.function(read.log_probs, read.inputs)


@dataclass(frozen=True)
class LogitsLoss(Loss):
    """A loss of logits, like transformers' `compute_loss_func`; the logits of a micro-batch are made whole.

    Attributes:
        function: (outputs, labels, num_items_in_batch=...) -> (). `outputs.logits` are those (B, T, V) of a
            micro-batch, `labels` (B, T') as the collator made them, and `num_items_in_batch` the number of target
            tokens of the whole step. Its values are added up over micro-batches: it must be a sum over tokens, rows or
            units, which is checked at the first micro-batch (losses/additivity.py).
        rows_per_unit: as of `Loss`.
    """

    function: Callable[..., Any]
    rows_per_unit: int = 1

    reads = Reads.LOGITS
    counts_tokens = True
    #: As in transformers' Trainer, the function's value is all of the loss.
    adds_auxiliary = False

    def total(self, read: LossInputs) -> torch.Tensor:
        # Before the function is called with the logits themselves, which it may change in place.
        self._check_sum(read)
        return self._value(read.logits, read.inputs["labels"], read.num_units)

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        self._check_sum(read)
        logits, labels = read.logits.split(self.rows_per_unit), read.inputs["labels"].split(self.rows_per_unit)
        values = [self._value(*unit, read.num_units) for unit in zip(logits, labels, strict=True)]
        return torch.stack(values) * read.num_units

    def _check_sum(self, read: LossInputs) -> None:
        """Raise UserError where the function is no sum over units; until that is known, once for each micro-batch."""
        value_of, labels = partial(self._value, num_units=read.num_units), read.inputs["labels"]
        if not self.is_checked and adds_up(value_of, read.logits.detach(), labels, self.rows_per_unit):
            vars(self)["is_checked"] = True  # the class is frozen

    def _value(self, logits: torch.Tensor, labels: torch.Tensor, num_units: int) -> torch.Tensor:
        # Some functions change the labels in place.
        value = self.function(CausalLMOutput(logits=logits), labels.clone(), num_items_in_batch=torch.tensor(num_units))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"compute_loss_func returned {shape}; it must return the loss, a tensor with one number")
        return value.reshape(())


def loss_of_function(given: Loss | Callable[..., Any] | None) -> Loss | None:
    """The loss that a trainer's `compute_loss_func` asks for: a function of logits, whose units are rows, or a loss."""
    return given if given is None or isinstance(given, Loss) else LogitsLoss(given)


def asked_loss(given: Loss | None, token_loss: TokenLoss) -> Loss:
    """The loss that was given, or the cross-entropy. Raises UserError where it is none, or contradicts the other."""
    if given is None:
        return token_loss
    if not isinstance(given, Loss):
        raise UserError(f"loss is a {type(given).__name__}; give a LogitsLoss or a RowLoss with your function")
    for option, value in token_loss.given.items():
        if value != getattr(given.token_loss, option):
            raise UserError(
                f"{option}={value!r} is of the cross-entropy, and the loss is another one; leave one of them out"
            )
    return given


def loss_of(adapter: Adapter, asked: Loss) -> Loss:
    """The loss that was asked for; of a classifier, in place of the cross-entropy, the one of its problem_type.

    Raises UserError where options of the cross-entropy go with that, or a loss reads what are no probabilities.
    """
    if not adapter.has_head and asked.reads != Reads.HIDDEN:
        raise UserError(
            f"{type(adapter.reference).__name__} has no head, and the loss, a {type(asked).__name__}, reads more than "
            "hidden states; give an EmbeddingLoss, or a model with a head (of AutoModelForCausalLM, say)"
        )
    asked.check_model(adapter)
    adapter.loss_keys = (*adapter.loss_keys, *asked.entries)
    problem = problem_of(adapter.config) if adapter.is_classifier else ONE_CLASS
    has_scores = problem != ONE_CLASS or (adapter.is_classifier and adapter.config.num_labels == 1)
    if not asked.reads_tokens_only and Reads.TOKENS in asked.reads and has_scores:
        raise UserError(
            f"loss is a {type(asked).__name__}, which reads the log-probability of each row's class, and the model has "
            f"num_labels={adapter.config.num_labels} and the problem_type {problem}, so its outputs are scores and no "
            "probabilities; give a LogitsLoss, whose function reads the scores (rows_per_unit=2 for pairs of rows)"
        )
    if problem == ONE_CLASS or not asked.reads_tokens_only:
        return asked
    if asked != PLAIN:
        raise UserError(
            f"{' and '.join(asked.token_loss.given)} of the cross-entropy cannot go with the model's problem_type "
            f"{problem}; leave it out"
        )
    function = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits

    def row_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        logits = outputs.logits
        return function(logits, labels.view(logits.shape)) * len(logits) / num_items_in_batch

    return LogitsLoss(row_loss)
