"""The norm of a whole gradient, in one process; tests/test_execution.py has it in several."""

from __future__ import annotations

import pytest
import torch

from hf_gpipe.job.world import World
from hf_gpipe.runtime import gradient_norm as gradient_norms
from hf_gpipe.runtime.gradient_norm import begin_loss_and_norm, clip, gradient_norm, gradients_of


def parameter(gradient: torch.Tensor | None) -> torch.nn.Parameter:
    found = torch.nn.Parameter(torch.zeros(1) if gradient is None else torch.zeros_like(gradient))
    found.grad = gradient
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_is_the_norm_of_all_gradients_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_norms, "_PIECE", 4096)
    monkeypatch.setattr(gradient_norms, "_ROW", 64)
    generator = torch.Generator().manual_seed(0)
    # The first is longer than the pieces that a gradient is read in, and no multiple of them, nor of their rows.
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in ((300, 301), (7,), (1, 1))]
    before = [one.clone() for one in gradients]
    found = gradient_norm(gradients_of(parameter(one) for one in (*gradients, None)), World.current())
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.cat([one.flatten() for one in gradients]).double().norm())
    assert all(map(torch.equal, gradients, before)), "they are read alone"


def test_squares_that_float32_cannot_hold_count() -> None:
    found = gradient_norm([torch.full((4,), 1e-30)], World.current())
    torch.testing.assert_close(found, torch.tensor(2e-30, dtype=torch.float64), rtol=1e-6, atol=0)


def test_without_gradients_it_is_zero() -> None:
    assert gradient_norm([], World.current()) == 0


def test_clipping_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    for max_norm, norm in ((0.5, 2.0), (2.0, 2.0), (2.5, 2.0), (0.5, float("inf")), (0.5, float("nan"))):
        gradients = [torch.randn(4, generator=generator).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
        ours, theirs = ([parameter(one.clone()) for one in gradients] for _ in range(2))
        clip(ours, max_norm, norm)
        torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, torch.tensor(norm, dtype=torch.float64))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0, equal_nan=True)


def test_loss_and_norm_come_together() -> None:
    found = begin_loss_and_norm(torch.tensor(1.5), [torch.tensor([3.0, 4.0])], World.current())()
    assert found.tolist() == [1.5, 5.0]
    assert found.dtype == torch.float64
