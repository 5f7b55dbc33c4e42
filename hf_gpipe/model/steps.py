"""A step of a model on the same micro-batches, as it is and in stages: the loss and the gradients to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_gpipe.adapters import IGNORED_LABEL, Adapter, StageModel
from hf_gpipe.adapters.modules.kept_state import KeptState
from hf_gpipe.adapters.modules.kernels import Kernels
from hf_gpipe.adapters.routers import auxiliary_loss
from hf_gpipe.adapters.tensor_parallel.ranks import Ranks
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.losses.loss import PLAIN, Loss, LossInputs, Reads
from hf_gpipe.model.assembly import assemble
from hf_gpipe.model.clone import Batch
from hf_gpipe.partition import partition
from hf_gpipe.runtime.channel import LocalChannel
from hf_gpipe.runtime.cutting import Cutting, make_micro_batches, split_rows
from hf_gpipe.runtime.edges import Edge
from hf_gpipe.runtime.executor import Executor
from hf_gpipe.runtime.micro_batch import chunks_of
from hf_gpipe.runtime.stage import Stage
from hf_gpipe.runtime.ties import share_within_process
from hf_gpipe.schedule.builders import build as build_schedule
from hf_gpipe.schedule.kinds import BACKWARD, INPUT, UPDATE, WEIGHT
from hf_gpipe.schedule.placement import Placement
from hf_gpipe.schedule.table import Schedule
from hf_gpipe.settings.chunks import Chunks

#: Largest difference between stages and plain model: of the global gradient norm, for the loss relative.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
MICRO_BATCHES, CPU = 2, torch.device("cpu")


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


class _OfHidden(Loss):
    """Compares models without a head: of each row a sum over its tokens that reads every hidden state."""

    reads = Reads.HIDDEN

    @staticmethod
    def of_rows(hidden: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of each row, (B,), from (B, T, D)."""
        weights = torch.arange(1, 1 + hidden.shape[-1]).to(hidden).sin()
        return ((hidden * weights).sin().sum(dim=2) * inputs["attention_mask"]).sum(dim=1)

    def of_units(self, read: LossInputs) -> torch.Tensor:
        return self.of_rows(read.hidden, read.inputs)


def plain_step(model: PreTrainedModel, batch: Batch | Sequence[Batch], adapter: Adapter | None = None) -> Step:
    """`plain_run` on the micro-batches of a mini-batch, the last one first, as the backwards of `split_step` run.

    Some routers have weights in float32 in a model of float64, whose gradients depend on the order of their sums.

    Args:
        model: the whole model.
        batch: the mini-batch, or several whose gradients are accumulated.
        adapter: cuts it, and prepares a micro-batch; None: it is cut by rows, and taken as it is.
    """
    batches = [batch] if isinstance(batch, Mapping) else batch
    if adapter is None:
        return plain_run(model, [part for one in batches for part in split_rows(one, MICRO_BATCHES)][::-1])
    lengths = [adapter.lengths_in_rows(one) for one in batches]
    parts = [split_rows(one, MICRO_BATCHES, lengths=own) for one, own in zip(batches, lengths, strict=True)]
    return plain_run(model, [adapter.prepare(rows) for of_batch in parts for rows in of_batch][::-1])


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
            losses = _OfHidden.of_rows(output.last_hidden_state, rows)
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


def split_step(
    model: PreTrainedModel,
    adapter: Adapter,
    batch: Batch | Sequence[Batch],
    num_stages: int,
    *,
    splits_backward: bool = False,
    chunks: Chunks = Chunks(),
    packing: bool = False,
    recompute: str = "stage",
    ranks: Ranks | None = None,
    kernels: Kernels = MappingProxyType({}),
    device: torch.device = CPU,
) -> Step:
    """Run the same step in stages, all of them in this process, with recomputation of stages or of blocks, or without.

    With `ranks` this is one of several whose layers are divided.
    """
    models = stage_models(model, adapter, num_stages, ranks, device)
    for stage_model in models.values():
        stage_model.use_kernels(kernels)
    loss_of = PLAIN if adapter.has_head else _OfHidden()
    stages = {
        n: Stage(own, lambda boundary: dict.fromkeys(adapter.sources(boundary), True), loss_of)
        for n, own in models.items()
    }
    edges = {(number, 0, 0): Edge(LocalChannel(device), LocalChannel(device)) for number in range(num_stages - 1)}
    cutting = Cutting(MICRO_BATCHES, packing=packing, chunks=chunks)
    batches = [batch] if isinstance(batch, Mapping) else batch
    micro_batches = make_micro_batches(adapter, batches, cutting, 0, 0, loss=loss_of)
    for stage_model in models.values() if recompute == "block" else ():
        stage_model.checkpoint_blocks()
    table = build_schedule(
        "gpipe",
        num_stages,
        len(micro_batches),
        Placement.spread(num_stages, 1),
        recompute="none" if recompute == "block" else recompute,
        chunks=chunks_of(micro_batches),
    )
    if splits_backward:
        table = _with_weights_last(table)
    loss = Executor({0: stages}, edges).run(table, micro_batches).loss
    assert loss is not None
    parts = {name: (own, p.grad) for own in models.values() for name, p in own.parameters.items() if p.grad is not None}
    gradients = {name: own.whole(name, gradient).to(CPU) for name, (own, gradient) in parts.items()}
    return Step(float(loss), gradients, adapter.dtype)


def stage_models(
    model: PreTrainedModel,
    adapter: Adapter,
    num_stages: int,
    ranks: Ranks | None = None,
    device: torch.device = CPU,
) -> dict[int, StageModel]:
    """The stages of a model in this process, with its weights."""
    models = {}
    for number, layers in enumerate(partition(len(adapter.layers), num_stages, "count")):
        models[number] = assemble(adapter, layers, model, device, ranks=ranks)
        models[number].overlap_sums()
    share_within_process(models)
    return models


def _with_weights_last(table: Schedule) -> Schedule:
    """The table of one process with I for B, and before the updates every W."""
    (row,) = table.actions
    inputs = [replace(action, kind=INPUT) if action.kind == BACKWARD else action for action in row]
    weights = [replace(action, kind=WEIGHT) for action in row if action.kind == BACKWARD]
    end = next(place for place, action in enumerate(row) if action.kind == UPDATE)
    return replace(table, actions=((*inputs[:end], *weights, *inputs[end:]),))
