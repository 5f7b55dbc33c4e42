"""Cuts the rows of a micro-batch into chunks of tokens, which go through the stages one after another.

One long row then fills the pipeline as many micro-batches would, and a stage stores the activations of a chunk instead
of a whole row's (TeraPipe, arXiv 2102.07988; Seq1F1B, arXiv 2406.03488; SlimPipe, arXiv 2504.14519). All chunks are
equally long, or later chunks are shorter because their tokens attend to more tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from math import sqrt

import torch

from hf_gpipe.adapters import IGNORED_LABEL, Adapter, StageModel
from hf_gpipe.adapters.attention.documents import is_flash
from hf_gpipe.adapters.attention.known_mask import KnownMask
from hf_gpipe.adapters.modules.dropout import mix
from hf_gpipe.adapters.modules.head import DeferredLogits
from hf_gpipe.adapters.text import TextAdapter
from hf_gpipe.errors import DataError, UserError
from hf_gpipe.libraries.transformers import attention_implementation, cache_argument
from hf_gpipe.modes.chunks.cache import RowCache
from hf_gpipe.modes.chunks.key import SETTING
from hf_gpipe.runtime.cutting import check_text_alone
from hf_gpipe.runtime.micro_batch import Batch, MicroBatch, SharedStates
from hf_gpipe.schedule.groups import Groups
from hf_gpipe.settings.pipeline import DecidedConfig

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Chunk(MicroBatch):
    """A chunk of the rows of a micro-batch; all of its chunks are a group.

    Attributes:
        sequence: the index of the micro-batch before it was cut, the same for all of its chunks.
        start: the position of the chunk's first token in the rows.
        length: the number of tokens in a whole row, T.
    """

    sequence: int = 0
    start: int = 0
    length: int = 0

    def run(
        self, stage: StageModel, carry: Inputs, deferred: DeferredLogits | None, shared: SharedStates
    ) -> dict[str, torch.Tensor]:
        """Run a stage's model with the keys and values of the chunks before this one, to which its own are added."""
        if self.sequence not in shared:
            shared[self.sequence] = RowCache(stage, self.length)
        rows = shared[self.sequence]
        assert isinstance(rows, RowCache)
        routers = rows.routers_at(self.start, *stage.adapter.main_input(self.inputs).shape)
        inputs = {**self.inputs, cache_argument(stage.model): rows.at(self.start), "use_cache": True}
        return stage(inputs, carry, self.seed, deferred, self.rows, routers, self.length)

    def leave(self, shared: SharedStates) -> None:
        """Backward comes to the first chunk of a row last."""
        if not self.start:
            del shared[self.sequence]


@dataclass(frozen=True)
class ChunkCutter:
    """Cuts rows into chunks (`hf_gpipe.runtime.cutting.Cutter`). Rows with fewer tokens than chunks have fewer."""

    groups: Groups

    @property
    def most(self) -> int:
        return self.groups.size

    def check(self, adapter: Adapter, batch: Batch, *, packing: bool) -> None:
        if packing:
            check_chunks(adapter, reads_tokens_only=True, packing=True)
        else:
            check_text_alone(adapter, batch, SETTING)

    def cut(self, micro_batches: Sequence[MicroBatch], adapter: Adapter) -> Sequence[MicroBatch]:
        groups = self.groups.within(min(adapter.main_input(whole.inputs).shape[1] for whole in micro_batches))
        if groups.size == 1:
            return micro_batches
        own = (chunk for whole in micro_batches for chunk in members(whole, groups, adapter))
        return [replace(chunk, index=number) for number, chunk in enumerate(own, micro_batches[0].index)]


def cutter(config: DecidedConfig) -> ChunkCutter | None:
    """The cutter of rows into chunks, by a decided configuration; None: rows are whole."""
    return ChunkCutter(config.chunks.groups) if config.chunks.groups.size > 1 else None


def members(whole: MicroBatch, groups: Groups, adapter: Adapter) -> list[Chunk]:
    """The chunks of a micro-batch, with its index. A chunk's seed also depends on its own number."""
    length = adapter.main_input(whole.inputs).shape[1]
    same = {own.name: getattr(whole, own.name) for own in fields(MicroBatch) if own.init}
    of_all = replace(Chunk(**same), group_size=groups.size, sequence=whole.index, length=length)
    return [
        replace(
            of_all,
            inputs=part,
            seed=mix(whole.seed, number),
            rows=whole.rows._replace(start=whole.rows.start + start),
            start=start,
        )
        for number, (start, part) in enumerate(cut(whole.inputs, groups, adapter))
    ]


def check_chunks(adapter: Adapter, *, reads_tokens_only: bool, packing: bool) -> None:
    """Raise UserError where rows cannot be cut into chunks, because of the model, the loss or packed documents."""
    model = type(adapter.reference).__name__
    reason = None
    if not isinstance(adapter, TextAdapter):
        reason = f"{model} does not read text"
    elif adapter.config.is_encoder_decoder:
        reason = f"{model} has an encoder, whose tokens attend to later ones"
    elif adapter.labels_rows:
        reason = f"{model} scores rows as a whole"
    elif not reads_tokens_only:
        reason = "the loss needs whole rows"
    elif packing and is_flash(attention := attention_implementation(adapter.reference.config)):
        reason = f"attn_implementation {attention!r} needs the documents of whole rows; use sdpa or eager"
    if reason is not None:
        raise UserError(f"{SETTING} cannot be more than 1: {reason}; leave it out")


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


def cut(inputs: Inputs, groups: Groups, adapter: Adapter) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Cut prepared inputs on the CPU; returns the position of each chunk's first token, and the chunk's inputs.

    A chunk has the targets of its own tokens, as `shift_labels`, and the attention mask of all tokens up to its last
    one. The mask also has the documents of a packed row.

    Raises:
        DataError: an entry of the mini-batch has no value for each token, or padding predicts a token.
    """
    ids = adapter.main_input(inputs)
    per_token = {name: tensor for name, tensor in inputs.items() if name != "labels"}
    per_token["shift_labels"] = adapter.targets(inputs)
    if odd := [name for name, tensor in per_token.items() if tensor.shape != ids.shape]:
        raise DataError(
            f"{odd[0]} has the shape {tuple(per_token[odd[0]].shape)} and the tokens {tuple(ids.shape)}; to cut rows "
            f"into chunks ({SETTING}), each entry needs one value for each token"
        )
    positions, limit = per_token.get("position_ids"), adapter.padding_matters_beyond
    if positions is not None and limit and int(positions.max()) >= limit:
        raise DataError(
            f"position_ids go to {int(positions.max())}, and beyond {limit} positions the rotary embeddings of "
            f"{type(adapter.reference).__name__} follow from the last position of whole rows; to cut rows into chunks "
            f"({SETTING}), leave position_ids out, or use shorter rows"
        )
    mask = per_token.pop("attention_mask", torch.ones_like(ids))
    if not adapter.padding_predicts_in_groups:
        _check_padding(mask, per_token["shift_labels"])
    documents = getattr(mask, "documents", None)
    parts = []
    for start, stop in pairwise(borders_of(ids.shape[1], *groups)):
        own = {name: tensor[:, start:stop] for name, tensor in per_token.items()}
        of_chunk = None if documents is None else documents.cut(start, stop)
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
