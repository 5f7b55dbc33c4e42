"""Split a mini-batch into micro-batches, and the data that the actions of a micro-batch read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.modules.dropout import NoisyRows, key, mix
from hf_gpipe.adapters.packing import packed_parts
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.losses.loss import PLAIN, Loss
from hf_gpipe.recipe import Chunks
from hf_gpipe.runtime.chunks import Chunk, check_batch, cut
from hf_gpipe.runtime.teacher import TeacherLogits

Batch = Mapping[str, torch.Tensor]
LogitsCallback = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], None]
"""(logits (B, T, V), the micro-batch's inputs), called in evaluation."""


#: Of a mini-batch whose entries all have a first dimension of rows.
NO_LENGTHS: Batch = {}
#: Under this name the numbers of the rows are cut together with their tensors.
_NUMBER = "number of the row"


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a mini-batch, the same on every stage.

    Attributes:
        index: its number in the table, from 0: in the step, or counted over the steps of a window.
        inputs: its rows, as returned by `Adapter.prepare`, with masks as `KnownMask`.
        seed: its seed for dropout, from (seed, step, number in the step).
        rows: for noise on their embeddings, with a seed of each from (seed, step, number of the row in the step), which
            is the same for any number of micro-batches; packed documents are one row, with the micro-batch's seed.
        num_units: units of the loss in the whole mini-batch, by which its sum is divided; at least 1.
        num_tokens: in the whole mini-batch, as the loss counts them (`Loss.row_tokens`); at least 1.
        num_micro_batches: of the step; an auxiliary loss is the mean over them.
        mini_batch: the number of the step, or of the evaluation, and that of its mini-batch in it.
        chunk: the tokens of its rows that it has; None: all.
        shapes: of what crosses each boundary, by name, for those that were asked for.
    """

    index: int
    inputs: Mapping[str, torch.Tensor]
    seed: int
    num_units: int
    num_micro_batches: int
    mini_batch: tuple[int, int] = (0, 0)
    rows: NoisyRows = NoisyRows()
    chunk: Chunk | None = None
    num_tokens: int = 1
    shapes: dict[int, Mapping[str, tuple[int, ...]]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def alone(cls, inputs: Mapping[str, torch.Tensor]) -> MicroBatch:
        """The only micro-batch of a step that does not count, with these prepared inputs."""
        num_targets = inputs["labels"].numel() if "labels" in inputs else 1
        return cls(0, inputs, seed=0, num_units=num_targets, num_micro_batches=1)

    def with_inputs(self, inputs: Mapping[str, torch.Tensor]) -> MicroBatch:
        """The same micro-batch with other inputs, of the same shapes at the boundaries."""
        changed = replace(self, inputs=inputs)
        changed.shapes.update(self.shapes)
        return changed

    @property
    def num_rows(self) -> int:
        # Other entries may be of images, of which a row has any number.
        named = "labels" if "labels" in self.inputs else next(iter(self.inputs))
        return len(self.inputs[named])

    @property
    def is_packed(self) -> bool:
        """Whether its only row is made of documents."""
        return getattr(self.inputs.get("attention_mask"), "documents", None) is not None


@dataclass(frozen=True)
class StepOptions:
    """Options of all actions of one step.

    Attributes:
        loss_scale: factor of the loss before backward, and so of the gradients.
        on_logits: called on the last stage in evaluation, for each micro-batch.
        is_first_pass: whether forwards give what a loss that compares units reads of each row.
        is_of_tokens: whether forwards give the log-probability of each target, as the loss reads it.
        is_likelihood_only: whether an evaluation gives the rows' negative log-likelihood alone, whatever the loss is.
    """

    loss_scale: float = 1.0
    on_logits: LogitsCallback | None = None
    is_likelihood_only: bool = False
    is_first_pass: bool = False
    is_of_tokens: bool = False


PLAIN_STEP = StepOptions()


@dataclass(frozen=True)
class Context:
    """The data that F, R and B of one (stage, micro-batch) read. It never changes.

    Attributes:
        micro_batch: the micro-batch, its tensors on the stage's device.
        carry: the tensors received from the previous stage.
        teacher: the logits of a teacher, on the last stage.
    """

    micro_batch: MicroBatch
    carry: Mapping[str, torch.Tensor]
    options: StepOptions = PLAIN_STEP
    teacher: TeacherLogits | None = None


def split_rows(
    batch: Batch, num_micro_batches: int, rows_per_unit: int = 1, lengths: Batch = NO_LENGTHS
) -> list[dict[str, torch.Tensor]]:
    """Cut a mini-batch of n units into min(M, n) parts whose sizes differ by at most one (GPipe, section 2.3).

    Args:
        batch: tensors whose first dimension is the row.
        num_micro_batches: M.
        rows_per_unit: rows next to each other that stay together.
        lengths: of entries whose first dimension is not the row, how much of it each row has, (n,).

    Raises:
        DataError: there are no tensors or no rows, the tensors differ in their number of rows, or a unit is not whole.
    """
    num_units = _num_units(batch, rows_per_unit, lengths)
    count = min(num_micro_batches, num_units)
    sizes = [(num_units // count + (part < num_units % count)) * rows_per_unit for part in range(count)]
    return _cut(batch, sizes, lengths)


def _cut(batch: Batch, sizes: list[int], lengths: Batch) -> list[dict[str, torch.Tensor]]:
    """Parts of so many rows, one after the other. A part of whose rows none has an entry lacks it."""
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
    """Units of a mini-batch. Raises DataError like `split_rows`."""
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
        rows_per_unit: rows next to each other that stay together; the longest counts.
        lengths: as of `split_rows`.
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

    A part has as many tokens as its number of rows times the length of its first one. Returns the numbers of rows.
    """

    def runs(limit: int) -> list[int]:
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
        low, high = (low, middle) if len(runs(middle)) <= count else (middle + 1, high)
    return runs(low)


@dataclass
class Cutting:
    """How mini-batches are cut into micro-batches.

    Attributes:
        num_micro_batches: M, of a mini-batch that has as many rows.
        length_bucketing: whether a mini-batch is cut by tokens, after its rows have been sorted by length.
        packing: whether the rows of a mini-batch are packed, shared out by tokens. Those of a flattened one always are.
        is_compiled: whether the blocks are compiled by torch.compile.
        chunks: how rows are cut into chunks of tokens, each a micro-batch of the table; into fewer where a micro-batch
            has fewer tokens in a row.
    """

    num_micro_batches: int
    length_bucketing: bool = False
    packing: bool = False
    is_compiled: bool = False
    chunks: Chunks = Chunks()


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
        batches: mini-batches.
        cutting: of each.
        first: the index of the first one, where a table has several steps.
        loss: says how many units there are, and which rows stay together.

    Raises:
        DataError: a mini-batch cannot be cut, a row is too long for the model, or an id is not in its vocabulary.
        UserError: the rows cannot be packed, because of the model or the loss, or packed rows not be cut into chunks.
    """
    if not batches:
        raise DataError("there is no mini-batch to run on")
    count, chunks = cutting.num_micro_batches, cutting.chunks
    inputs: list[Mapping[str, torch.Tensor]] = []
    owners: list[int] = []
    noisy: list[NoisyRows] = []
    num_rows = 0
    for number, given in enumerate(batches):
        # On the CPU, where reading a value makes nobody wait.
        batch = {name: tensor.cpu() for name, tensor in given.items()}
        adapter.check_keys(batch)
        if "shift_labels" in batch and not loss.is_of_tokens:
            raise UserError(f"the batch has 'shift_labels', which {type(loss).__name__} does not read; give labels")
        is_packed = cutting.packing or adapter.is_flattened(batch)
        if is_packed or chunks.most > 1:
            check_batch(adapter, batch, loss, packing=is_packed, is_cut=chunks.most > 1)
        if is_packed:
            parts = packed_parts(batch, count, adapter.target_keys)
            packed = [adapter.packed(documents, is_compiled=cutting.is_compiled) for documents in parts]
            widths = [adapter.main_input(one).shape[1] for one in packed]
            noisy += [
                NoisyRows((mix(seed, step, len(inputs) + i),), sum(widths), width) for i, width in enumerate(widths)
            ]
            inputs += packed
        else:
            lengths = adapter.lengths_in_rows(batch)
            numbered = batch | {_NUMBER: num_rows + torch.arange(len(batch["labels"]))}
            rows = (
                split_tokens(numbered, count, adapter, loss.rows_per_unit, lengths)
                if cutting.length_bucketing
                else split_rows(numbered, count, loss.rows_per_unit, lengths)
            )
            width = adapter.main_input(batch).shape[-1]
            noisy += [
                NoisyRows(tuple(mix(seed, step, key("row"), row) for row in part.pop(_NUMBER).tolist()), width, width)
                for part in rows
            ]
            inputs += [adapter.with_known_masks(adapter.prepare(part)) for part in rows]
        num_rows += len(batch["labels"])
        owners += [number] * (len(inputs) - len(owners))
    for own in inputs:
        loss.check_inputs(adapter, own)
    targets = [adapter.targets(own) for own in inputs]
    num_units, num_tokens = (
        max(1, sum(int(number(target).sum()) for target in targets)) for number in (loss.row_units, loss.row_tokens)
    )
    whole = [
        MicroBatch(
            first + i, own, mix(seed, step, i), num_units, len(inputs), (step, owner), of_rows, num_tokens=num_tokens
        )
        for i, (own, owner, of_rows) in enumerate(zip(inputs, owners, noisy, strict=True))
    ]
    if chunks.most > 1:
        chunks = chunks.within(min(adapter.main_input(own).shape[1] for own in inputs))
    if chunks.most == 1:
        return whole
    of_chunks = (chunk for micro_batch in whole for chunk in in_chunks(micro_batch, chunks, adapter))
    return [replace(chunk, index=first + number) for number, chunk in enumerate(of_chunks)]


def in_chunks(whole: MicroBatch, chunks: Chunks, adapter: Adapter) -> list[MicroBatch]:
    """The chunks of a micro-batch in place of it, all with its index. A chunk's seed depends on its number too."""
    length = adapter.main_input(whole.inputs).shape[1]
    return [
        replace(
            whole,
            inputs=part,
            seed=mix(whole.seed, number),
            rows=whole.rows._replace(start=whole.rows.start + start),
            chunk=Chunk(whole.index, start, length, chunks.most),
        )
        for number, (start, part) in enumerate(cut(whole.inputs, chunks, adapter))
    ]


def chunks_of(micro_batches: Sequence[MicroBatch]) -> int:
    """Into how many chunks the rows of a step's micro-batches are cut."""
    chunk = micro_batches[0].chunk
    return 1 if chunk is None else chunk.of


def on_devices(
    micro_batches: Sequence[MicroBatch], devices: Collection[torch.device]
) -> dict[torch.device, dict[int, MicroBatch]]:
    """The micro-batches, by number, on each device of this process; the host does not wait for copies to CUDA.

    Such a copy needs pinned memory. Torch keeps its pinned blocks for reuse, and none is reused before its copies are
    done (CachingHostAllocator).
    """
    on_host = micro_batches
    if any(device.type == "cuda" for device in devices):
        on_host = [
            _changed(micro_batch, lambda tensor: tensor.contiguous().pin_memory()) for micro_batch in micro_batches
        ]
    return {
        device: {micro_batch.index: _on_device(micro_batch, device) for micro_batch in on_host} for device in devices
    }


def _on_device(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return micro_batch
    return _changed(micro_batch, lambda tensor: tensor.to(device, non_blocking=True))


def _changed(micro_batch: MicroBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
    return replace(micro_batch, inputs={name: change(tensor) for name, tensor in micro_batch.inputs.items()})
