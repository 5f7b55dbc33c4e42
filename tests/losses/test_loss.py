"""The loss of the last stage is torch's cross-entropy, in less memory, of logits that may be clipped."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hf_gpipe.errors import UserError
from hf_gpipe.losses.loss import TokenLoss


def of_torch(logits: torch.Tensor, targets: torch.Tensor, smoothing: float, clipping: float | None) -> torch.Tensor:
    flat = logits.reshape(-1, logits.shape[-1])
    if clipping is not None:
        # On the boundary the gradient of torch.clamp is 1 until torch 2.14, and 0 from torch 2.15 on.
        flat = torch.where(flat.abs() > clipping, flat.detach().clamp(-clipping, clipping), flat)
    return F.cross_entropy(flat, targets.reshape(-1), reduction="none", label_smoothing=smoothing)


@pytest.mark.parametrize("clipping", [None, 150.0])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_torch(
    dtype: torch.dtype, label_smoothing: float, clipping: float | None
) -> None:
    torch.manual_seed(0)
    # Logits far apart: probabilities of almost all tokens underflow.
    logits = (torch.randn(2, 5, 7) * 200).to(dtype).requires_grad_()
    targets = torch.randint(0, 7, (2, 5))
    targets[0, 1] = targets[1, 4] = -100
    expected = of_torch(logits.double(), targets, label_smoothing, clipping)
    found = TokenLoss(label_smoothing, clipping)(logits, targets)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(10).double()
    (wanted,) = torch.autograd.grad(expected, logits, weights)
    (gradient,) = torch.autograd.grad(found, logits, weights.to(found.dtype))
    torch.testing.assert_close(gradient, wanted)
    if clipping is not None:
        assert 0 < (logits.abs() > clipping).sum() < logits.numel(), "some logits are clipped, and some are not"


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    vocabulary=st.integers(1, 9),
    scale=st.floats(0.01, 1000),
    clipping=st.none() | st.floats(1e-3, 1e4),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
)
def test_any_logits(
    seed: int, rows: int, vocabulary: int, scale: float, clipping: float | None, smoothing: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, rows, vocabulary, generator=generator, dtype=torch.float64) * scale
    if clipping is not None:
        logits[0, 0, 0] = clipping  # on the boundary the gradient is that of the logit
    logits.requires_grad_()
    targets = torch.randint(0, vocabulary, (1, rows), generator=generator)
    targets[torch.rand(1, rows, generator=generator) < 0.2] = -100
    expected, found = (
        of_torch(logits, targets, smoothing, clipping),
        TokenLoss(smoothing, clipping)(logits, targets),
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    (wanted,), (gradient,) = (torch.autograd.grad(losses.sum(), logits) for losses in (expected, found))
    torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("clipping", [None, 1.0])
def test_gradients_are_the_slopes_of_the_loss(clipping: float | None, smoothing: float) -> None:
    """By finite differences; torch's gradcheck would run one backward several times."""
    torch.manual_seed(1)
    logits, targets = torch.randn(1, 3, 5, dtype=torch.float64) * 1.5, torch.tensor([[4, -100, 0]])
    loss = TokenLoss(smoothing, clipping)

    def total(values: torch.Tensor) -> torch.Tensor:
        return (loss(values, targets) * torch.tensor([1.0, 2.0, -3.0])).sum()

    (gradient,) = torch.autograd.grad(total(logits.requires_grad_()), logits)
    step = 1e-6
    for place in range(logits.numel()):
        shift = torch.zeros(logits.numel(), dtype=torch.float64)
        shift[place] = step
        with torch.no_grad():
            slope = (total(logits + shift.view_as(logits)) - total(logits - shift.view_as(logits))) / (2 * step)
        assert float(gradient.flatten()[place]) == pytest.approx(float(slope), abs=1e-8)


def test_a_clipped_target_s_logit_gets_no_gradient_and_one_on_the_boundary_does() -> None:
    logits = torch.tensor([[[3.0, 0.0, -9.0], [2.0, 0.0, -2.0]]], requires_grad=True)
    TokenLoss(logit_clipping=2.0)(logits, torch.tensor([[0, 0]])).sum().backward()
    assert logits.grad is not None
    clipped, whole = logits.grad[0].tolist()
    assert clipped[0] == clipped[2] == 0 < clipped[1]
    assert whole[0] < 0 < whole[2], "as torch.clamp has it at the boundary"


def test_logits_of_tokens_that_are_ruled_out() -> None:
    logits = torch.tensor([[[1.0, -math.inf, 0.5]]], dtype=torch.float64, requires_grad=True)
    losses = TokenLoss(logit_clipping=20.0)(logits, torch.tensor([[0]]))
    torch.testing.assert_close(losses, of_torch(logits, torch.tensor([[0]]), 0.0, 20.0))
    losses.sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("loss", [TokenLoss(), TokenLoss(0.1), TokenLoss(0.0, 1.0), TokenLoss(0.1, 1.0)])
def test_the_graph_keeps_one_tensor_of_the_size_of_the_logits(loss: TokenLoss) -> None:
    logits = torch.randn(1, 4, 50, requires_grad=True)
    large: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        large.extend([tensor] * (tensor.numel() >= logits.numel()))
        return tensor

    before = logits.detach().clone()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(logits, torch.randint(0, 50, (1, 4)))
    assert len(large) == 1
    assert torch.equal(logits, before), "the logits are the caller's"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, True])
def test_a_magnitude_that_clips_nothing_sensible(value: float) -> None:
    with pytest.raises(UserError, match=r"logit_clipping=.*: expected a (finite )?number above 0 or None$"):
        TokenLoss(logit_clipping=value)
