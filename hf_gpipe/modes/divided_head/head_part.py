"""A stage's part of a head that is divided by the vocabulary over the stages: the actions S and T (arXiv 2411.05288).

S computes the logits of the part and the few sums over them that the losses need; the last stage joins the sums of all
stages, in the order of the stages, and computes the losses. T turns the logits into their gradient, adds to the
gradients of the part's weights, and sends its part of the gradient of the hidden states to the last stage, which adds
these parts in the same order. So no number depends on which process is faster, or on the number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.modules.head import DeferredLogits
from hf_gpipe.losses import vocabulary as vocabulary_loss
from hf_gpipe.losses.loss import PLAIN, Loss, LossInputs, TokenLoss
from hf_gpipe.modes.divided_head.rows import HeadRows
from hf_gpipe.modes.divided_head.table import LOGITS, LOGITS_GRADIENT
from hf_gpipe.runtime.channel import Shapes
from hf_gpipe.runtime.head import slice_positions
from hf_gpipe.runtime.micro_batch import Context, MicroBatch, StepOptions
from hf_gpipe.schedule.actions import Action
from hf_gpipe.schedule.kinds import FORWARD

Tensors: TypeAlias = dict[str, torch.Tensor]

_SUMS, _LOGITS, _GRADIENT, _WHOLE = "sums of stage", "logits of stage", "gradient of stage", "sums"


@dataclass
class _Live:
    """A micro-batch between S and T."""

    hidden: torch.Tensor
    """(N, D), the projection's input."""
    logits: torch.Tensor
    """(N, V'), the projection's output."""
    targets: torch.Tensor
    token_loss: TokenLoss
    whole: torch.Tensor | None = None
    """(3, N): the largest logit, the sum of exponentials, and the factor of the gradient. None except on the last
    stage: the other stages receive it in a message."""


class HeadPart:
    """The part of the head that a stage has.

    Args:
        model: the head alone, with this process's rows of the vocabulary.
        rows: the stage's rows of the vocabulary.
    """

    def __init__(self, model: StageModel, rows: HeadRows, stage: int, num_stages: int, loss: Loss) -> None:
        self._model, self._rows, self._loss = model, rows, loss
        self._stage, self._last = stage, num_stages - 1
        self._deferred: DeferredLogits | None = None
        #: Whether the last stage gets all logits, in an evaluation.
        self._sends_logits = False
        #: On the last stage, by micro-batch: hidden states from F to S, and their gradients from T to B.
        self._hidden: dict[int, torch.Tensor] = {}
        self._of_hidden: dict[int, torch.Tensor] = {}
        self._live: dict[int, _Live] = {}

    @property
    def is_at_end(self) -> bool:
        """Whether the stage is the last one, which has the hidden states and joins the sums."""
        return self._stage == self._last

    @property
    def wide(self) -> torch.dtype:
        """The type of the sums, and of the gradient of the hidden states while it is summed."""
        return torch.promote_types(self._model.adapter.dtype, torch.float32)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of the tensor of this name in a message."""
        return self._model.adapter.carry_dtype(self._model.start, name) if name == "hidden" else self.wide

    def shapes(self, source: Action, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the tensors that the action `source` sends for the head."""
        hidden = self._model.adapter.carry_shapes(self._model.start, micro_batch.inputs)["hidden"]
        num_positions = hidden[0] * hidden[1]
        if source.kind == FORWARD:
            return {"hidden": hidden}
        if source.kind == LOGITS_GRADIENT:
            return {f"{_GRADIENT} {source.stage}": (num_positions, hidden[2])}
        if source.kind == LOGITS and source.stage == self._last:
            return {_WHOLE: (3, num_positions)}
        has_metrics, part = self._loss.token_loss.metrics is not None, self._rows.of_stage(source.stage)
        logits = {f"{_LOGITS} {source.stage}": (num_positions, part[1] - part[0])} if self._sends_logits else {}
        return {f"{_SUMS} {source.stage}": (6 if has_metrics else 4, num_positions), **logits}

    def begin(self, options: StepOptions) -> None:
        """Prepare for a run of a table."""
        self._sends_logits = options.on_logits is not None

    def reset(self) -> None:
        """Drop everything of the current step, after a failure."""
        for kept in (self._hidden, self._of_hidden, self._live):
            kept.clear()

    def take(self, micro_batch: int, outputs: Mapping[str, torch.Tensor]) -> None:
        """Keep the last stage's hidden states, the result of its F, until S."""
        self._hidden[micro_batch] = outputs["hidden"]

    @torch.no_grad()
    def score(self, context: Context, *, is_training: bool) -> tuple[Tensors, Tensors]:
        """S: compute the logits and the sums of this part, and on the last stage the losses.

        Returns:
            The message to send: the sums of this part, or on the last stage the sums over all parts.
            On the last stage the outputs, as `Stage.forward` or in evaluation `Stage.evaluate` returns them; else {}.
        """
        index, inputs = context.micro_batch.index, context.micro_batch.inputs
        hidden = self._hidden.pop(index) if self.is_at_end else context.carry["hidden"]
        loss = self._loss.for_mini_batch(context.micro_batch.mini_batch, is_training=is_training)
        if context.options.is_likelihood_only:
            loss = PLAIN
        deferred = self._recorded(inputs, hidden)
        targets = self._model.adapter.targets(inputs).flatten()
        flat = hidden.flatten(0, -2).to(deferred.autocast_dtype or hidden.dtype)
        matrix, bias = self._tensors(flat.dtype)
        live = _Live(flat, flat.new_empty(len(flat), len(matrix)), targets, loss.token_loss)
        with self._without_autocast:
            torch.mm(flat, matrix.t(), out=live.logits)
            if bias is not None:
                live.logits += bias
            sums = torch.cat([self._sums_of(live, rows, deferred) for rows in self._slices(flat)], 1)
            finished = deferred.finish(live.logits[None])[0] if self._sends_logits else None
        if is_training:
            self._live[index] = live
        if not self.is_at_end:
            logits = {} if finished is None else {f"{_LOGITS} {self._stage}": finished.to(self.wide)}
            return {f"{_SUMS} {self._stage}": sums, **logits}, {}
        if finished is not None and context.options.on_logits is not None:
            parts = [context.carry[f"{_LOGITS} {stage}"].to(finished.dtype) for stage in range(self._last)]
            context.options.on_logits(torch.cat([*parts, finished], 1).view(*hidden.shape[:-1], -1), inputs)
        of_others = [context.carry[f"{_SUMS} {stage}"] for stage in range(self._last)]
        return self._join(vocabulary_loss.joined([*of_others, sums]), live, loss, context, is_training=is_training)

    def _sums_of(self, live: _Live, rows: slice, deferred: DeferredLogits) -> torch.Tensor:
        logits = deferred.finish(live.logits[rows][None])[0]
        has_metrics = self._loss.token_loss.metrics is not None
        part = live.targets[rows], self._rows.first, live.token_loss
        return vocabulary_loss.sums_of_part(logits, *part, has_metrics=has_metrics).to(self.wide)

    def _join(
        self, whole: torch.Tensor, live: _Live, loss: Loss, context: Context, *, is_training: bool
    ) -> tuple[Tensors, Tensors]:
        """The last stage's part of S: the losses, and the factor of the gradient of each token's loss."""
        micro_batch, token_loss = context.micro_batch, live.token_loss
        size, is_unit = self._rows.size, token_loss.units(live.targets)
        targets = self._model.adapter.targets(micro_batch.inputs)
        losses = vocabulary_loss.losses_of(whole[:4], size, token_loss.label_smoothing)
        if token_loss.metrics is not None:
            entropies = whole[0] + whole[1].log() - whole[5] / whole[1]
            token_loss.metrics.add_entropies(is_unit, whole[4] == live.targets, entropies)
        probability = losses.neg().exp() if token_loss.is_dynamic else torch.ones_like(losses)
        losses = (losses * probability).masked_fill(~is_unit, 0).view(targets.shape)
        read = LossInputs(micro_batch.inputs, micro_batch.num_units, micro_batch.num_tokens, losses)
        if not is_training:
            if context.options.gives_log_probs:
                return {}, {"rows": -losses}
            if context.options.is_first_pass:
                return {}, {"rows": loss.embed(read)}
            plain = vocabulary_loss.losses_of(whole[:4], size, 0.0).masked_fill(~is_unit, 0).view(targets.shape)
            outputs = {"nll": plain.sum(1), "num_units": loss.row_units(targets)}
            return {}, {**outputs, "loss": loss.row_losses(read)}
        with torch.enable_grad():
            leaf = losses.detach().requires_grad_()
            value = loss.total(replace(read, token_losses=leaf))
            (factor,) = torch.autograd.grad(value, leaf)
        factor = (factor.flatten() * probability * context.options.loss_scale).masked_fill(~is_unit, 0)
        live.whole = torch.stack([whole[0], whole[1], factor])
        return ({_WHOLE: live.whole} if self._last else {}), {"loss": value.detach()}

    @torch.no_grad()
    def add_gradient(self, context: Context) -> Tensors:
        """T: add to the gradients of the part's weights; returns its part of the gradient of the hidden states, (N, D).

        The last stage keeps that part for `gradient`, and returns {}.
        """
        live = self._live.pop(context.micro_batch.index)
        largest, total, factor = live.whole if live.whole is not None else context.carry[_WHOLE]
        deferred = self._recorded(context.micro_batch.inputs, live.hidden)
        matrix, _ = self._tensors(live.hidden.dtype)
        of_hidden = torch.empty_like(live.hidden, dtype=self.wide)
        with self._without_autocast:
            for rows in self._slices(live.hidden):
                projected = live.logits[rows]
                leaf = projected.detach().requires_grad_(not deferred.is_projection_alone)
                with torch.set_grad_enabled(leaf.requires_grad):
                    logits = deferred.finish(leaf[None])[0]
                part = live.targets[rows], self._rows.first, self._rows.size, largest[rows], total[rows]
                gradient = vocabulary_loss.gradient_of_part(logits.detach(), *part, live.token_loss)
                gradient.mul_(factor[rows, None])
                if leaf.requires_grad:
                    (gradient,) = torch.autograd.grad(logits, leaf, gradient.to(logits.dtype))
                gradient = gradient.to(matrix.dtype)
                of_hidden[rows] = (gradient @ matrix).to(self.wide)
                self._add_to_part(gradient, live.hidden[rows])
        if self.is_at_end:
            self._of_hidden[context.micro_batch.index] = of_hidden
            return {}
        return {f"{_GRADIENT} {self._stage}": of_hidden}

    def _add_to_part(self, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add to the gradients of the weight and the bias: gradient (N, V') of the output, inputs (N, D)."""
        linear = self._model.projection
        for parameter, is_bias in ((linear.weight, False), (linear.bias, True)):
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target = parameter.grad[self._rows.rows]
            if is_bias:
                target += gradient.sum(0)
            elif target.dtype == gradient.dtype:
                target.addmm_(gradient.t(), inputs)
            else:
                target += gradient.t() @ inputs

    def gradient(self, context: Context, parts: Mapping[str, torch.Tensor]) -> Tensors:
        """The gradient of the hidden states (B, T, D), for the B of the last stage: the sum of all stages' parts."""
        every = [parts[f"{_GRADIENT} {stage}"] for stage in range(self._last)]
        every.append(self._of_hidden.pop(context.micro_batch.index))
        total = torch.stack(every).sum(0) if self._last else every[0]
        shape = self._model.adapter.carry_shapes(self._model.start, context.micro_batch.inputs)["hidden"]
        return {"hidden": total.view(shape).to(self.dtype_of("hidden"))}

    @property
    def size(self) -> int:
        """V, the size of the vocabulary."""
        return self._rows.size

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits (B, T, V) of hidden states (B, T, D) for generation, with zeros outside of this part."""
        deferred = self._recorded(inputs, hidden)
        flat = hidden.flatten(0, -2).to(deferred.autocast_dtype or hidden.dtype)
        matrix, bias = self._tensors(flat.dtype)
        with self._without_autocast:
            projected = flat @ matrix.t()
            part = deferred.finish((projected if bias is None else projected + bias)[None])[0]
        whole = part.new_zeros(len(part), self._rows.size)
        whole[:, self._rows.first : self._rows.first + part.shape[1]] = part
        return whole.view(*hidden.shape[:-1], -1)

    def _tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight (V', D) and the bias (V',) of the part, in `dtype`."""
        linear, rows = self._model.projection, self._rows.rows
        bias = None if linear.bias is None else linear.bias.detach()[rows].to(dtype)
        return linear.weight.detach()[rows].to(dtype), bias

    def _slices(self, hidden: torch.Tensor) -> list[slice]:
        """Slices of the positions, so that only one slice at a time needs logits of a wider type."""
        length = slice_positions(hidden.shape[1], self._rows.rows.stop - self._rows.rows.start)
        return [slice(start, start + length) for start in range(0, len(hidden), length)]

    @property
    def _without_autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self._model.device.type, enabled=False)

    def _recorded(self, inputs: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> DeferredLogits:
        """The operations of the model on the projection's output. They treat each position alone, so one forward of
        the head, in which nothing is computed, records them for all micro-batches."""
        if self._deferred is None:
            deferred = self._model.deferred_logits()
            assert deferred is not None, "the head's projection is a linear layer"
            self._model(inputs, {"hidden": hidden}, deferred=deferred)
            deferred.take_hidden()
            self._deferred = deferred
        return self._deferred
