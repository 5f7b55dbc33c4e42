"""From a mini-batch to micro-batches, and the records that the actions of a micro-batch read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_gpipe.adapters import IGNORED_LABEL, Adapter
from hf_gpipe.adapters.dropout import mix
from hf_gpipe.errors import DataError

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a mini-batch, the same on every stage.

    Attributes:
        index: its number in the mini-batch, from 0.
        inputs: what `Adapter.prepare` made of its rows.
        seed: its seed for dropout, from (seed, step, index).
        num_target_tokens: target tokens of the whole mini-batch, by which the loss is divided.
        num_micro_batches: of the step; an auxiliary loss is the mean over them.
    """

    index: int
    inputs: Mapping[str, torch.Tensor]
    seed: int
    num_target_tokens: int
    num_micro_batches: int


@dataclass(frozen=True)
class Context:
    """All that F, R and B of one (stage, micro-batch) read; nothing of it ever changes.

    Attributes:
        micro_batch: the micro-batch, its tensors on the stage's device.
        carry: the tensors received from the previous stage.
    """

    micro_batch: MicroBatch
    carry: Mapping[str, torch.Tensor]


def split_rows(batch: Batch, num_micro_batches: int) -> list[dict[str, torch.Tensor]]:
    """Cut a mini-batch of n rows into min(M, n) parts whose sizes differ by at most one (GPipe, section 2.3).

    Args:
        batch: tensors whose first dimension is the row.
        num_micro_batches: M.

    Raises:
        DataError: no tensors, no rows, or tensors that differ in their number of rows.
    """
    rows = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in batch.items()}
    if len(set(rows.values())) != 1 or not all(rows.values()):
        raise DataError(f"a mini-batch needs tensors with the same number of rows, at least one; found {rows}")
    count = min(num_micro_batches, next(iter(rows.values())))
    parts = {name: torch.tensor_split(tensor, count) for name, tensor in batch.items()}
    return [{name: pieces[i] for name, pieces in parts.items()} for i in range(count)]


def make_micro_batches(
    adapter: Adapter, batches: Sequence[Batch], num_micro_batches: int, seed: int, step: int
) -> list[MicroBatch]:
    """The micro-batches of one step: of one mini-batch, or of several whose gradients are accumulated.

    Args:
        adapter: the model's adapter.
        batches: mini-batches; each is cut into at most `num_micro_batches`.
        num_micro_batches: M.
        seed: the run's seed.
        step: number of this optimizer step.
    """
    if not batches:
        raise DataError("there is no mini-batch to run on")
    for batch in batches:
        if missing := [name for name in ("input_ids", "labels") if name not in batch]:
            raise DataError(f"a mini-batch needs input_ids and labels; {missing[0]!r} is missing, found {list(batch)}")
    inputs = [adapter.prepare(rows) for batch in batches for rows in split_rows(batch, num_micro_batches)]
    count = sum(int((adapter.targets(one) != IGNORED_LABEL).sum()) for one in inputs)
    return [MicroBatch(i, one, mix(seed, step, i), max(count, 1), len(inputs)) for i, one in enumerate(inputs)]
