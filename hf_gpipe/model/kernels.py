"""Whether a model computes the same with liger's kernels: a tiny clone says so before use, on the stages' device."""

from __future__ import annotations

import torch

from hf_gpipe.adapters import Adapter
from hf_gpipe.adapters.modules.kernels import check_available, kernels_of
from hf_gpipe.adapters.text import TextAdapter, check_reads_text
from hf_gpipe.errors import UnsupportedModelError, one_line
from hf_gpipe.model.clone import attention_of, clone_of, padded_batch
from hf_gpipe.model.exactness import compared_once
from hf_gpipe.model.steps import TOLERANCES, plain_step, split_step

#: The largest difference of a clone, of the gradient norm. The kernels compute in float32 whatever the type of the
#: weights, in another order, and differ by at most 2e-6 on the families that they fit; a wrong kernel by 1e-3 and more.
TOLERANCE = TOLERANCES[torch.float32]
_STAGES = 2


def verify_kernels(adapter: Adapter, device: torch.device) -> None:
    """Compare a tiny clone in stages with kernels with the plain clone, once for equal clones.

    Raises:
        UserError: liger-kernel is not installed, or has no kernels for the model or the device.
        UnsupportedModelError: loss or gradients differ, or the clone does not run.
    """
    adapter = check_reads_text(adapter, "use_liger_kernel")
    check_available(adapter.config.model_type, device)
    compared_once(adapter, f"with kernels {attention_of(adapter)} {device.type}", lambda: _difference(adapter, device))


def _difference(adapter: TextAdapter, device: torch.device) -> float:
    """How far the clone's step with kernels is from that without. Raises UnsupportedModelError if too far."""
    family, matmul = adapter.config.model_type, torch.backends.cuda.matmul
    precision, matmul.fp32_precision = matmul.fp32_precision, "ieee"  # a user may have turned TF32 on
    try:
        model, clone = clone_of(adapter, torch.float32)
        batch, kernels = padded_batch(model), kernels_of(clone.reference)
        expected = plain_step(model, batch, clone)
        model.zero_grad()
        step = split_step(model, clone, batch, _STAGES, kernels=kernels, device=device)
    except Exception as error:
        reason = one_line(str(error), 300)
        raise UnsupportedModelError(
            f"{family}: use_liger_kernel fails on a tiny clone: {reason}; leave it out"
        ) from error
    finally:
        matmul.fp32_precision = precision
    if not kernels:
        raise UnsupportedModelError(f"{family}: no kernel of liger-kernel fits the model; leave use_liger_kernel out")
    if not (difference := step.difference(expected)) <= TOLERANCE:
        raise UnsupportedModelError(
            f"{family}: with use_liger_kernel a tiny clone has other gradients, by {difference:.0e} of their norm; "
            "leave it out"
        )
    return difference
