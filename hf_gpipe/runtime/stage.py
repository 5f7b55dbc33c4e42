"""The actions on one stage and micro-batch: forward, recompute, and backward, which may be in two parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.head import DeferredLogits
from hf_gpipe.adapters.weight_gradients import Product, kept_bytes
from hf_gpipe.runtime.channel import Shapes
from hf_gpipe.runtime.custom_loss import LogitsLoss, Loss, RowLoss
from hf_gpipe.runtime.head import deferred_loss, deferred_token_losses
from hf_gpipe.runtime.loss import PLAIN, TokenLoss
from hf_gpipe.runtime.micro_batch import Context, MicroBatch

Tensors = dict[str, torch.Tensor]


@dataclass
class _Graph:
    """A micro-batch's autograd graph on a stage: its leaves, and the edges at which backward starts.

    Backward does not need the values of the outputs, so these are freed as soon as they are sent.
    """

    inputs: Tensors
    roots: dict[str, GradientEdge]
    """Edges of the outputs that depend on a trained parameter; gradients of other outputs are not used."""
    loss: torch.Tensor | None
    """The loss on the last stage, whose value is complete after backward; None on others."""


@dataclass
class _Live:
    """The data kept of a micro-batch between its actions: the context, and the graph while there is one."""

    context: Context
    graph: _Graph | None = None
    loss: torch.Tensor | None = None
    """What F returned on the last stage."""


class Stage:
    """One stage: its model, and the micro-batches between their F and B.

    Args:
        model: the stage's layers.
        wants_gradient: boundary -> for each tensor that crosses it, whether an earlier stage needs its gradient.
        loss: in training; evaluation does not clip logits.

    Attributes:
        trainable_inputs: for each carried tensor that the stage receives, whether an earlier stage needs its gradient.
        trainable_outputs: the same for the tensors that it sends; empty on the last stage.
    """

    def __init__(
        self, model: StageModel, wants_gradient: Callable[[int], Mapping[str, bool]], loss: Loss = PLAIN
    ) -> None:
        self.model = model
        self.trainable_inputs = {} if model.is_first else wants_gradient(model.start)
        self.trainable_outputs = {} if model.is_last else wants_gradient(model.stop)
        self.loss = loss
        self._live: dict[int, _Live] = {}
        #: Of each micro-batch between its I and W the parts of its weight gradients.
        self._kept: dict[int, list[Product]] = {}

    @property
    def is_first(self) -> bool:
        return self.model.is_first

    @property
    def is_last(self) -> bool:
        return self.model.is_last

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, context: Context, *, keep_graph: bool) -> Tensors:
        """F of a training table: run the stage; returns the tensors for the next stage, on the last stage the loss.

        The value of the loss is complete after B.

        Args:
            context: the micro-batch's record.
            keep_graph: whether backward follows without a recomputation.
        """
        with torch.set_grad_enabled(keep_graph):
            inputs, outputs = self._run(context)
        graph = self._graph(inputs, outputs) if keep_graph else None
        results = {name: tensor.detach() for name, tensor in outputs.items()}
        self._live[context.micro_batch.index] = _Live(context, graph, results.get("loss"))
        return results

    def recompute(self, micro_batch: int) -> None:
        """R: run the stage's forward again from the inputs that F kept, now with a graph. It receives no message."""
        live = self._live[micro_batch]
        with torch.enable_grad():
            live.graph = self._graph(*self._run(live.context))

    def backward(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        """B: from gradients of the outputs return those of the received tensors; parameters add theirs to `.grad`."""
        live = self._live.pop(micro_batch)
        graph, scale = live.graph, live.context.options.loss_scale
        assert graph is not None, "backward of a micro-batch without a graph"
        if graph.loss is not None:
            if graph.loss.requires_grad:
                graph.loss.backward(torch.full_like(graph.loss, scale))
            if live.loss is not None:
                live.loss.copy_(graph.loss.detach())
        elif roots := graph.roots:
            torch.autograd.backward(list(roots.values()), [gradients[name] for name in roots])
        return {
            name: tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for name, tensor in graph.inputs.items()
            if self.trainable_inputs[name]
        }

    def input_backward(self, micro_batch: int, gradients: Mapping[str, torch.Tensor]) -> Tensors:
        """I: as `backward`, but the gradients of linear layers' weights are left to W.

        The graph is freed. The inputs of these layers and the gradients of their outputs are kept.
        """
        with self.model.defer_weight_gradients().keeping() as kept:
            message = self.backward(micro_batch, gradients)
        self._kept[micro_batch] = kept
        return message

    @torch.no_grad()
    def weight_backward(self, micro_batch: int, completed: Callable[[torch.nn.Parameter], None] | None = None) -> None:
        """W: add the weight gradients that I left to `.grad`, and free what it kept, one layer after the other.

        Of what I kept the last is computed first, for it may still be in a cache of the processor.

        Args:
            micro_batch: its number.
            completed: called with each parameter once all its parts have been added, in the order of I.
        """
        kept = self._kept.pop(micro_batch)
        parts = {} if completed is None else Counter(product.parameter for product in kept)
        if completed is not None:
            kept.reverse()
        while kept:
            product = kept.pop()
            product.add()
            if completed is not None:
                parts[product.parameter] -= 1
                if not parts[product.parameter]:
                    completed(product.parameter)

    def deferred(self, micro_batch: int) -> set[torch.nn.Parameter]:
        """The parameters whose gradients W of a micro-batch adds to."""
        return {product.parameter for product in self._kept[micro_batch]}

    def deferred_bytes(self, micro_batch: int) -> int:
        """Bytes of memory that I has kept of a micro-batch for W."""
        return kept_bytes(self._kept[micro_batch])

    def evaluate(self, context: Context) -> Tensors:
        """F of a table without backwards: the tensors for the next stage, on the last stage the losses of the rows.

        Returns:
            On the last stage for each row "nll" (B,), the negative log-likelihood summed over its targets; "loss" (B,),
            what it adds to the loss before this is divided by the number of units; the number of its units, "num_units"
            (B,); and, if there is one, the "auxiliary_loss" () of all rows.
        """
        options, micro_batch = context.options, context.micro_batch
        of_logits = None if options.is_likelihood_only or not isinstance(self.loss, LogitsLoss) else self.loss
        with torch.no_grad():
            inputs = micro_batch.inputs
            needs_logits = options.on_logits is not None or of_logits is not None
            deferred = None if needs_logits else self.model.deferred_logits()
            outputs = self.model(inputs, context.carry, deferred=deferred)
            if not self.is_last:
                return outputs
            targets = self.model.adapter.targets(inputs)
            losses = [PLAIN]
            if isinstance(self.loss, TokenLoss) and not options.is_likelihood_only:
                noting = self.loss.noting(micro_batch.mini_batch, is_training=False)
                losses = [replace(PLAIN, metrics=noting.metrics)]
                if (own := self.loss.unclipped) != PLAIN:
                    losses.append(own)
            logits = outputs.pop("logits", None)
            if deferred is not None:
                of_tokens = deferred_token_losses(deferred, targets, losses)
            else:
                assert logits is not None
                of_tokens = [one(logits, targets).view(targets.shape) for one in losses]
                if options.on_logits is not None:
                    options.on_logits(logits, inputs)
            nll, loss = of_tokens[0].sum(dim=1), of_tokens[-1].sum(dim=1)
            if of_logits is not None:
                assert logits is not None
                # The number of units, by which it is divided later.
                loss = of_logits.of_rows(logits, inputs["labels"], micro_batch.num_units) * micro_batch.num_units
                outputs.pop("auxiliary_loss", None)
            elif isinstance(self.loss, RowLoss) and not options.is_likelihood_only:
                loss = torch.zeros_like(nll)
                loss[:: self.loss.rows_per_unit] = self.loss(-nll, inputs).to(loss.dtype)
            return {"nll": nll, "loss": loss, "num_units": self.loss.row_units(targets), **outputs}

    def input_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the tensors that F receives."""
        return self._shapes_at(self.model.start, micro_batch)

    def output_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the tensors that F sends."""
        return self._shapes_at(self.model.stop, micro_batch)

    def _shapes_at(self, boundary: int, micro_batch: MicroBatch) -> Shapes:
        if boundary not in micro_batch.shapes:
            micro_batch.shapes[boundary] = self.model.adapter.carry_shapes(boundary, micro_batch.inputs)
        return micro_batch.shapes[boundary]

    def input_gradient_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the gradients that B sends: only those that an earlier stage needs."""
        return {n: shape for n, shape in self.input_shapes(micro_batch).items() if self.trainable_inputs[n]}

    def output_gradient_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the gradients that B receives."""
        return {n: shape for n, shape in self.output_shapes(micro_batch).items() if self.trainable_outputs[n]}

    def reset(self) -> None:
        """Drop everything of the current step, after a failure."""
        self._live.clear()
        self._kept.clear()
        self.end_step()

    def end_step(self) -> None:
        """Drop what depends on the values of the weights, which may change now."""
        if self.model.weight_gradients is not None:
            self.model.weight_gradients.forget()

    def _graph(self, inputs: Tensors, outputs: Tensors) -> _Graph:
        roots = {}
        for name, is_wanted in self.trainable_outputs.items():
            if outputs[name].requires_grad:
                if not is_wanted:
                    raise RuntimeError(f"{name} depends on a trained parameter, and no gradient was agreed on for it")
                roots[name] = get_gradient_edge(outputs[name])
        return _Graph(inputs, roots, outputs.get("loss"))

    def _run(self, context: Context) -> tuple[Tensors, Tensors]:
        """The received tensors as leaves of this stage's graph, and the stage's outputs."""
        received = {
            name: tensor.detach().requires_grad_(self.trainable_inputs[name]) for name, tensor in context.carry.items()
        }
        micro_batch, loss = context.micro_batch, self.loss
        deferred = None if isinstance(loss, LogitsLoss) else self.model.deferred_logits()
        outputs = self.model(micro_batch.inputs, received, micro_batch.seed, deferred, micro_batch.row_seeds)
        if self.is_last:
            auxiliary = outputs.pop("auxiliary_loss", None)
            added = None if auxiliary is None else auxiliary / micro_batch.num_micro_batches
            outputs = {"loss": self._loss_of(outputs.get("logits"), deferred, added, micro_batch)}
        return received, outputs

    def _loss_of(
        self,
        logits: torch.Tensor | None,
        deferred: DeferredLogits | None,
        added: torch.Tensor | None,
        micro_batch: MicroBatch,
    ) -> torch.Tensor:
        """The loss of a micro-batch, (). Without gradients its value has no meaning.

        Args:
            logits: (B, T, V).
            deferred: in place of them.
            added: (), an auxiliary loss.
            micro_batch: the micro-batch.
        """
        loss, inputs, num_units = self.loss, micro_batch.inputs, micro_batch.num_units
        targets = self.model.adapter.targets(inputs)

        def of_rows(log_probs: torch.Tensor) -> torch.Tensor:
            assert isinstance(loss, RowLoss)
            return loss(log_probs, inputs).sum() / num_units

        of_tokens = loss.noting(micro_batch.mini_batch, is_training=True) if isinstance(loss, TokenLoss) else PLAIN
        if deferred is not None:
            through = of_rows if isinstance(loss, RowLoss) else None
            return deferred_loss(deferred, targets, of_tokens, num_units, added, of_rows=through)
        assert logits is not None
        if not torch.is_grad_enabled():
            # Another forward follows; functions of the user's are called in that one alone.
            return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        if isinstance(loss, LogitsLoss):
            # Not the auxiliary loss: as in transformers' Trainer, the function's value is all of it.
            return loss(logits, inputs["labels"], num_units)
        losses = of_tokens(logits, targets)
        if isinstance(loss, RowLoss):
            value = of_rows(-losses.view(targets.shape).sum(dim=1))
        else:
            value = losses.sum() / num_units
        return value if added is None else value + added
