"""An attention mask of which the CPU knows whether it hides anything, so that transformers need not ask the device.

Before transformers makes a mask for attention it asks whether anything is padded: where nothing is, scaled dot-product
attention needs no mask and can take its fast kernels. The question reads a value of the 2-D mask, in every forward of
every stage, and on CUDA the host then waits for the device. Here the answer travels with the mask.

The mask functions of transformers are looked up by the name of the attention implementation
(`transformers.masking_utils.AttentionMaskInterface`). Each gets the answer in the form of its own arguments: no mask
where nothing is padded, and no search for a shortcut where something is. They return what they would have returned.

A mask that the model makes itself, from token ids say, is no `KnownMask`, and about it transformers still asks.

The mask of a row into which documents are packed knows their lengths. transformers would find the documents by their
position ids, and would ask the device for that too. Here the mask of each document is made as if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from hf_gpipe.adapters.attention.documents import Documents, mask_of_documents
from hf_gpipe.adapters.attention.lower_right import LowerRightMask
from hf_gpipe.libraries.torch import no_subclass_functions
from hf_gpipe.libraries.transformers import ALL_MASK_ATTENTION_FUNCTIONS

_MASKS = ("attention_mask", "decoder_attention_mask")
#: Operations whose result has 0 where the mask that they are called with has it; `==` only when compared with 1.
_EQUAL = {torch.Tensor.eq, torch.Tensor.__eq__}
_KEEPING = {torch.Tensor.to, torch.Tensor.contiguous, torch.Tensor.pin_memory, torch.Tensor.view} | _EQUAL
_ALL = {torch.all, torch.Tensor.all}


class KnownMask(torch.Tensor):
    """A mask (B, T) with 0 for padding, else 1, which knows whether it has any 0.

    `all` gives the answer on the CPU. Copies, and whether the mask is 1, are masks that know it too; every other
    operation gives a plain tensor.

    Attributes:
        is_padded: whether any entry is not 1.
        documents: the documents that are packed into the only row; None: every row is one text.
    """

    is_padded: bool
    documents: Documents | None

    @classmethod
    def of(cls, mask: torch.Tensor, documents: Documents | None = None) -> KnownMask:
        """Return `mask` as a `KnownMask` of the same memory. It reads the values, so `mask` should be on the CPU."""
        return cls._with(mask, not bool((mask == 1).all()), documents)

    @classmethod
    def _with(cls, mask: torch.Tensor, is_padded: bool, documents: Documents | None) -> KnownMask:
        known = mask.as_subclass(cls)
        known.is_padded = is_padded
        known.documents = documents
        return known

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        mask, *others = args
        if func in _ALL and isinstance(mask, KnownMask) and not others and not kwargs:
            return torch.tensor(not mask.is_padded)
        with no_subclass_functions():
            result = func(*args, **(kwargs or {}))
        if func in _KEEPING and isinstance(mask, KnownMask) and (func not in _EQUAL or others == [1]):
            is_copy = result is not mask and result.shape == mask.shape
            return cls._with(result, mask.is_padded, mask.documents) if is_copy else result
        return result


def with_known_masks(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs of a micro-batch with their 2-D masks as `KnownMask`."""
    return {
        name: KnownMask.of(value) if name in _MASKS and value.dim() == 2 else value for name, value in inputs.items()
    }


def _answering(make_mask: Callable[..., Any], *, takes_lower_right: bool) -> Callable[..., Any]:
    """Let a mask function of transformers take the answer of a `KnownMask`.

    Args:
        make_mask: the function.
        takes_lower_right: whether the attention that the mask is for takes a `LowerRightMask`.
    """

    def of_text(*args: Any, **options: Any) -> Any:
        """The mask of rows without padding, or of one document."""
        if takes_lower_right and _is_lower_right(**options):
            return LowerRightMask.of(options["q_length"], options["kv_length"], options["device"])
        return make_mask(*args, attention_mask=None, **options)

    @wraps(make_mask)
    def make(*args: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
        if isinstance(attention_mask, KnownMask):
            if attention_mask.documents is not None:
                return mask_of_documents(attention_mask.documents, of_text, options)
            if not attention_mask.is_padded:
                return of_text(*args, **options)
            options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            attention_mask = attention_mask.as_subclass(torch.Tensor)
        if attention_mask is None:
            return of_text(*args, **options)
        return make_mask(*args, attention_mask=attention_mask, **options)

    return make


def _is_lower_right(
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **other: Any,
) -> bool:
    """Whether the queries are the last of all tokens, and each attends to all up to itself."""
    is_last = isinstance(q_offset, int) and 0 < q_offset == kv_length - q_length and not kv_offset
    return q_length > 1 and is_last and allow_is_causal_skip and (local_size is None or kv_length < local_size)


def _install() -> None:
    for name in ("sdpa", "eager", *(n for n in ALL_MASK_ATTENTION_FUNCTIONS if n.startswith(("flash", "flex")))):
        make_mask = ALL_MASK_ATTENTION_FUNCTIONS[name]
        ALL_MASK_ATTENTION_FUNCTIONS[name] = _answering(make_mask, takes_lower_right=name == "sdpa")


_install()
