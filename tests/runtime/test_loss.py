"""The loss of the last stage is torch's cross-entropy, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hf_gpipe.runtime.loss import token_losses


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_torch(dtype: torch.dtype, label_smoothing: float) -> None:
    torch.manual_seed(0)
    # Logits far apart: probabilities of almost all tokens underflow.
    logits = (torch.randn(2, 5, 7) * 200).to(dtype).requires_grad_()
    targets = torch.randint(0, 7, (2, 5))
    targets[0, 1] = targets[1, 4] = -100
    expected = F.cross_entropy(
        logits.double().reshape(-1, 7), targets.reshape(-1), reduction="none", label_smoothing=label_smoothing
    )
    found = token_losses(logits, targets, label_smoothing)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    weights = torch.randn(10).double()
    (wanted,) = torch.autograd.grad(expected, logits, weights)
    (gradient,) = torch.autograd.grad(found, logits, weights.to(found.dtype))
    torch.testing.assert_close(gradient, wanted)


def test_the_graph_keeps_one_tensor_of_the_size_of_the_logits() -> None:
    logits = torch.randn(1, 4, 50, requires_grad=True)
    large: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        large.extend([tensor] * (tensor.numel() >= logits.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_losses(logits, torch.randint(0, 50, (1, 4)))
    assert len(large) == 1
