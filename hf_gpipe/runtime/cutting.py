"""Cuts a mini-batch into micro-batches, by rows, by tokens, or by documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.modules.dropout import NoisyRows, key, mix
from hf_gpipe.adapters.packing import packed_parts
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.losses.loss import NOT_PACKED, PLAIN, Loss
from hf_gpipe.registry import parts_of_modes
from hf_gpipe.runtime.micro_batch import Batch, MicroBatch
from hf_gpipe.settings.pipeline import DecidedConfig

#: The `lengths` of a mini-batch in which the first dimension of every tensor is the row.
NO_LENGTHS: Batch = {}
#: The name of a temporary entry: the number of each row, which is cut together with the row's tensors.
_NUMBER = "number of the row"


class Cutter(Protocol):
    """Cuts micro-batches into smaller ones (`hf_gpipe.modes`)."""

    @property
    def most(self) -> int:
        """The number of parts of a micro-batch, if it is long enough. They are a group (`MicroBatch.group_size`)."""

    def check(self, adapter: Adapter, batch: Batch, *, packing: bool) -> None:
        """Raise UserError if the micro-batches of a mini-batch cannot be cut; `packing`: whether its rows are packed"""

    def cut(self, micro_batches: Sequence[MicroBatch], adapter: Adapter) -> Sequence[MicroBatch]:
        """Cut the micro-batches of a step. The first result has the index of the first of them."""


def cutters_of(config: DecidedConfig) -> tuple[Cutter, ...]:
    """The cutters that cut the micro-batches of training further, by a decided configuration."""
    found = (mode.cutter(config) for mode in parts_of_modes("cutting").values())
    return tuple(cutter for cutter in found if cutter is not None)


@dataclass
class Cutting:
    """How mini-batches are cut into micro-batches.

    Attributes:
        num_micro_batches: M. A mini-batch of fewer rows is cut into fewer micro-batches.
        length_bucketing: whether a mini-batch is cut by tokens, after its rows have been sorted by length.
        packing: whether the rows of each micro-batch are packed into one. Rows of a flattened mini-batch always are.
        is_compiled: whether the blocks are compiled by torch.compile.
        further: what cuts the micro-batches into those of the table.
    """

    num_micro_batches: int
    by_length: bool = False
    packing: bool = False
    is_compiled: bool = False
    further: Sequence[Cutter] = ()


_Parts = list[tuple[Mapping[str, torch.Tensor], NoisyRows]]
"""The inputs of each micro-batch, and its rows."""


def make_micro_batches(
    adapter: Adapter,
    batches: Sequence[Batch],
    cutting: Cutting,
    seed: int,
    step: int,
    first: int = 0,
    loss: Loss = PLAIN,
) -> list[MicroBatch]:
    """The micro-batches of one step: of one mini-batch, or of several whose gradients are accumulated.

    Args:
        batches: the mini-batches.
        cutting: how each mini-batch is cut.
        first: the index of the first micro-batch, where a table has several steps.
        loss: gives the number of units, and says which rows stay together.

    Raises:
        DataError: a mini-batch cannot be cut, a row is too long for the model, or an id is not in its vocabulary.
        UserError: the model or the loss cannot use packed rows, or micro-batches cannot be cut further.
    """
    if not batches:
        raise DataError("there is no mini-batch to run on")
    parts: _Parts = []
    owners: list[int] = []
    losses: list[Loss] = []
    num_rows = 0
    for number, given in enumerate(batches):
        # The code below reads values, and on a GPU each read would wait for the device.
        batch = {name: tensor.cpu() for name, tensor in given.items()}
        own = loss.dataset_loss(batch)
        adapter.check_keys(batch)
        if "shift_labels" in batch and not loss.reads_tokens_only:
            raise UserError(f"the batch has 'shift_labels', which {type(loss).__name__} does not read; give labels")
        is_packed = cutting.packing or adapter.is_flattened(batch)
        if is_packed and not loss.reads_tokens_only:
            raise UserError(NOT_PACKED.format(type(loss).__name__))
        for cutter in cutting.further:
            cutter.check(adapter, batch, packing=is_packed)
        if is_packed:
            check_text_alone(adapter, batch, "packing")
            parts += _of_documents(adapter, batch, cutting, partial(mix, seed, step), len(parts))
        else:
            seed_of = partial(mix, seed, step, key("row"))
            parts += _of_rows(adapter, batch, cutting, own.rows_per_unit, seed_of, num_rows)
        num_rows += len(batch["labels"])
        losses += [own] * (len(parts) - len(owners))
        owners += [number] * (len(parts) - len(owners))
    for (inputs, _), own in zip(parts, losses, strict=True):
        own.check_inputs(adapter, inputs)
    targets = [(own, adapter.targets(inputs)) for (inputs, _), own in zip(parts, losses, strict=True)]
    counts = max(1, sum(int(own.row_units(target).sum()) for own, target in targets)), len(parts)
    num_tokens = max(1, sum(int(own.row_tokens(target).sum()) for own, target in targets))
    micro_batches: Sequence[MicroBatch] = [
        MicroBatch(first + i, inputs, mix(seed, step, i), *counts, (step, owner), rows, num_tokens=num_tokens, loss=own)
        for i, ((inputs, rows), owner, own) in enumerate(zip(parts, owners, losses, strict=True))
    ]
    for cutter in cutting.further:
        micro_batches = cutter.cut(micro_batches, adapter)
    return [*micro_batches]


def check_text_alone(adapter: Adapter, batch: Batch, option: str) -> None:
    """Raise UserError if a mini-batch has images, whose tokens an option would separate from them."""
    if images := sorted(batch.keys() & set(adapter.image_keys)):
        raise UserError(
            f"the batch has {images[0]!r}, and {option} is for rows of text alone, because it would separate tokens "
            f"from their images; leave {option} out"
        )


def _of_documents(
    adapter: Adapter, batch: Batch, cutting: Cutting, seed_of: Callable[[int], int], first: int
) -> _Parts:
    """Cut a mini-batch by documents; each micro-batch has its documents in one row.

    Args:
        seed_of: function from the number of a micro-batch in the step to the seed of its row.
        first: the number of the first micro-batch.
    """
    parts = packed_parts(batch, cutting.num_micro_batches, adapter.target_keys, adapter.first_position)
    inputs = [adapter.packed(documents, is_compiled=cutting.is_compiled) for documents in parts]
    widths = [adapter.main_input(own).shape[1] for own in inputs]
    rows = [NoisyRows((seed_of(number),), sum(widths), width) for number, width in enumerate(widths, first)]
    return list(zip(inputs, rows, strict=True))


def _of_rows(
    adapter: Adapter, batch: Batch, cutting: Cutting, rows_per_unit: int, seed_of: Callable[[int], int], first: int
) -> _Parts:
    """Cut a mini-batch by rows, or by tokens where rows are sorted by length.

    Args:
        seed_of: function from the number of a row in the step to its seed.
        first: the number of the first row.
    """
    lengths = adapter.lengths_in_rows(batch)
    numbered = {**batch, _NUMBER: first + torch.arange(len(batch["labels"]))}
    if cutting.by_length:
        parts = split_tokens(numbered, cutting.num_micro_batches, adapter, rows_per_unit, lengths)
    else:
        parts = split_rows(numbered, cutting.num_micro_batches, rows_per_unit, lengths)
    width = adapter.main_input(batch).shape[-1]
    rows = [NoisyRows(tuple(map(seed_of, part.pop(_NUMBER).tolist())), width, width) for part in parts]
    return [(adapter.with_known_masks(adapter.prepare(part)), own) for part, own in zip(parts, rows, strict=True)]


def split_rows(
    batch: Batch, num_micro_batches: int, rows_per_unit: int = 1, lengths: Batch = NO_LENGTHS
) -> list[dict[str, torch.Tensor]]:
    """Cut a mini-batch of n units into min(M, n) parts whose sizes differ by at most one (GPipe, section 2.3).

    Args:
        batch: tensors whose first dimension is the row.
        num_micro_batches: M.
        rows_per_unit: rows next to each other that stay together.
        lengths: for each entry whose first dimension is not the row: how many of its items belong to each row, (n,).

    Raises:
        DataError: there are no tensors or no rows, the tensors differ in their number of rows, or a unit is not whole.
    """
    num_units = _num_units(batch, rows_per_unit, lengths)
    count = min(num_micro_batches, num_units)
    sizes = [(num_units // count + (part < num_units % count)) * rows_per_unit for part in range(count)]
    return _cut(batch, sizes, lengths)


def _cut(batch: Batch, sizes: list[int], lengths: Batch) -> list[dict[str, torch.Tensor]]:
    """Consecutive parts of `sizes` rows. A part has no entry, such as images, that none of its rows has."""
    pieces = {
        name: tensor.split([int(part.sum()) for part in lengths[name].split(sizes)] if name in lengths else sizes)
        for name, tensor in batch.items()
    }
    return [{n: parts[i] for n, parts in pieces.items() if len(parts[i])} for i in range(len(sizes))]


def _in_order(batch: Batch, order: torch.Tensor, lengths: Batch) -> tuple[dict[str, torch.Tensor], Batch]:
    """The rows of a mini-batch in another order, and their lengths."""
    sorted_rows = {}
    for name, tensor in batch.items():
        if name in lengths:
            rows = tensor.split(lengths[name].tolist())
            sorted_rows[name] = torch.cat([rows[row] for row in order.tolist()])
        else:
            sorted_rows[name] = tensor[order.to(tensor.device)]
    return sorted_rows, {name: own[order] for name, own in lengths.items()}


def _num_units(batch: Batch, rows_per_unit: int, lengths: Batch) -> int:
    """The number of units in a mini-batch. Raises DataError like `split_rows`."""
    rows = {
        name: len(lengths[name]) if name in lengths else tensor.shape[0] if tensor.dim() else 0
        for name, tensor in batch.items()
        if name != _NUMBER
    }
    if len(set(rows.values())) != 1 or not all(rows.values()):
        raise DataError(f"a mini-batch needs tensors with the same number of rows, at least one; found {rows}")
    num_rows = next(iter(rows.values()))
    if num_rows % rows_per_unit:
        raise DataError(
            f"a mini-batch has {num_rows} rows, and the loss needs them in groups of {rows_per_unit}; give whole groups"
        )
    return num_rows // rows_per_unit


def split_tokens(
    batch: Batch, num_micro_batches: int, adapter: Adapter, rows_per_unit: int = 1, lengths: Batch = NO_LENGTHS
) -> list[dict[str, torch.Tensor]]:
    """Cut a mini-batch as `split_rows` does, but by tokens: units of similar length together, the longest first.

    Each of the min(M, n) parts is as long as its longest row. The sizes minimise the number of tokens, padding
    included, of the largest part, so that no micro-batch slows the pipeline down.

    Args:
        batch: tensors whose first dimension is the row.
        num_micro_batches: M.
        adapter: gives the length of a row.
        rows_per_unit: rows next to each other that stay together; their longest row gives the length of the unit.
        lengths: as in `split_rows`.
    """
    count = min(num_micro_batches, _num_units(batch, rows_per_unit, lengths))
    tokens = adapter.row_lengths(batch).view(-1, rows_per_unit).amax(dim=1)
    units = tokens.argsort(descending=True, stable=True)
    order = (units[:, None] * rows_per_unit + torch.arange(rows_per_unit)).flatten()
    sizes = [size * rows_per_unit for size in _even_cut(tokens[units].tolist(), count)]
    ordered, lengths = _in_order(batch, order, lengths)
    return _cut(ordered, sizes, lengths)


def _even_cut(lengths: Sequence[int], count: int) -> list[int]:
    """Cut rows, sorted from long to short, into `count` non-empty parts, and minimise the tokens of the largest part.

    A part has as many tokens as its number of rows times the length of its first row. Returns the number of rows of
    each part.
    """

    def sizes_within(limit: int) -> list[int]:
        """Parts of at most `limit` tokens, each as large as possible, with a row left for each part after it."""
        sizes: list[int] = []
        start = 0
        while start < len(lengths):
            most = len(lengths) - start - max(0, count - len(sizes) - 1)
            sizes.append(max(1, min(limit // max(lengths[start], 1), most)))
            start += sizes[-1]
        return sizes

    low, high = max(lengths[0], 1), max(lengths[0], 1) * len(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(sizes_within(middle)) <= count else (middle + 1, high)
    return sizes_within(low)
