"""The mask of a chunk: no memory until somebody reads it, and the same numbers as a mask of tokens by tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hf_gpipe.adapters.attention.lower_right import LowerRightMask, lower_right_attention

QUERIES, TOKENS = 3, 7


def written() -> torch.Tensor:
    return torch.ones(1, 1, QUERIES, TOKENS, dtype=torch.bool).tril(TOKENS - QUERIES)


def mask() -> LowerRightMask:
    return LowerRightMask.of(QUERIES, TOKENS, torch.device("cpu"))


def test_its_shape_takes_no_memory() -> None:
    found = mask()
    assert (found.shape, found.dtype, found.device, found.dim()) == ((1, 1, 3, 7), torch.bool, torch.device("cpu"), 4)
    assert "written" not in vars(found)


@pytest.mark.parametrize(
    "read",
    [
        lambda mask: mask[:, :, 1:, :5],
        lambda mask: ~mask,
        lambda mask: mask.data,
        lambda mask: mask.to(torch.float64),
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: torch.cat([mask, mask]),
        lambda mask: mask.expand(2, 4, 3, 7).contiguous(),
    ],
)
def test_any_operation_reads_the_triangle(read: object) -> None:
    found = read(mask())
    assert type(found) is torch.Tensor
    assert torch.equal(found, read(written()))


@pytest.mark.parametrize("groups", [1, 2])
def test_attention(groups: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, QUERIES, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 4 // groups, TOKENS, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    whole = (one.repeat_interleave(groups, 1) for one in (key, value))
    expected = scaled_dot_product_attention(query, *whole, attn_mask=written(), scale=0.3)
    inputs = (query, key, value)
    outer = torch.randn_like(expected)
    found = lower_right_attention(*inputs, mask(), 0.0, 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    pairs = (torch.autograd.grad(output, inputs, outer) for output in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
