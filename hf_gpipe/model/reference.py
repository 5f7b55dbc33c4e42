"""A step of the plain model: the loss and the gradients with which those of stages are compared.

Nothing here is code of the runtime, which is what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_gpipe.adapters import IGNORED_LABEL, Adapter
from hf_gpipe.adapters.modules.kept_state import KeptState
from hf_gpipe.adapters.routers import auxiliary_loss
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.losses.loss import Loss, LossInputs, Reads
from hf_gpipe.model.clone import Batch

#: Largest difference between stages and plain model: of the global gradient norm, for the loss relative.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Step:
    """Loss and gradients of one step, by parameter name; `dtype` is the type in which the loss was computed."""

    loss: float
    gradients: dict[str, torch.Tensor]
    dtype: torch.dtype

    @property
    def norm(self) -> float:
        """The global gradient norm."""
        return float(torch.sqrt(sum((g.double().square().sum() for g in self.gradients.values()), torch.zeros(()))))

    def difference(self, other: Step) -> float:
        """The largest difference of the loss (relative) or of a gradient (of the global norm of `other`).

        It is inf unless the same parameters have a gradient.
        """
        if self.gradients.keys() != other.gradients.keys():
            return float("inf")
        norm = other.norm
        errors = [float((self.gradients[name] - g).norm()) / norm for name, g in other.gradients.items()]
        return max([abs(self.loss - other.loss) / max(1.0, abs(other.loss)), *errors])


class HiddenLoss(Loss):
    """Compares models without a head: of each row a sum over its tokens that reads every hidden state."""

    reads = Reads.HIDDEN

    @staticmethod
    def of_rows(hidden: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each row, (B,), from (B, T, D)."""
        weights = torch.arange(1, 1 + hidden.shape[-1]).to(hidden).sin()
        return ((hidden * weights).sin().sum(dim=2) * inputs["attention_mask"]).sum(dim=1)

    def unit_losses(self, read: LossInputs) -> torch.Tensor:
        return self.of_rows(read.hidden, read.inputs)


def plain_step(model: PreTrainedModel, batch: Batch | Sequence[Batch], adapter: Adapter | None = None) -> Step:
    """`plain_run` on the micro-batches of a mini-batch, the last one first, as the backwards of gpipe run.

    Some routers have weights in float32 in a model of float64, whose gradients depend on the order of their sums.

    Args:
        model: the whole model.
        batch: the mini-batch, or several whose gradients are accumulated.
        adapter: cuts it, and prepares a micro-batch; None: it is cut by rows, and taken as it is.
    """
    batches = [batch] if isinstance(batch, Mapping) else batch
    if adapter is None:
        return plain_run(model, [part for one in batches for part in _halves(one, {})][::-1])
    parts = [part for one in batches for part in _halves(one, adapter.lengths_in_rows(one))]
    return plain_run(model, [adapter.prepare(rows) for rows in parts][::-1])


def _halves(batch: Batch, lengths: Mapping[str, torch.Tensor]) -> list[Batch]:
    """The micro-batches of a mini-batch, cut by rows. An entry of `lengths` has so many items for each row, or none."""
    num_rows, halves = len(batch["labels"]), []
    for own in torch.arange(num_rows).tensor_split(min(MICRO_BATCHES, num_rows)):
        parts = {}
        for name, tensor in batch.items():
            items = tensor.split(lengths[name].tolist()) if name in lengths else tensor.split(1)
            parts[name] = torch.cat([items[row] for row in own.tolist()])
        halves.append({name: part for name, part in parts.items() if len(part)})
    return halves


def plain_run(model: PreTrainedModel, micro_batches: Sequence[Batch], label_smoothing: float = 0.0) -> Step:
    """Run the plain model on each micro-batch; the loss is summed over target tokens, divided by their number in all.

    Each forward begins with what the modules keep now (`KeptState`). An auxiliary loss of experts is the mean over the
    micro-batches.
    """
    model.zero_grad()
    causal = not model.config.is_encoder_decoder
    targets = [next_tokens(rows["labels"]) if causal else rows["labels"] for rows in micro_batches]
    num_tokens = torch.stack([(target != IGNORED_LABEL).sum() for target in targets]).sum()
    total = torch.zeros(())
    new = KeptState(model)
    for rows, target in zip(micro_batches, targets, strict=True):
        # Labels are needed only by an encoder-decoder that makes its decoder's inputs from them.
        makes_inputs = not causal and "decoder_input_ids" not in rows
        given = {name: tensor for name, tensor in rows.items() if name != "labels" or makes_inputs}
        output = model(**given, use_cache=False)
        if "logits" in output:
            losses = F.cross_entropy(
                output.logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=label_smoothing
            )
            loss = losses.sum() / num_tokens
        else:
            losses = HiddenLoss.of_rows(output.last_hidden_state, rows)
            loss = losses.sum() / sum(map(len, targets))
        if getattr(output, "aux_loss", None) is not None:
            auxiliary = auxiliary_loss(model, output)
            loss = loss + auxiliary / len(micro_batches)
            _check_coefficient(model, rows, output.logits.dtype, auxiliary.detach())
        loss.backward()
        new.restore()
        total = total + loss.detach()
    ties = model.all_tied_weights_keys
    gradients = {ties.get(name, name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Step(float(total), gradients, losses.dtype)


def next_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Labels (B, T) aligned with the logits of a decoder-only model: each position predicts the next token."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def _check_coefficient(model: PreTrainedModel, rows: Batch, dtype: torch.dtype, auxiliary: torch.Tensor) -> None:
    """Raise UnsupportedModelError unless the model's own loss has the auxiliary loss with this coefficient."""
    with torch.no_grad():
        output = model(**rows, use_cache=False)
        targets = next_tokens(rows["labels"]).flatten()
        mean = F.cross_entropy(output.logits.flatten(0, 1), targets, ignore_index=IGNORED_LABEL)
    own = output.loss - mean
    # The model's own loss computes in float32.
    rounding = 1e-4 if dtype in TOLERANCES else 0.1
    if abs(float(own - auxiliary)) > rounding * max(1.0, abs(float(own))):
        raise UnsupportedModelError(f"{model.config.model_type}: the auxiliary loss's coefficient is not known")
