"""The loss of deferred logits: projection, loss and their gradients, some positions at a time, all of it in backward.

Logits (B, T, V) and their gradient would be the largest tensors of the last stage. Here forward computes nothing of
the head. Backward computes the logits of a slice of positions, turns them into their gradient in place, adds the
slice's part to the gradients of the projection and of the hidden states, and uses the same memory for the next slice.
So a micro-batch keeps only its hidden states between F and B, a recomputation does not run the head again, and F of a
recomputed stage does not run it at all. The value of the loss is known only after backward.

A loss of rows (`Reads.ROWS`) needs the losses of all tokens before the gradient of any token, so backward goes over the
slices twice. A loss that reads only hidden states needs no logits, and backward skips the slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from hf_gpipe.adapters.modules.head import DeferredLogits
from hf_gpipe.adapters.modules.weight_gradients import Product
from hf_gpipe.libraries.torch import accumulation_hooks, gradient_hooks
from hf_gpipe.losses.loss import Loss, LossInputs, Reads, TokenLoss

#: The smallest number of logits in a slice: with fewer, the matrix products would be slow.
SLICE_LOGITS = 1 << 23


def slice_positions(width: int, vocabulary: int) -> int:
    """The number of positions in a slice.

    The weight's gradient is read and written once for each slice. With half as many positions as the width D, that
    takes little time beside the arithmetic, and the slice's logits take half the memory of the weight.
    """
    return max(width // 2, SLICE_LOGITS // vocabulary, 1)


def deferred_loss(
    deferred: DeferredLogits,
    targets: torch.Tensor,
    loss: Loss,
    read: LossInputs,
    added: torch.Tensor | None = None,
    positions: int | None = None,
) -> torch.Tensor:
    """The loss of a micro-batch, (): the sum over its units, divided by `read.num_units`, and `added`.

    The value is complete only after the backward of the loss, which can run once. If nothing requires a gradient, it is
    complete at once. Under `no_grad` nothing is computed, because a recomputation runs this function again.

    Args:
        deferred: the logits, after the forward of the model.
        targets: the targets, (B, T).
        loss: the loss of the micro-batch, which does not read whole logits.
        read: the loss's other inputs, apart from the losses of tokens.
        added: (), an auxiliary loss that is added; None: there is none.
        positions: the number of positions in a slice. None: `slice_positions` gives it.
    """
    linear = deferred.projection
    hidden = deferred.take_hidden().flatten(0, -2)
    slices = _Slices(deferred, targets, loss, read, positions)
    tensors = (hidden, linear.weight, linear.bias, read.hidden, added)
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        value = slices.first_value(added)
        if torch.is_grad_enabled():
            with torch.no_grad():
                slices.run(hidden, linear.weight, linear.bias, torch.ones_like(value), (False,) * 4, value)
        return value
    loss_value: torch.Tensor = _DeferredLoss.apply(*tensors, slices)
    return loss_value


@torch.no_grad()
def deferred_token_losses(
    deferred: DeferredLogits, targets: torch.Tensor, losses: Iterable[TokenLoss], read: LossInputs
) -> list[torch.Tensor]:
    """The value of each of several losses at every position of the targets (B, T), without gradients."""
    linear = deferred.projection
    hidden = deferred.take_hidden().flatten(0, -2)
    # One after the other: evaluation has a second loss only where labels are smoothed.
    slices = [_Slices(deferred, targets, loss, read) for loss in losses]
    return [own.token_losses(hidden, linear.weight, linear.bias) for own in slices]


class _DeferredLoss(torch.autograd.Function):
    """A node of the graph that computes the loss together with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        read_hidden: torch.Tensor | None,
        added: torch.Tensor | None,
        slices: _Slices,
    ) -> torch.Tensor:
        value = slices.first_value(added)
        ctx.save_for_backward(hidden, bias)
        # Hooks on saved tensors, such as save_on_cpu, give back a copy, and the gradient belongs to the parameter.
        ctx.weight, ctx.slices, ctx.value = weight, slices, value.detach()
        return value

    @staticmethod
    def backward(ctx: Any, outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, bias = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        gradients = ctx.slices.run(hidden, ctx.weight, bias, outer, wanted[:4], ctx.value)
        return (*gradients, outer if wanted[4] else None, None)


class _Slices:
    """The inputs of `deferred_loss` that have no gradient, and the loop over slices."""

    def __init__(
        self,
        deferred: DeferredLogits,
        targets: torch.Tensor,
        loss: Loss,
        read: LossInputs,
        positions: int | None = None,
    ) -> None:
        linear = deferred.projection
        self._finish, self._is_finished = deferred.finish, deferred.is_projection_alone
        self._dtype, self._autocast_dtype = deferred.dtype, deferred.autocast_dtype
        self._shape, self._targets = targets.shape, targets.flatten()
        self._loss, self._token_loss = loss, loss.token_loss
        self._is_sum_of_tokens = loss.reads in (Reads.TOKENS, Reads.TOKENS | Reads.COMPANION)
        self._read = read
        self._companion = read.companion if Reads.COMPANION in loss.reads else None
        self._part = deferred.vocabulary
        # The same on every rank, because ranks exchange messages for every slice.
        columns = linear.out_features if self._part is None else self._part.longest
        self._positions = positions or slice_positions(linear.in_features, columns)

    def first_value(self, added: torch.Tensor | None) -> torch.Tensor:
        """A new scalar in the dtype of the loss, with the value of `added`, to which the loss is then added."""
        dtype = torch.promote_types(self._dtype, torch.float32)
        value = torch.zeros((), dtype=dtype, device=self._targets.device)
        return value if added is None else value + added

    @property
    def _without_autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._targets.device.type, enabled=False)

    def token_losses(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The loss of each position, (B, T), without gradients; the arguments are those of `run`."""
        with self._without_autocast:
            matrix = weight.to(self._autocast_dtype or hidden.dtype)
            parts = [
                self._loss_of(projected, rows, None)[0] for rows, _, projected in self._projected(hidden, matrix, bias)
            ]
        return torch.cat(parts).view(self._shape)

    def _projected(
        self, hidden: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield the positions of each slice, and the projection's input and output, whose memory the next slice takes.

        Args:
            hidden: (N, D).
            matrix: the weight (V, D) in the dtype of the matrix product.
            bias: (V,).
        """
        logits = hidden.new_empty((min(self._positions, len(hidden)), len(matrix)), dtype=matrix.dtype)
        for start in range(0, len(hidden), self._positions):
            rows = slice(start, start + self._positions)
            inputs = hidden[rows].to(matrix.dtype)
            projected = logits[: len(inputs)]
            if bias is None:
                torch.mm(inputs, matrix.t(), out=projected)
            else:
                torch.addmm(bias.to(matrix.dtype), inputs, matrix.t(), out=projected)
            yield rows, inputs, projected

    def run(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        outer: torch.Tensor,
        wanted: tuple[bool, ...],
        value: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute the loss, and the wanted gradients of `hidden`, `weight`, `bias` and the hidden states it reads.

        Args:
            hidden: (N, D).
            weight: (V, D).
            bias: (V,).
            outer: (), gradient of the loss.
            wanted: for each of the four gradients, whether it is wanted.
            value: (), to which the loss is added.

        Returns:
            The four gradients. If the weight's gradient was added to its `.grad` already, None stands in its place, or
            zeros where autograd must call hooks.
        """
        factor = self._token_loss.units(self._targets).to(outer.dtype).mul_(outer)
        of_read = None
        if self._is_sum_of_tokens:
            factor /= self._read.num_units
        else:
            of_losses, of_read = self._through_units(hidden, weight, bias, value)
            of_read = None if of_read is None else of_read * outer
            if of_losses is None or not any(wanted[:3]):
                return None, None, None, of_read
            factor *= of_losses.flatten()
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Hooks on the gradient need all of it.
        is_needed = gradient_hooks(weight) or not weight.is_leaf
        of_weight = torch.zeros_like(weight) if wanted[1] and is_needed else None
        of_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        with self._without_autocast:
            matrix = weight.to(self._autocast_dtype or hidden.dtype)
            for rows, inputs, projected in self._projected(hidden, matrix, bias):
                losses, gradient = self._loss_of(projected, rows, factor[rows] if any(wanted) else None)
                if self._is_sum_of_tokens:
                    value += losses.sum() / self._read.num_units
                if gradient is None:
                    continue
                if of_hidden is not None:
                    of_hidden[rows] = gradient @ matrix
                if of_weight is not None:
                    of_weight += gradient.t() @ inputs
                elif wanted[1]:
                    Product(cast(nn.Parameter, weight), gradient, inputs).add()
                if of_bias is not None:
                    of_bias += gradient.sum(0)
        if of_weight is None and wanted[1] and accumulation_hooks(weight):
            # Autograd calls these hooks when it adds a gradient; replicas use them in a step's last backward. An
            # expanded -0.0 takes no memory, and adding it changes no value.
            of_weight = weight.new_tensor(-0.0).expand_as(weight)
        return of_hidden, of_weight, of_bias, of_read

    def _through_units(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, value: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Add the loss to `value`; returns its gradients for the losses of tokens (B, T) and for the hidden states."""
        losses = self.token_losses(hidden, weight, bias) if Reads.TOKENS in self._loss.reads else None
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_() for tensor in (losses, self._read.hidden)
        ]
        with self._without_autocast, torch.enable_grad():
            loss = self._loss.total(replace(self._read, token_losses=leaves[0], hidden=leaves[1]))
        value += loss.detach()
        gradients = iter(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], allow_unused=True))
        return [None if leaf is None else next(gradients) for leaf in leaves]

    def _loss_of(
        self, projected: torch.Tensor, rows: slice, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Losses (N,) and the gradient (N, V) of the projection's output, in its type; its memory may be reused.

        Args:
            projected: (N, V).
            rows: the N positions.
            factor: (N,), multiplies the gradient of each position. None: no gradient is wanted.
        """
        if self._is_finished:
            losses, gradient = self._with_gradient(projected, rows, overwrite=True)
            return losses, None if factor is None else torch.mul(gradient, factor[:, None], out=projected)
        leaf = projected.detach().requires_grad_(factor is not None)
        with torch.set_grad_enabled(factor is not None):
            logits = self._finish(leaf[None])[0]
        losses, gradient = self._with_gradient(logits.detach(), rows)
        if factor is None:
            return losses, None
        (gradient,) = torch.autograd.grad(logits, leaf, gradient.mul_(factor[:, None]).to(logits.dtype))
        return losses, gradient

    def _with_gradient(
        self, logits: torch.Tensor, rows: slice, *, overwrite: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self._targets[rows]
        options: dict[str, Any] = {} if self._companion is None else {"companion": self._companion.of(rows)}
        return self._token_loss.with_gradient(logits, targets, overwrite=overwrite, part=self._part, **options)
