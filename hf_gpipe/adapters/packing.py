"""Packing: the rows of a mini-batch as documents of any length, which share a micro-batch without padding.

A collator may have put several documents into one row already (transformers' `DataCollatorWithFlattening`, TRL's
collator with `padding_free`): such a mini-batch is flattened. Its documents are found as transformers finds them.

A document of an encoder-decoder has a source and a target. Each micro-batch has a row of sources and a row of targets.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from hf_gpipe.adapters.base import IGNORED_LABEL, Tensors
from hf_gpipe.adapters.text_entries import IDS, MASK
from hf_gpipe.errors import DataError

Document = dict[str, torch.Tensor]
"""The tensors (T,) of a document: input_ids, position_ids, labels and what else a mini-batch has for each token.

The tensors of a target may have another length than the tensors of its source.
"""

#: Entries of flattened mini-batches that say where documents begin, in the forms of kernels.
BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")

_NO_HOLES = "; to pack rows, pad them on the right only"


def is_flattened(batch: Tensors) -> bool:
    """Whether the rows of a mini-batch on the CPU are made of documents."""
    if "attention_mask" in batch:
        # With a mask transformers does not look for documents.
        return False
    positions = batch.get("position_ids")
    restarts = positions is not None and positions.dim() == 2 and bool((positions.diff(dim=-1) != 1).any())
    return restarts or any(name in batch for name in BORDERS)


def documents_of(batch: Tensors, target_keys: Collection[str] = (), first_position: int = 0) -> list[Document]:
    """The documents of a mini-batch on the CPU, in order: those of its flattened rows, else its rows without padding.

    Args:
        batch: the mini-batch.
        target_keys: its entries that have a value for each token of the target, where that is another text.
        first_position: the position of a document's first token, where the mini-batch has no positions.

    Raises:
        DataError: an entry has no value for each token, a row is padded elsewhere than on its right, or rows of sources
            and targets are flattened.
    """
    if "shift_labels" in batch:
        raise DataError("the batch has 'shift_labels', which packing does not support; give labels, or leave it out")
    if target_keys:
        return _pairs_of(batch, target_keys)
    entries = _entries(batch, IDS, MASK)
    pieces = _flattened_pieces(batch) if is_flattened(batch) else _row_pieces(batch)
    documents = [{name: tensor[row, start:stop] for name, tensor in entries.items()} for row, start, stop in pieces]
    for document in documents:
        document.setdefault("position_ids", torch.arange(len(document[IDS])) + first_position)
    return documents


def _pairs_of(batch: Tensors, target_keys: Collection[str]) -> list[Document]:
    """The documents of a mini-batch whose rows are pairs of a source and a target."""
    if is_flattened(batch):
        raise DataError(
            "the rows of the mini-batch are flattened, and a model with an encoder cannot tell its sources and targets "
            "apart; use a collator that pads (with packing=True their padding is left out)"
        )
    source = {name: tensor for name, tensor in batch.items() if name not in target_keys}
    target = {name: tensor for name, tensor in batch.items() if name in target_keys}
    sources = _entries(source, IDS, MASK)
    targets = _entries(target, "labels", "decoder_attention_mask")
    used = used_columns(batch["labels"] != IGNORED_LABEL).clamp(min=1).tolist()
    if (mask := batch.get("decoder_attention_mask")) is not None:
        for row, length in enumerate(used):
            if not mask[row, :length].all():
                raise DataError(
                    f"row {row} of decoder_attention_mask has a 0 before the target's last token{_NO_HOLES}"
                )
    return [
        {
            **{name: tensor[row, start:stop] for name, tensor in sources.items()},
            **{name: tensor[row, : used[row]] for name, tensor in targets.items()},
        }
        for row, start, stop in _row_pieces(source)
    ]


def _entries(batch: Tensors, like: str, mask: str) -> dict[str, torch.Tensor]:
    """The entries of a mini-batch that are cut. Raises DataError for one that has another shape than `like`."""
    shape = batch[like].shape
    entries = {name: tensor for name, tensor in batch.items() if name not in (*BORDERS, mask)}
    if odd := [name for name, tensor in entries.items() if tensor.shape != shape]:
        raise DataError(
            f"{odd[0]} has the shape {tuple(entries[odd[0]].shape)} and {like} {tuple(shape)}; to pack rows, "
            "each entry needs one value for each token"
        )
    return entries


def as_rows(batch: Tensors) -> Tensors:
    """A flattened mini-batch with its documents as rows (N, T), padded on the right; another one as it is."""
    on_cpu = {name: tensor.cpu() for name, tensor in batch.items()}
    if not is_flattened(on_cpu):
        return batch
    documents = documents_of(on_cpu)
    if all(
        torch.equal(document["position_ids"], torch.arange(len(document["position_ids"]))) for document in documents
    ):
        # The model's own.
        documents = [
            {name: tensor for name, tensor in document.items() if name != "position_ids"} for document in documents
        ]
    rows = {
        name: pad_sequence([document[name] for document in documents], True, IGNORED_LABEL if name == "labels" else 0)
        for name in documents[0]
    }
    lengths = torch.tensor([len(document[IDS]) for document in documents])
    return rows | {MASK: (torch.arange(rows[IDS].shape[1]) < lengths[:, None]).long()}


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Share documents out over min(count, N) parts with about equally many tokens; none is empty.

    The longest document that is left goes to the part with the fewest tokens (Graham 1969, LPT): no part has more than
    4/3 of the tokens of the largest part of the best solution.

    Args:
        lengths: tokens of each document, at least one.
        count: number of parts.

    Returns:
        The documents of each part, by index, in order; the part with the most tokens first.
    """
    count = min(count, len(lengths))
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        smallest = min(range(count), key=lambda part: (tokens[part], len(parts[part])))
        parts[smallest].append(index)
        tokens[smallest] += lengths[index]
    return [sorted(parts[part]) for part in sorted(range(count), key=lambda part: -tokens[part])]


def packed_parts(
    batch: Tensors, num_micro_batches: int, target_keys: Collection[str] = (), first_position: int = 0
) -> list[list[Document]]:
    """The documents of a mini-batch on the CPU, in min(M, N) parts of about equally many tokens.

    Args:
        batch: the mini-batch, flattened or padded.
        num_micro_batches: M.
        target_keys, first_position: as for `documents_of`; the tokens of both texts count.

    Raises:
        DataError: the mini-batch has no documents, or cannot be packed.
    """
    documents = documents_of(batch, target_keys, first_position)
    lengths = [len(document[IDS]) + (len(document["labels"]) if target_keys else 0) for document in documents]
    if not sum(lengths):
        raise DataError("a mini-batch needs at least one token; found none")
    return [[documents[index] for index in part] for part in balanced(lengths, num_micro_batches)]


def _flattened_pieces(batch: Tensors) -> list[tuple[int, int, int]]:
    """Return (row, start, stop) of each document of a flattened mini-batch."""
    ids = batch[IDS]
    is_start = torch.zeros(ids.shape, dtype=torch.bool)
    is_start[:, 0] = True
    if "position_ids" in batch:
        is_start[:, 1:] = batch["position_ids"].diff(dim=-1) != 1
    elif "seq_idx" in batch:
        is_start[:, 1:] = batch["seq_idx"].diff(dim=-1) != 0
    else:
        # Numbers of tokens before each document, over all rows.
        is_start.view(-1)[batch["cu_seq_lens_q"][:-1].long()] = True
    starts = is_start.nonzero().tolist()
    stops = [*(start if start else ids.shape[1] for _, start in starts[1:]), ids.shape[1]]
    return [(row, start, stop) for (row, start), stop in zip(starts, stops, strict=True)]


def _row_pieces(batch: Tensors) -> list[tuple[int, int, int]]:
    """Return (row, start, stop) of the tokens of each row that are not padding."""
    ids, mask = batch[IDS], batch.get("attention_mask")
    if mask is None:
        return [(row, 0, ids.shape[1]) for row in range(ids.shape[0])]
    if mask.shape != ids.shape:
        shapes = tuple(mask.shape), tuple(ids.shape)
        raise DataError(f"{MASK} has the shape {shapes[0]} and {IDS} {shapes[1]}; to pack rows, give both one")
    used = mask.bool() | (batch["labels"] != IGNORED_LABEL) if "labels" in batch else mask.bool()
    columns = torch.arange(ids.shape[1])
    first, stop = used.int().argmax(dim=1, keepdim=True), used_columns(used).clamp(min=1)[:, None]
    if len(on_the_left := (first > 0).any(dim=1).nonzero()):
        raise DataError(
            f"row {int(on_the_left[0])} is padded on the left, where the plain model counts padding as positions and "
            "predicts the first token from it; to pack rows, pad them on the right (padding_side of the tokenizer)"
        )
    if len(holes := ((columns >= first) & (columns < stop - 1) & (mask == 0)).any(dim=1).nonzero()):
        raise DataError(f"row {int(holes[0])} of attention_mask has a 0 between two tokens{_NO_HOLES}")
    return [(row, *piece) for row, piece in enumerate(torch.cat([first, stop], dim=1).tolist())]


def used_columns(is_used: torch.Tensor) -> torch.Tensor:
    """Return the number of columns up to the last used column, (N,), for each row of a mask (N, T)."""
    return (is_used * torch.arange(1, is_used.shape[1] + 1, device=is_used.device)).amax(dim=1)
