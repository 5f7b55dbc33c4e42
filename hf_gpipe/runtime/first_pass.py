"""The first of two passes of a loss that compares the units of a mini-batch with each other.

Such a loss, for example of embeddings with in-batch negatives, is no sum over micro-batches. But it reads only a small
tensor of each row, its embedding. So a first pass, of forwards alone, computes the embeddings of all rows. They give
the loss and its gradient with respect to each embedding, and the step then propagates these gradients back through the
graphs of its micro-batches (GradCache, Gao et al. 2021, arXiv 2101.06983). Loss and gradient are those of the whole
mini-batch, for any number of micro-batches and replicas. Dropout draws the same numbers in both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch.nn import functional as F

from hf_gpipe.adapters import IGNORED_LABEL
from hf_gpipe.losses.loss import ROW_GRADIENTS, UNIT_LOSSES
from hf_gpipe.runtime.micro_batch import MicroBatch


def gathered_rows(
    own: Mapping[int, torch.Tensor],
    micro_batches: Sequence[MicroBatch],
    total: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The vectors of all rows, from all replicas of the last stage: (N, E) in float64 on the CPU.

    Args:
        own: the vectors of each micro-batch of this replica, (B, E), by the number of the micro-batch.
        micro_batches: all micro-batches of the step.
        total: sums a tensor on the CPU over the replicas, each of which calls this function.
    """
    # A replica without a micro-batch does not know E.
    widths = [vectors.shape[1] for vectors in own.values()]
    width, number = total(torch.tensor([float(sum(widths)), float(len(widths))])).tolist()
    parts = [
        own[micro_batch.index].double().cpu()
        if micro_batch.index in own
        else torch.zeros(micro_batch.num_rows, int(width / number), dtype=torch.float64)
        for micro_batch in micro_batches
    ]
    return total(torch.cat(parts))


def with_comparison(micro_batches: Sequence[MicroBatch], rows: torch.Tensor, device: torch.device) -> list[MicroBatch]:
    """The same micro-batches; their inputs also have each unit's loss, and its gradient with respect to each row's
    vector. Micro-batches whose loss compares no units stay as they are. If gradients are disabled, they are 0.

    Args:
        micro_batches: the micro-batches of a step or of an evaluation.
        rows: the vectors of `Loss.embed` for all rows, (N, E), on the CPU, in the dtype of the comparison.
        device: the device of the comparison.
    """
    parts = iter(rows.split([micro_batch.num_rows for micro_batch in micro_batches]))
    compared: list[MicroBatch] = []
    for _, group in groupby(micro_batches, key=lambda micro_batch: micro_batch.mini_batch):
        members = list(group)
        vectors, loss = [next(parts) for _ in members], members[0].loss
        if not loss.compares_units:
            compared += members
            continue
        leaf = torch.cat(vectors).to(device).requires_grad_(torch.is_grad_enabled())
        labels = _joined([member.inputs["labels"] for member in members]).to(device)
        losses = loss.for_mini_batch(members[0].mini_batch, is_training=torch.is_grad_enabled()).compare(leaf, labels)
        gradients = torch.autograd.grad(losses.sum(), leaf)[0] if leaf.requires_grad else torch.zeros_like(leaf)
        counts = [member.num_rows for member in members]
        unit_losses = losses.detach().repeat_interleave(loss.rows_per_unit)
        for micro_batch, gradient, value in zip(
            members, gradients.cpu().split(counts), unit_losses.cpu().split(counts), strict=True
        ):
            inputs = {**micro_batch.inputs, ROW_GRADIENTS: gradient, UNIT_LOSSES: value}
            compared.append(replace(micro_batch, inputs=inputs))
    return compared


def _joined(labels: Sequence[torch.Tensor]) -> torch.Tensor:
    """The labels of all rows, (N,), or (N, T) of tokens, where the rows of shorter micro-batches are padded."""
    if labels[0].dim() == 1:
        return torch.cat(list(labels))
    width = max(own.shape[1] for own in labels)
    return torch.cat([F.pad(own, (0, width - own.shape[1]), value=IGNORED_LABEL) for own in labels])
