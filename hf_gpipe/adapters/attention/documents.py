"""Attention over documents that are packed into one row: no token sees another document.

The mask of such a row is block-diagonal. Each block is the mask that transformers makes for the document alone, so
windows and chunks start anew with each document. A mask over the whole row takes memory and time that grow with the
square of the row. Where the model attends by transformers' `sdpa` function, none is made: the function is called once
for each document, most often without any mask. Flash attention gets the borders of the documents in its own form.

Where a row goes through the stages in several forwards, the tokens of a forward attend to those of their own documents
in the row so far: a forward may begin and end inside of documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_gpipe.adapters.attention.lower_right import LowerRightMask, taking_lower_right
from hf_gpipe.errors import UserError
from hf_gpipe.libraries.torch import plain_results
from hf_gpipe.libraries.transformers import ALL_ATTENTION_FUNCTIONS, attention_implementation, heeds_attention

MakeMask = Callable[..., Any]


@dataclass(frozen=True)
class Documents:
    """The documents of a packed row.

    Attributes:
        lengths: the number of tokens of each document, in order; for a part of the row, only the tokens up to its end.
        has_whole_mask: whether attention gets one mask over the whole row; otherwise it runs document by document.
        query_lengths: the number of tokens that attend to each document: the target's, where a decoder attends to an
            encoder, and those of a part of the row.
        skipped: the number of tokens of the row before the first document.
        earlier: the number of tokens of the first document before its first query.
    """

    lengths: tuple[int, ...]
    has_whole_mask: bool
    query_lengths: tuple[int, ...]
    skipped: int = 0
    earlier: int = 0

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        model: PreTrainedModel,
        *,
        is_compiled: bool = False,
        query_lengths: Sequence[int] | None = None,
    ) -> Documents:
        """Return the documents of a row for a model. Without `query_lengths` their own tokens attend to them.

        Raises:
            UserError: the model's attention function cannot keep documents apart.
        """
        name = attention_implementation(model.config)
        if name.startswith("flex"):
            raise UserError(
                f"attn_implementation={name!r} cannot keep packed documents apart here; use sdpa, eager or "
                "flash_attention_2"
            )
        queries = lengths if query_lengths is None else query_lengths
        return cls(tuple(lengths), is_compiled or not attends_by_document(model), tuple(queries))

    def cut(self, start: int, stop: int) -> Documents:
        """The documents that the tokens from `start` to `stop` (exclusive) of their row belong to."""
        pieces = [(begin, min(end, stop)) for begin, end in pairwise([0, *accumulate(self.lengths)])]
        own = [(begin, end) for begin, end in pieces if end > max(begin, start)]
        return replace(
            self,
            lengths=tuple(end - begin for begin, end in own),
            query_lengths=tuple(end - max(begin, start) for begin, end in own),
            skipped=own[0][0],
            earlier=start - own[0][0],
        )


def attends_by_document(model: PreTrainedModel) -> bool:
    """Whether attention over a packed row is computed for each document by itself."""
    name: str = attention_implementation(model.config)
    # Models without this flag have attention code of their own, which knows tensors of a mask alone.
    return is_flash(name) or (name == "sdpa" and heeds_attention(model))


def is_flash(attn_implementation: str) -> bool:
    """Whether attention is a kernel that takes the borders of documents."""
    return "flash" in attn_implementation


class MaskOfDocuments(torch.Tensor):
    """Stands for the mask (1, 1, T, S) of a packed row where attention runs document by document.

    Its values take no memory and are NaN, so that code that uses it as a mask gives no numbers that look right.

    Attributes:
        lengths: tokens of each document.
        query_lengths: tokens of each document that attend to it.
        skipped: tokens before the documents.
        masks: the mask of each document alone; None: the document needs no mask.
    """

    lengths: tuple[int, ...]
    query_lengths: tuple[int, ...]
    skipped: int
    masks: tuple[torch.Tensor | None, ...]

    __torch_function__ = plain_results


def mask_of_documents(documents: Documents, make_mask: MakeMask, options: Mapping[str, Any]) -> Any:
    """Return the mask of a packed row.

    Args:
        documents: the documents of the row.
        make_mask: makes a mask, as a mask function of transformers without a padding mask does.
        options: the keyword arguments of `make_mask` for the whole row, or for a part of it and the part's keys.
    """
    if is_flash(attention_implementation(options["config"])):
        return None
    if documents.has_whole_mask:
        options = {**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    # Keys of a part may begin behind the row, where no window reaches.
    hidden = options["kv_offset"] - documents.skipped
    missing, skipped = max(hidden, 0), max(-hidden, 0)
    lengths = (documents.lengths[0] - missing, *documents.lengths[1:])
    offsets = [(documents.earlier, missing), *[(0, 0)] * (len(lengths) - 1)]
    places = [
        {"q_length": queries, "kv_length": keys, "q_offset": of_queries, "kv_offset": of_keys}
        for queries, keys, (of_queries, of_keys) in zip(documents.query_lengths, lengths, offsets, strict=True)
    ]
    alone = {tuple(place.values()): make_mask(**{**options, **place}) for place in places}
    masks = tuple(alone[tuple(place.values())] for place in places)
    shape = (1, 1, sum(documents.query_lengths), skipped + sum(lengths))
    if documents.has_whole_mask:
        dtype = masks[0].dtype
        whole = masks[0].new_full(shape, False if dtype == torch.bool else torch.finfo(dtype).min)
        row, column = 0, skipped
        for queries, keys, mask in zip(documents.query_lengths, lengths, masks, strict=True):
            whole[..., row : row + queries, column : column + keys] = mask
            row, column = row + queries, column + keys
        return whole
    result = torch.full((), torch.nan, device=options["device"]).expand(shape).as_subclass(MaskOfDocuments)
    result.lengths, result.query_lengths, result.skipped = lengths, documents.query_lengths, skipped
    result.masks = masks
    return result


def _by_document(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Let an attention function of transformers run once for each document of a packed row. A forward of a part of the
    row may have a `LowerRightMask`."""
    with_lower_right = taking_lower_right(attend)

    @wraps(attend)
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **options: Any,
    ) -> Any:
        if not isinstance(attention_mask, MaskOfDocuments):
            run = with_lower_right if isinstance(attention_mask, LowerRightMask) else attend
            return run(module, query, key, value, attention_mask, *args, **options)
        # (B, heads, T, width); `split` has one backward for all documents.
        queries = query.split(attention_mask.query_lengths, dim=2)
        sizes = [attention_mask.skipped, *attention_mask.lengths]
        keys, values = (tensor.split(sizes, dim=2)[1:] for tensor in (key, value))
        alone = [
            with_lower_right(module, *tensors, mask, *args, **options)[0]
            for *tensors, mask in zip(queries, keys, values, attention_mask.masks, strict=True)
        ]
        return torch.cat(alone, dim=1), None

    return forward


ALL_ATTENTION_FUNCTIONS["sdpa"] = _by_document(ALL_ATTENTION_FUNCTIONS["sdpa"])
