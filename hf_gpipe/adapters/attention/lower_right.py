"""Causal attention of the last tokens to all tokens before them, without a mask of tokens by tokens.

The last Q of T tokens attend to all tokens up to themselves: entry (q, t) of the mask is true where t <= q + T - Q, a
triangle at the lower right. transformers would write that mask out, Q x T numbers, for it knows a shorter way for whole
rows alone. `LowerRightMask` stands for it and takes no memory. Where it reaches transformers' function for scaled
dot-product attention, torch's own causal bias says the same to the fast kernels of CUDA, which read half of the keys
that a mask would read; on a CPU one mask is written out for all layers of a stage. Any other operation finds the mask
that transformers would have made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from hf_gpipe.libraries.torch import no_modes, no_subclass_functions, tree_map
from hf_gpipe.libraries.transformers import repeat_kv

#: Arguments of transformers' function that change nothing of the attention by a `LowerRightMask` where they are these.
_PLAIN: dict[str, tuple[Any, ...]] = {
    **{"softcap": (None,), "position_bias": (None,), "cache": (None,), "output_attentions": (None, False)},
    "is_causal": (None, True),
}


class LowerRightMask(torch.Tensor):
    """The mask (1, 1, Q, T) of the last Q of T tokens: each attends to the tokens up to itself."""

    @classmethod
    def of(cls, queries: int, tokens: int, device: torch.device) -> LowerRightMask:
        with no_modes():  # a tensor without data, such as the planner's, can have no subclass
            placeholder = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
            return placeholder.expand(1, 1, queries, tokens).as_subclass(cls)

    @cached_property
    def written(self) -> torch.Tensor:
        """The mask in memory: true where a token is attended to."""
        queries, tokens = self.shape[-2:]
        return torch.ones((1, 1, queries, tokens), dtype=torch.bool, device=self.device).tril(tokens - queries)

    def added(self, dtype: torch.dtype) -> torch.Tensor:
        """The mask to add to scores of a type: torch would make it of `written` once for each layer, and keep it."""
        if self._added is None or self._added.dtype != dtype:
            self._added = torch.zeros_like(self.written, dtype=dtype).masked_fill_(~self.written, -torch.inf)
        return self._added

    _added: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = args, dict(kwargs or {})
        if func is scaled_dot_product_attention and isinstance(given[1].get("attn_mask"), LowerRightMask):
            return _attention(*args, **given[1])
        if func not in _OF_SHAPE:
            given = tree_map(lambda value: value.written if isinstance(value, LowerRightMask) else value, given)
        with no_subclass_functions():
            return func(*given[0], **given[1])


#: Operations that read nothing of a mask but its shape, type and device.
_OF_SHAPE = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.storage_offset),
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "is_cuda", "requires_grad")),
}


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attn_mask: LowerRightMask, **options: Any
) -> torch.Tensor:
    """`scaled_dot_product_attention` with the mask in the form that the device takes best."""
    bias = causal_lower_right(*attn_mask.shape[-2:]) if query.is_cuda else attn_mask.added(query.dtype)
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, **options)


def lower_right_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: LowerRightMask,
    dropout: float,
    scale: float | None,
) -> torch.Tensor:
    """The attention (B, heads, Q, width) of queries (B, heads, Q, width) to keys and values (B, heads, T, width).

    Keys and values may have fewer heads, each for a group of those of the queries.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.is_cuda:
        params = SDPAParams(query, key, value, None, dropout, False, True)
        if not can_use_flash_attention(params):  # the other kernels of CUDA take no groups
            key, value, groups = repeat_kv(key, groups), repeat_kv(value, groups), 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=groups > 1
    )


def taking_lower_right(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Let transformers' function for scaled dot-product attention take a `LowerRightMask`."""

    @wraps(attend)
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **options: Any,
    ) -> Any:
        plain = all(options.get(name, values[0]) in values for name, values in _PLAIN.items())
        if plain and isinstance(attention_mask, LowerRightMask):
            output = lower_right_attention(query, key, value, attention_mask, dropout, scaling)
            return output.transpose(1, 2).contiguous(), None
        return attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)

    return attention
