"""The interface of a loss, and the cross-entropy of all target tokens, computed in little memory.

A loss is a sum over units and their number, which is known from the targets alone, before any forward: each micro-batch
adds its sum, divided by the number of units of the whole mini-batch. A loss says what it reads, and the stage gives it
that (runtime/stage.py, runtime/head.py). No stage, planner or trainer knows it by its class.

At a large vocabulary the cross-entropy is the peak of the last stage's memory.
`torch.nn.functional.cross_entropy` keeps the logarithms of all probabilities for backward and makes two more tensors of
that size there. Here forward turns the probabilities into the gradient in place, and backward scales it in place. Where
the logits can be made in parts, training never has all of them (runtime/head.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Flag
from typing import Any

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import IGNORED_LABEL, Adapter
from hf_gpipe.adapters.parts.cuts import VocabularyPart
from hf_gpipe.errors import UserError
from hf_gpipe.losses import vocabulary as vocabulary_loss
from hf_gpipe.losses.additivity import check_independent
from hf_gpipe.losses.vocabulary import TokenOptions

#: Entries of a micro-batch that a first pass adds: the derivative of the loss by what it reads of each row, (B, E), and
#: the loss of the row's unit, (B,).
ROW_GRADIENTS, UNIT_LOSSES = "row_gradients", "unit_losses"
#: An entry of a mini-batch: the number of its loss, where datasets have different ones.
LOSS_NUMBER = "loss_number"
NOT_PACKED = "a {} is computed from rows, and packed rows are one; leave packing out, and use a collator that pads"


class Reads(Flag):
    """The tensors of a micro-batch that a loss reads. Join several by |, such as Reads.ROWS | Reads.HIDDEN."""

    TOKENS = 1
    """The losses of tokens. If that is all, the loss is their sum, and the gradient of each is known at once."""
    ROWS = 3
    """The losses of all tokens of a row, and so its log-probability. Backward goes over the logits twice."""
    HIDDEN = 4
    """The hidden states that enter the head."""
    LOGITS = 8
    """The logits, which are made whole."""
    COMPANION = 16
    """The logits of a model beside the trained one, and a token's own; none of them is made whole."""


@dataclass(frozen=True)
class LossInputs:
    """The tensors of a micro-batch for a loss: B rows with T positions, width D, V tokens in the vocabulary.

    A tensor that the loss does not name in `reads` may be None.

    Attributes:
        inputs: the micro-batch's own tensors, such as labels.
        num_units: units of the whole mini-batch, by which the sum over units is divided.
        num_tokens: tokens of the whole mini-batch that `Loss.row_tokens` counts.
        token_losses: `Loss.token_loss` at every position, (B, T), 0 where there is no target.
        hidden: (B, T, D).
        logits: (B, T, V); of a model that classifies rows (B, C).
        companion: gives the logits of the model beside the trained one, of some positions.
    """

    inputs: Mapping[str, torch.Tensor]
    num_units: int
    num_tokens: int = 1
    token_losses: Any = None
    hidden: Any = None
    logits: Any = None
    companion: Any = None

    @property
    def log_probs(self) -> torch.Tensor:
        """The log-probability of each row, (B,): the sum over its targets."""
        return -self.token_losses.sum(dim=1)


LogProbs = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Rows (N, T) -> the log-probability of each row, (N,), float64 on the CPU."""


class Loss:
    """The interface of a loss. A loss of your own is a subclass with `reads` and `unit_losses`.

    A unit is what the loss sums over: a row, or `rows_per_unit` rows, such as the two answers of a pair. The loss of a
    mini-batch is the sum over its units, divided by their number, or with `counts_tokens` by that of target tokens.

    Attributes:
        reads: the tensors of a micro-batch that it reads.
        rows_per_unit: number of neighbouring rows that are never in different micro-batches, such as 2 for pairs.
        counts_tokens: whether the sum is divided by the number of target tokens, and not by that of units of rows.
        needs_reference: whether it reads "ref_logps" (B,) of the inputs, the rows' log-probabilities before training.
            Where a mini-batch has none, a pass without the PEFT adapters computes them before the step.
        compares_units: whether the units of a mini-batch are compared with each other. Then `embed` gives all that it
            reads of a row, and `compare` the losses; a first pass of forwards runs before the step
            (runtime/first_pass.py).
        entries: names of entries of a mini-batch that it alone reads.
        adds_auxiliary: whether the auxiliary loss of a mixture of experts is added.
        is_checked: whether a unit is known not to depend on the rows of others; set at a first micro-batch.
    """

    reads: Reads
    rows_per_unit: int = 1
    counts_tokens: bool = False
    needs_reference: bool = False
    compares_units: bool = False
    entries: tuple[str, ...] = ()
    adds_auxiliary: bool = True
    is_checked: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "of_units" in vars(cls):  # it would never be called
            raise UserError(f"{cls.__name__}.of_units: this method of a loss is named unit_losses now; rename it")

    def check_model(self, adapter: Adapter) -> None:
        """Raise UserError where a model has nothing to learn by this loss."""

    def check_inputs(self, adapter: Adapter, inputs: Mapping[str, torch.Tensor]) -> None:
        """Raise DataError where a micro-batch, on the CPU, has what the model or the loss cannot read."""
        adapter.check_inputs(inputs)
        if Reads.TOKENS in self.reads:
            adapter.check_classes(inputs)

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        """The loss of each unit, (B / rows_per_unit,), from its own rows; in training with gradients."""
        if not self.compares_units:
            raise NotImplementedError
        # The value is that of the first pass, and so is the derivative by each row.
        product = (self.embed(read) * read.inputs[ROW_GRADIENTS]).sum(dim=1).view(-1, self.rows_per_unit).sum(dim=1)
        return read.inputs[UNIT_LOSSES][:: self.rows_per_unit] + product - product.detach()

    def embed(self, read: LossInputs) -> torch.Tensor:
        """All that a loss that compares units reads of each row, (B, E)."""
        raise NotImplementedError

    def compare(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each unit of a mini-batch, (N / rows_per_unit,), from (N, E) and the labels (N, ...)."""
        raise NotImplementedError

    @property
    def token_loss(self) -> TokenLoss:
        """The loss of each token that it reads."""
        return PLAIN

    @property
    def reads_tokens_only(self) -> bool:
        """Whether the losses of tokens are all that it reads, so that rows may be packed."""
        return self.reads == Reads.TOKENS

    def dataset_loss(self, batch: Mapping[str, torch.Tensor]) -> Loss:
        """The loss of a mini-batch on the CPU, for a loss that is another one for each of several datasets."""
        return self

    @property
    def planned(self) -> Loss:
        """A loss of the same cost, for the planner, whose tensors have no values."""
        counts = self.num_forwards(has_reference=False), self.num_forwards(has_reference=True)
        return _Planned(self.reads, self.compares_units, counts)

    def num_forwards(self, *, has_reference: bool) -> int:
        """How often all forwards run before a step.

        Args:
            has_reference: whether the model before its training is there, as the model without its PEFT adapters.
        """
        return int(self.compares_units) + int(self.needs_reference and has_reference)

    def for_mini_batch(self, name: tuple[int, int], *, is_training: bool) -> Loss:
        """The loss of a mini-batch: its metrics are noted under this name, and evaluation does not clip logits."""
        return self

    def with_passes(
        self, batch: Mapping[str, torch.Tensor], model: LogProbs, reference: LogProbs
    ) -> Mapping[str, torch.Tensor]:
        """The mini-batch of a step, with what the loss reads of forwards that have no gradients.

        Args:
            batch: the mini-batch, which every process has.
            model: gives the log-probabilities of rows (N,) by the model as it is.
            reference: gives them by the model before its training.
        """
        if not self.needs_reference or "ref_logps" in batch:
            return batch
        return {**batch, "ref_logps": reference(batch)}

    def row_units(self, targets: torch.Tensor) -> torch.Tensor:
        """The number of units that begin in each row of targets (B, T), (B,)."""
        if self.counts_tokens:
            return TokenLoss.units(targets).sum(dim=1)
        return (torch.arange(len(targets), device=targets.device) % self.rows_per_unit == 0).long()

    def row_tokens(self, targets: torch.Tensor) -> torch.Tensor:
        """The number of those tokens in each row of targets (B, T) over which a part of the loss is a mean, (B,)."""
        return self.row_units(targets)

    def total(self, read: LossInputs) -> torch.Tensor:
        """The share of a micro-batch in the loss of training, ()."""
        return self._checked(read).sum() / read.num_units

    def row_losses(self, read: LossInputs) -> torch.Tensor:
        """The loss of each unit at its first row, and 0 at the others, (B,), for an evaluation."""
        unit_losses = self._checked(read)[:, None]
        return F.pad(unit_losses, (0, self.rows_per_unit - 1)).flatten()

    def _checked(self, read: LossInputs) -> torch.Tensor:
        """The loss of each unit. Raises UserError where it is something else, or mixes units."""
        losses, name = self.unit_losses(read), type(self).__name__
        shape = (len(read.inputs["labels"]) // self.rows_per_unit,)
        if not isinstance(losses, torch.Tensor) or losses.shape != shape:
            given = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise UserError(f"the function of a {name} gave {given}; it must give a tensor {shape}, one loss per unit")
        if not self.is_checked and losses.requires_grad and len(losses) > 1:
            tensors = [
                value for value in vars(read).values() if isinstance(value, torch.Tensor) and value.requires_grad
            ]
            check_independent(losses, tensors, self.rows_per_unit, name)
            vars(self)["is_checked"] = True  # its class may be frozen
        return losses


@dataclass(frozen=True)
class _Planned(Loss):
    """Reads what another loss reads, and does little with it."""

    reads: Reads
    compares_units: bool = False
    counts: tuple[int, int] = (0, 0)

    def num_forwards(self, *, has_reference: bool) -> int:
        return self.counts[has_reference]

    def total(self, read: LossInputs) -> torch.Tensor:
        if Reads.LOGITS in self.reads:
            logits, labels = read.logits.float().flatten(0, -2), read.inputs["labels"].clone().flatten()
            if labels.is_floating_point() or len(labels) != len(logits):  # they are no classes
                return logits.square().sum()
            return F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        parts = [read.hidden] if Reads.HIDDEN in self.reads else []
        parts += [-read.log_probs] if Reads.TOKENS in self.reads else []
        return torch.stack([part.sum() for part in parts]).sum() / read.num_units


@dataclass(frozen=True)
class TokenLoss(TokenOptions, Loss):
    """The loss of every target token, with the options of `TokenOptions`, which raises UserError for wrong ones."""

    reads = Reads.TOKENS
    counts_tokens = True

    @property
    def token_loss(self) -> TokenLoss:
        return self

    def position_losses(self, read: LossInputs, targets: torch.Tensor) -> torch.Tensor:
        """The loss of every position (B, T), where the logits are whole."""
        return self(read.logits, targets).view(targets.shape)

    @property
    def planned(self) -> TokenLoss:
        return replace(self, metrics=None)

    def for_mini_batch(self, name: tuple[int, int], *, is_training: bool) -> TokenLoss:
        # The saved model does not clip its logits.
        own = self if is_training else self.unclipped()
        return own if self.metrics is None else replace(own, metrics=self.metrics.of(name, is_training=is_training))

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        """The sum over the tokens of each row, (B,)."""
        return read.token_losses.sum(dim=1)

    def total(self, read: LossInputs) -> torch.Tensor:
        return read.token_losses.sum() / read.num_units

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of every position, 0 where the target is ignored; half precision is raised to float32.

        Args:
            logits: (B, T, V).
            targets: (B, T).

        Returns:
            (B * T,). Its backward can run once.
        """
        flat, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        if flat.dtype in (torch.float16, torch.bfloat16):
            flat = flat.float()
        losses: torch.Tensor = _CrossEntropy.apply(flat, targets, self)
        return losses

    def with_gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        companion: Any = None,
        overwrite: bool = False,
        part: VocabularyPart | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of every position and its gradient, in float32 at least.

        Args:
            logits: (N, V), without a graph.
            targets: (N,).
            companion: the other model's logits (N, V) of the same positions, where the loss reads COMPANION.
            overwrite: whether the gradient may take the memory of the logits.
            part: of the vocabulary, whose logits these are; None: the whole.

        Returns:
            (N,), 0 where the target is ignored; and (N, V), which has no meaning where the target is ignored.
        """
        if part is not None:
            return vocabulary_loss.with_gradient(logits, targets, part, self, overwrite=overwrite)
        smoothing = self.label_smoothing
        is_ignored = ~self.units(targets)
        columns = targets.masked_fill(is_ignored, 0)[:, None]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        seen, is_clipped = self.seen(logits)
        if self.metrics is None:
            largest = seen.amax(-1, keepdim=True).to(dtype)
        else:
            largest, first = seen.max(-1, keepdim=True)
            largest = largest.to(dtype)
        losses = (smoothing - 1) * seen.gather(1, columns).to(dtype)
        if smoothing:
            losses -= smoothing * seen.mean(-1, keepdim=True, dtype=dtype)
        wide = seen.to(dtype)
        if overwrite or wide is not logits:
            # In its memory, which nothing else reads.
            gradient = wide.sub_(largest).exp_()
            gradient.div_(gradient.sum(-1, keepdim=True))
        else:
            gradient = torch.softmax(wide, dim=-1)
        # The logarithm of the sum of exponentials, from the largest logit, whose probability never underflows.
        losses += largest - gradient.amax(-1, keepdim=True).log()
        if self.metrics is not None:
            self.metrics.add(~is_ignored, (first == columns).squeeze(1), gradient)
        if smoothing:
            gradient.sub_(smoothing / gradient.shape[1])
        gradient.scatter_add_(1, columns, torch.full_like(losses, smoothing - 1))
        if is_clipped is not None:
            gradient.masked_fill_(is_clipped, 0)
        if self.is_dynamic:
            probability = losses.neg().exp()
            losses, gradient = losses * probability, gradient.mul_(probability)
        return losses.squeeze(1).masked_fill(is_ignored, 0), gradient


PLAIN = TokenLoss()
"""Without smoothing or clipping: the negative log-likelihood."""


class _CrossEntropy(torch.autograd.Function):
    """Losses (N,) of logits (N, V) and targets (N,); its backward can run once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, loss: TokenLoss) -> torch.Tensor:
        losses, gradient = loss.with_gradient(logits, targets)
        ctx.save_for_backward(gradient, loss.units(targets))
        return losses

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient, is_unit = ctx.saved_tensors
        # In place: nothing else reads it, and it is as large as the logits.
        return gradient.mul_(outer.masked_fill(~is_unit, 0)[:, None]), None, None


def whole_logits(adapter: Adapter, loss: Loss) -> str:
    """The reason why training makes the logits of all positions; empty where it does not."""
    reason = "the loss is a function of them" if Reads.LOGITS in loss.reads else adapter.projection.reason
    return "" if adapter.is_classifier or not adapter.scores_targets else reason
