"""Cuts the rows of a micro-batch into chunks of tokens, which go through the stages one after another.

One long row then fills the pipeline as many micro-batches would, and a stage stores the activations of a chunk instead
of a whole row's (TeraPipe, arXiv 2102.07988; Seq1F1B, arXiv 2406.03488; SlimPipe, arXiv 2504.14519). All chunks are
equally long, or later chunks are shorter because their tokens attend to more tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import torch

from hf_gpipe.adapters import IGNORED_LABEL, Adapter
from hf_gpipe.adapters.attention.documents import is_flash
from hf_gpipe.adapters.attention.known_mask import KnownMask
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.libraries.transformers import attention_implementation
from hf_gpipe.losses.loss import NOT_PACKED, Loss
from hf_gpipe.settings.chunks import Chunks

Inputs = Mapping[str, torch.Tensor]

#: The name of the option, for error messages.
SETTING = "sequence_chunks"


class Chunk(NamedTuple):
    """The place of a chunk in its rows.

    Attributes:
        sequence: the index of the micro-batch before it was cut, the same for all of its chunks.
        start: the position of the chunk's first token in the rows.
        length: the number of tokens in a whole row, T.
        of: the number of chunks into which the rows are cut.
    """

    sequence: int
    start: int
    length: int
    of: int


def check_chunks(adapter: Adapter, *, is_loss_of_tokens: bool, packing: bool) -> None:
    """Raise UserError where rows cannot be cut into chunks, because of the model, the loss or packed documents."""
    model = type(adapter.reference).__name__
    reason = None
    if not isinstance(adapter, TextAdapter):
        reason = f"{model} does not read text"
    elif adapter.config.is_encoder_decoder:
        reason = f"{model} has an encoder, whose tokens attend to later ones"
    elif adapter.labels_rows:
        reason = f"{model} scores rows as a whole"
    elif not is_loss_of_tokens:
        reason = "the loss needs whole rows"
    elif packing and is_flash(attention := attention_implementation(adapter.reference.config)):
        reason = f"attn_implementation {attention!r} needs the documents of whole rows; use sdpa or eager"
    if reason is not None:
        raise UserError(f"{SETTING} cannot be more than 1: {reason}; leave it out")


def check_batch(adapter: Adapter, batch: Inputs, loss: Loss, *, packing: bool, is_cut: bool) -> None:
    """Raise UserError if a mini-batch's rows cannot be packed, with `packing`, or cut into chunks, with `is_cut`."""
    if packing and not loss.is_of_tokens:
        raise UserError(NOT_PACKED.format(type(loss).__name__))
    if packing and is_cut:
        check_chunks(adapter, is_loss_of_tokens=True, packing=True)
    if images := sorted(batch.keys() & set(adapter.image_keys)):
        option = "packing" if packing else SETTING
        raise UserError(
            f"the batch has {images[0]!r}, and {option} is for rows of text alone, because it would separate tokens "
            f"from their images; leave {option} out"
        )


def borders_of(length: int, count: int, taper: float) -> list[int]:
    """Cut `length` tokens into `count` chunks of at least one token that take equally long.

    A token at the fraction x of the row takes the time 1 + taper x, so the tokens before it take x + taper x^2 / 2.

    Returns:
        The position of each chunk's first token, and at the end `length`.
    """
    borders = [0]
    for place in range(1, count):
        time_before = (1 + taper / 2) * place / count
        fraction = 2 * time_before / (1 + sqrt(1 + 2 * taper * time_before))
        borders.append(min(max(round(length * fraction), borders[-1] + 1), length - (count - place)))
    return [*borders, length]


def cut(inputs: Inputs, chunks: Chunks, adapter: Adapter) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Cut prepared inputs on the CPU; returns the position of each chunk's first token, and the chunk's inputs.

    A chunk has the targets of its own tokens, as `shift_labels`, and the attention mask of all tokens up to its last
    one. The mask also has the documents of a packed row.

    Raises:
        DataError: an entry of the mini-batch has no value for each token, or padding predicts a token.
    """
    ids = adapter.main_input(inputs)
    of_tokens = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    of_tokens["shift_labels"] = adapter.targets(inputs)
    if odd := [name for name, tensor in of_tokens.items() if tensor.shape != ids.shape]:
        raise DataError(
            f"{odd[0]} has the shape {tuple(of_tokens[odd[0]].shape)} and the tokens {tuple(ids.shape)}; to cut rows "
            f"into chunks ({SETTING}), each entry needs one value for each token"
        )
    positions, limit = of_tokens.get("position_ids"), adapter.padding_matters_beyond
    if positions is not None and limit and int(positions.max()) >= limit:
        raise DataError(
            f"position_ids go to {int(positions.max())}, and beyond {limit} positions the rotary embeddings of "
            f"{type(adapter.reference).__name__} follow from the last position of whole rows; to cut rows into chunks "
            f"({SETTING}), leave position_ids out, or use shorter rows"
        )
    mask = of_tokens.pop("attention_mask", torch.ones_like(ids))
    if not adapter.padding_predicts_in_chunks:
        _check_padding(mask, of_tokens["shift_labels"])
    documents = getattr(mask, "documents", None)
    parts = []
    for start, stop in pairwise(borders_of(ids.shape[1], *chunks)):
        own = {name: tensor[:, start:stop] for name, tensor in of_tokens.items()}
        of_chunk = None if documents is None else documents.of_chunk(start, stop)
        parts.append((start, {**own, "attention_mask": KnownMask.of(mask[:, :stop], of_chunk)}))
    return parts


def _check_padding(mask: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise DataError where padding on the left predicts a token.

    Such padding attends to no token. An eager softmax adds the lowest number of its dtype to every masked score, and so
    gives all tokens of the row the same weight, those of later chunks too. In most models sdpa gives zeros instead.
    """
    is_on_the_left = mask.cumsum(dim=1) == 0
    rows = (is_on_the_left & (targets != IGNORED_LABEL)).any(dim=1).nonzero()
    if len(rows):
        raise DataError(
            f"row {int(rows[0])} is padded on the left, and padding predicts its first token from the whole row, which "
            f"a chunk does not have; to cut rows into chunks ({SETTING}), give that token the label "
            f"{IGNORED_LABEL}, pad on the right, or try attn_implementation 'sdpa'"
        )
