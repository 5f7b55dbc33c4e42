"""The actions on one stage and micro-batch: forward, recompute, and backward, which may be in two parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hf_gpipe.adapters import StageModel
from hf_gpipe.adapters.modules.head import DeferredLogits
from hf_gpipe.adapters.modules.weight_gradients import Product, kept_bytes
from hf_gpipe.losses.loss import PLAIN, Loss, LossInputs, Reads
from hf_gpipe.runtime.channel import Shapes
from hf_gpipe.runtime.head import deferred_loss, deferred_token_losses
from hf_gpipe.runtime.micro_batch import Context, MicroBatch, SharedStates

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
    """The result of F on the last stage."""


class Stage:
    """One stage: its model, and the micro-batches between their F and B.

    Args:
        model: the stage's layers.
        wants_gradient: boundary -> for each tensor that crosses it, whether an earlier stage needs its gradient.

    Attributes:
        trainable_inputs: for each carried tensor that the stage receives, whether an earlier stage needs its gradient.
        trainable_outputs: the same for the tensors that it sends; empty on the last stage.
        shared: what micro-batches leave to others between their first F and their last B or I.
    """

    def __init__(self, model: StageModel, wants_gradient: Callable[[int], Mapping[str, bool]]) -> None:
        self.model = model
        self.trainable_inputs = {} if model.is_first else wants_gradient(model.start)
        self.trainable_outputs = {} if model.is_last else wants_gradient(model.stop)
        self._live: dict[int, _Live] = {}
        #: The parts of the weight gradients of each micro-batch between its I and W.
        self._kept: dict[int, list[Product]] = {}
        self.shared: SharedStates = {}

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
            keep_graph: whether backward follows without a recomputation.
        """
        if not keep_graph:
            context = self._computed_once(context)
        with torch.set_grad_enabled(keep_graph):
            inputs, outputs = self._run(context)
        graph = self._graph(inputs, outputs) if keep_graph else None
        results = {name: tensor.detach() for name, tensor in outputs.items()}
        self._live[context.micro_batch.index] = _Live(context, graph, results.get("loss"))
        return results

    def _computed_once(self, context: Context) -> Context:
        """The context with what frozen layers make of inputs alone, which R then need not run."""
        micro_batch = context.micro_batch
        inputs = self.model.computed_once(micro_batch.inputs, micro_batch.seed)
        return (
            context if inputs is micro_batch.inputs else replace(context, micro_batch=micro_batch.with_inputs(inputs))
        )

    def tensors_between_actions(self) -> list[torch.Tensor]:
        """Tensors that are on the device whatever graphs there are: weights, buffers, what micro-batches leave to
        others, and weights in other types."""
        held = [*self.model.model.parameters(), *self.model.model.buffers()]
        held += (tensor for state in self.shared.values() for tensor in state.tensors())
        if self.model.weight_gradients is not None:
            held += self.model.weight_gradients.all_converted
        return held

    def take(self, context: Context) -> None:
        """Take a micro-batch whose forward ran elsewhere: R comes next."""
        self._live[context.micro_batch.index] = _Live(self._computed_once(context))

    def give(self, micro_batch: int) -> None:
        """Drop a micro-batch after its forward, for its backward runs elsewhere."""
        del self._live[micro_batch]

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
        live.context.micro_batch.leave(self.shared)
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
            On the last stage, of a first pass "rows" (B, E), or the log-probabilities of targets as "rows" (B, T).
            Otherwise for each row "nll" (B,), the negative log-likelihood summed over its targets; "loss" (B,), what it
            adds to the loss before this is divided by the number of units; the number of its units, "num_units" (B,);
            and, if there is one, the "auxiliary_loss" () of all rows.
        """
        options, micro_batch = context.options, context.micro_batch
        own = PLAIN if options.is_likelihood_only else micro_batch.loss
        loss = own.for_mini_batch(micro_batch.mini_batch, is_training=False)
        with torch.no_grad():
            outputs, deferred, read = self._forward(loss, context, context.carry)
            if not self.is_last:
                return outputs
            targets = self.model.adapter.targets(read.inputs)
            # Its own first, which may note metrics, and that of the likelihood unless it is the same.
            wanted = dict.fromkeys((loss.token_loss, PLAIN))
            if deferred is not None:
                losses = deferred_token_losses(deferred, targets, wanted, read)
            elif Reads.TOKENS in loss.reads or self.model.adapter.scores_targets:
                losses = [token_loss.position_losses(read, targets) for token_loss in wanted]
            else:
                losses = [torch.full(targets.shape, math.nan, device=targets.device)]
            if options.gives_log_probs:
                return {"rows": -losses[0]}
            read = replace(read, token_losses=losses[0])
            if options.is_first_pass:
                return {"rows": loss.embed(read)}
            if deferred is None and options.on_logits is not None:
                options.on_logits(read.logits, read.inputs)
            if not options.is_likelihood_only and "auxiliary_loss" in outputs:
                self.model.router_port.note(outputs["auxiliary_loss"], is_training=False)
            outputs |= {"nll": losses[-1].sum(dim=1), "num_units": loss.row_units(targets)}
            return {**outputs, "loss": loss.row_losses(read)}

    def input_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the tensors that F receives."""
        return self._shapes(micro_batch, is_end=False)

    def output_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the tensors that F sends."""
        return self._shapes(micro_batch, is_end=True)

    def _shapes(self, micro_batch: MicroBatch, *, is_end: bool) -> Shapes:
        boundary = self.model.stop if is_end else self.model.start
        if boundary not in micro_batch.shapes:
            micro_batch.shapes[boundary] = self.model.adapter.carry_shapes(boundary, micro_batch.inputs)
        return micro_batch.shapes[boundary]

    def input_gradient_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the gradients that B sends: only those that an earlier stage needs."""
        return {n: shape for n, shape in self.input_shapes(micro_batch).items() if self.trainable_inputs.get(n)}

    def output_gradient_shapes(self, micro_batch: MicroBatch) -> Shapes:
        """Names and shapes of the gradients that B receives."""
        return {n: shape for n, shape in self.output_shapes(micro_batch).items() if self.trainable_outputs.get(n)}

    def reset(self) -> None:
        """Drop everything of the current step, after a failure."""
        self._live.clear()
        self._kept.clear()
        self.shared.clear()
        self.model.batch_norms.reset()
        self.end_step()

    def end_step(
        self,
        mini_batches: Sequence[Hashable] = (),
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Drop what depends on the values of the weights, which may change now, and update moving averages.

        Args:
            mini_batches: of each micro-batch of the step its mini-batch; none after a failure.
            total: sums a tensor on the CPU over the replicas of the stage; None: it has none.
        """
        if self.model.weight_gradients is not None:
            self.model.weight_gradients.forget()
        self.model.batch_norms.update(mini_batches, total)

    def _graph(self, inputs: Tensors, outputs: Tensors) -> _Graph:
        roots = {}
        for name, is_wanted in self.trainable_outputs.items():
            if name in outputs and outputs[name].requires_grad:
                if not is_wanted:
                    raise RuntimeError(f"{name} depends on a trained parameter, and no gradient was agreed on for it")
                roots[name] = get_gradient_edge(outputs[name])
        return _Graph(inputs, roots, outputs.get("loss"))

    def _run(self, context: Context) -> tuple[Tensors, Tensors]:
        """The received tensors as leaves of this stage's graph, and the stage's outputs."""
        received = {
            name: tensor.detach().requires_grad_(self.trainable_inputs[name]) for name, tensor in context.carry.items()
        }
        micro_batch = context.micro_batch
        loss = micro_batch.loss.for_mini_batch(micro_batch.mini_batch, is_training=True)
        with self.model.batch_norms.of_micro_batch(micro_batch.index):
            outputs, deferred, read = self._forward(loss, context, received)
        if self.is_last:
            auxiliary = outputs.get("auxiliary_loss")
            added = None if auxiliary is None else auxiliary / micro_batch.num_micro_batches
            if auxiliary is not None and torch.is_grad_enabled():  # not where another forward follows
                self.model.router_port.note(auxiliary, is_training=True)
            outputs = {"loss": self._loss_of(loss, read, deferred, added)}
        return received, outputs

    def _forward(
        self, loss: Loss, context: Context, carry: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, DeferredLogits | None, LossInputs]:
        """Run the model: its outputs, its logits if they are deferred, and what else the loss reads."""
        micro_batch, needs_logits = context.micro_batch, context.options.on_logits is not None
        deferred = None if needs_logits or Reads.LOGITS in loss.reads else self.model.deferred_logits()
        head_inputs: Tensors = {}
        with ExitStack() as hooks:
            if self.is_last and Reads.HIDDEN in loss.reads and self.model.adapter.ends_with_head:
                head = self.model.model.get_submodule(self.model.layers[-1].modules[0])

                def keep(_: Any, args: Any) -> None:
                    head_inputs["hidden"] = args[0].view_as(args[0])  # a view: its gradient is not that of the logits

                # Before the hook by which they enter a head that is divided.
                hooks.enter_context(head.register_forward_pre_hook(keep, prepend=True))
            outputs = micro_batch.run(self.model, carry, deferred, self.shared)
        if not loss.adds_auxiliary:
            outputs.pop("auxiliary_loss", None)
        logits = outputs.pop("logits", None)
        read = LossInputs(
            micro_batch.inputs,
            micro_batch.num_units,
            micro_batch.num_tokens,
            hidden=head_inputs.get("hidden") if self.model.adapter.ends_with_head else logits,
            logits=logits,
            companion=context.companion,
        )
        return outputs, deferred, read

    def _loss_of(
        self, loss: Loss, read: LossInputs, deferred: DeferredLogits | None, added: torch.Tensor | None
    ) -> torch.Tensor:
        """The loss of a micro-batch with an auxiliary loss `added`, (). Without gradients its value has no meaning."""
        targets = self.model.adapter.targets(read.inputs)
        if deferred is not None:
            return deferred_loss(deferred, targets, loss, read, added)
        logits = read.logits
        if not torch.is_grad_enabled():
            # Another forward follows; functions of the user's are called in that one alone.
            return logits.new_zeros((), dtype=torch.promote_types(logits.dtype, torch.float32))
        losses = loss.token_loss(logits, targets).view(targets.shape) if Reads.TOKENS in loss.reads else None
        value = loss.total(replace(read, token_losses=losses, logits=logits.view_as(logits)))
        return value if added is None else value + added
