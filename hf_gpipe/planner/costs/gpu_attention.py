"""Attention as the kernels of a GPU compute it, for the planner, which traces layers on a CPU.

A GPU's kernels draw dropout inside, leave out what a causal mask hides, also in a member of a group, and accept
keys and values with fewer heads than the queries. A CPU's kernels keep memory for each of these three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hf_gpipe.adapters.attention.lower_right import LowerRightMask
from hf_gpipe.libraries.torch import sdpa_backward_flop_count, sdpa_flop_count


@torch.library.custom_op("hf_gpipe::kernel_attention", mutates_args=())
def kernel_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention whose keys and values (B, G, T, width) may have fewer heads than the queries (B, heads, Q, width).

    Args:
        is_causal: whether the queries are the last tokens, and each attends to the tokens up to itself.

    Returns:
        The output (B, heads, Q, width), and what a kernel keeps of the softmax (B, heads, Q).
    """
    mask = LowerRightMask.of(query.shape[-2], key.shape[-2], query.device).written if is_causal else None
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    laid_out = output.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return laid_out, query.new_zeros(query.shape[:-1], dtype=torch.float32)


@kernel_attention.register_fake
def _(query: Any, key: Any, value: Any, is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, tokens, _width = query.shape
    # As kernels lay it out: putting the heads of a token side by side copies nothing.
    output = query.new_empty((rows, tokens, heads, value.shape[-1])).transpose(1, 2)
    return output, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("hf_gpipe::kernel_attention_backward", mutates_args=())
def kernel_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    softmax: torch.Tensor,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the queries, keys and values."""
    # Written out: under torch 2.11 autograd makes no graph inside of an operation.
    heads, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5
    keys, values = (tensor.repeat_interleave(heads, dim=1) for tensor in (key, value))
    scores = query @ keys.mT * scale
    if is_causal:
        scores = scores.masked_fill(
            ~LowerRightMask.of(query.shape[-2], key.shape[-2], query.device).written, -torch.inf
        )
    weights = scores.softmax(-1)
    of_weights = gradient @ values.mT
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_key, of_value = of_scores.mT @ query, weights.mT @ gradient
    return of_scores @ keys, *(tensor.unflatten(1, (-1, heads)).sum(2) for tensor in (of_key, of_value))


@kernel_attention_backward.register_fake
def _(gradient: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.is_causal = inputs[3]
    ctx.save_for_backward(*inputs[:3], *output)


def _backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return (*kernel_attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal), None)


kernel_attention.register_autograd(_backward, setup_context=_keep)


class AttentionOfAGpu(TorchFunctionMode):
    """Mode in which scaled dot-product attention keeps what it keeps on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            kwargs = kwargs | {"dropout_p": 0.0}
            if isinstance(kwargs.get("attn_mask"), LowerRightMask):
                kwargs |= {"attn_mask": None, "is_causal": True}
            if kwargs.get("attn_mask") is None and len(args) == 3:
                return kernel_attention(*args, kwargs.get("is_causal", False))[0]
        return func(*args, **kwargs)


def attention_flops(query: Any, key: Any, value: Any, is_causal: bool, **_: Any) -> int:
    """The operations of attention's forward. Kernels leave out the keys that a causal mask hides."""
    whole = int(sdpa_flop_count(query.shape, _of_all_heads(key, query), _of_all_heads(value, query)))
    return whole - _hidden(whole, query, key) if is_causal else whole


def attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *others: Any, **_: Any) -> int:
    """The operations of attention's backward, a GPU's or a CPU's, whose last argument says whether it is causal."""
    shapes = query.shape, _of_all_heads(key, query), _of_all_heads(value, query)
    whole = int(sdpa_backward_flop_count(gradient.shape, *shapes))
    return whole - _hidden(whole, query, key) if others[-1] else whole


def _of_all_heads(states: Any, query: Any) -> tuple[int, ...]:
    """The shape of keys or values as if they had as many heads as the queries."""
    return (states.shape[0], query.shape[1], *states.shape[2:])


def _hidden(whole: int, query: Any, key: Any) -> int:
    """The operations that are left out where the queries are the last tokens, and see no later tokens."""
    return whole * query.shape[-2] // (2 * key.shape[-2])
