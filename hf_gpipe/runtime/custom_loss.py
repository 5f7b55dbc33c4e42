"""Losses in place of the target tokens' cross-entropy: functions of rows' log-probabilities, or of logits.

Each is a sum over units, as `TokenLoss` is: the values of the micro-batches are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutput

from hf_gpipe.adapters import IGNORED_LABEL, Adapter
from hf_gpipe.adapters.classifiers import ONE_CLASS, problem_of
from hf_gpipe.errors import UserError
from hf_gpipe.runtime.additivity import adds_up, check_independent
from hf_gpipe.runtime.loss import PLAIN, TokenLoss

NOT_PACKED = "a {} is computed from rows, and packed rows are one; leave packing out, and use a collator that pads"


@dataclass(frozen=True)
class RowLoss:
    """A loss of the log-probabilities of rows, such as DPO's, whose units are pairs of rows.

    The log-probabilities are computed some positions at a time, so no micro-batch has all its logits.

    Attributes:
        function: (log-probabilities (B,), each the sum over the targets of a row; the micro-batch's inputs) -> the loss
            of each unit, (B / rows_per_unit,). It is called once for each micro-batch, in training with gradients, in
            evaluation without. The loss of a unit may read the rows of that unit only.
        rows_per_unit: rows next to each other that belong to one unit; they are never in different micro-batches.
        needs_reference: whether the function reads the entry "ref_logps" (B,), the log-probabilities under the model
            before its training. Where a mini-batch has none, they are computed without the PEFT adapters.
    """

    function: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]
    rows_per_unit: int = 1
    needs_reference: bool = False
    _is_checked: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def row_units(self, targets: torch.Tensor) -> torch.Tensor:
        """The number of units that begin in each row of targets (B, T), (B,)."""
        is_first = torch.zeros(len(targets), dtype=torch.long, device=targets.device)
        is_first[:: self.rows_per_unit] = 1
        return is_first

    def __call__(self, log_probs: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each unit. Raises UserError where the function gives something else."""
        losses = self.function(log_probs, inputs)
        shape = (len(log_probs) // self.rows_per_unit,)
        if not isinstance(losses, torch.Tensor) or losses.shape != shape:
            found = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise UserError(f"the function of a RowLoss gave {found}; it must give a tensor {shape}, one loss per unit")
        if not self._is_checked and losses.requires_grad and len(losses) > 1:
            check_independent(losses, log_probs, self.rows_per_unit)
            self._is_checked.append(True)
        return losses

    @property
    def planned(self) -> RowLoss:
        """A loss of the same cost, for the planner, whose tensors have no values."""
        return RowLoss(lambda log_probs, inputs: -log_probs)


@dataclass(frozen=True)
class LogitsLoss:
    """A loss of logits, like transformers' `compute_loss_func`; the logits of a micro-batch are made whole.

    Attributes:
        function: (outputs, labels, num_items_in_batch=...) -> (). `outputs.logits` are those (B, T, V) of a
            micro-batch, `labels` (B, T') as the collator made them, and `num_items_in_batch` the number of target
            tokens of the whole step. Its values are added up over micro-batches: it must be a sum over tokens, rows or
            units, which is checked at the first micro-batch (runtime/additivity.py).
        rows_per_unit: rows next to each other that belong to one unit, such as the two of a pair that the function
            compares; they are never in different micro-batches.
    """

    function: Callable[..., Any]
    rows_per_unit: int = 1
    _is_checked: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, given: LogitsLoss | Callable[..., Any] | None) -> LogitsLoss | None:
        """The loss that a trainer's `compute_loss_func` asks for: a function whose units are rows, or a LogitsLoss."""
        return given if given is None or isinstance(given, cls) else cls(given)

    @staticmethod
    def row_units(targets: torch.Tensor) -> torch.Tensor:
        """The number of target tokens of each row of targets (B, T), (B,)."""
        return TokenLoss.row_units(targets)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, num_units: int) -> torch.Tensor:
        """The loss of a micro-batch, (). Raises UserError where the function is no sum over units."""
        # Before the function is called with the logits themselves, which it may change in place.
        self._check(logits, labels, num_units)
        return self._value(logits, labels, num_units)

    def of_rows(self, logits: torch.Tensor, labels: torch.Tensor, num_units: int) -> torch.Tensor:
        """The loss of each unit at its first row and 0 at the others, (B,); their sum is the micro-batch's."""
        self._check(logits, labels, num_units)
        units = zip(logits.split(self.rows_per_unit), labels.split(self.rows_per_unit), strict=True)
        of_units = torch.stack([self._value(*unit, num_units) for unit in units])
        losses = of_units.new_zeros(len(logits))
        losses[:: self.rows_per_unit] = of_units
        return losses

    def _check(self, logits: torch.Tensor, labels: torch.Tensor, num_units: int) -> None:
        """Raise UserError where the function is no sum over units; until that is known, once for each micro-batch."""
        if not self._is_checked and adds_up(
            lambda some_logits, some_labels: self._value(some_logits, some_labels, num_units),
            logits.detach(),
            labels,
            self.rows_per_unit,
        ):
            self._is_checked.append(True)

    def _value(self, logits: torch.Tensor, labels: torch.Tensor, num_units: int) -> torch.Tensor:
        # Some functions change the labels in place.
        value = self.function(CausalLMOutput(logits=logits), labels.clone(), num_items_in_batch=torch.tensor(num_units))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(f"compute_loss_func returned {found}; it must return the loss, a tensor with one number")
        return value.reshape(())

    @property
    def planned(self) -> LogitsLoss:
        """A loss of about the same cost, for the planner, whose tensors have no values."""
        loss = LogitsLoss(_cross_entropy, self.rows_per_unit)
        loss._is_checked.append(True)
        return loss


def _cross_entropy(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    logits = outputs.logits.float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


Loss: TypeAlias = TokenLoss | RowLoss | LogitsLoss
"""Any loss: `row_units` gives the number of units of each row, and `rows_per_unit` the rows of each unit."""


def loss_of(adapter: Adapter, of_tokens: TokenLoss, given: Loss | None = None) -> Loss:
    """The loss that was given, or the model's own: `of_tokens`, or of a classifier the one of its problem_type.

    Raises UserError where that is another one, and `of_tokens` is not plain; and for a RowLoss of a model that has no
    log-probabilities.
    """
    problem = problem_of(adapter.config) if adapter.is_classifier else ONE_CLASS
    if given is not None:
        if (
            isinstance(given, RowLoss)
            and adapter.is_classifier
            and (problem != ONE_CLASS or adapter.config.num_labels == 1)
        ):
            raise UserError(
                f"loss is a RowLoss, which reads the log-probability of each row's class, and the model has num_labels="
                f"{adapter.config.num_labels} and the problem_type {problem}, so its outputs are scores and no "
                "probabilities; give a LogitsLoss, whose function reads the scores (rows_per_unit=2 for pairs of rows)"
            )
        return given
    if problem == ONE_CLASS:
        return of_tokens
    if of_tokens != PLAIN:
        raise UserError(
            f"label_smoothing and logit_clipping are of the cross-entropy, and the model's problem_type is {problem}; "
            "leave them out"
        )
    function = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits

    def of_rows(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        logits = outputs.logits
        return function(logits, labels.view(logits.shape)) * len(logits) / num_items_in_batch

    return LogitsLoss(of_rows)


def check_loss(loss: Loss, label_smoothing: float, logit_clipping: float | None, *, packing: bool) -> None:
    """Raise UserError where a given loss is none, or options ask for what it would not do."""
    if not isinstance(loss, TokenLoss | RowLoss | LogitsLoss):
        raise UserError(f"loss is a {type(loss).__name__}; give a LogitsLoss or a RowLoss with your function")
    for name, value in (("label_smoothing", label_smoothing), ("logit_clipping", logit_clipping)):
        if value and value != getattr(loss, name, None):
            raise UserError(
                f"{name}={value!r} is of the cross-entropy, and the loss is another one; leave one of them out"
            )
    if packing and not isinstance(loss, TokenLoss):
        raise UserError(f"packing=True: {NOT_PACKED.format(type(loss).__name__)}")


def whole_logits(adapter: Adapter, loss: Loss) -> str:
    """The reason why training makes the logits of all positions; empty where it does not."""
    if adapter.is_classifier:
        return ""
    return "the loss is a function of them" if isinstance(loss, LogitsLoss) else adapter.projection.reason
