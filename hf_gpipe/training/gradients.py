"""The gradients of a step, once they are complete in all processes: unscaled, clipped, and applied only if finite."""

from __future__ import annotations

import math

import transformers

from hf_gpipe.errors import NonFiniteError
from hf_gpipe.pipeline import Pipeline
from hf_gpipe.training.arguments import PipelineTrainingArguments
from hf_gpipe.training.loss_scaling import LossScaler

logger = transformers.logging.get_logger(__name__)


def clipped_norm(pipe: Pipeline, args: PipelineTrainingArguments, scaler: LossScaler | None) -> float:
    """Divide the gradients by the loss's scale and clip them; their norm before, over the whole model."""
    if scaler is not None:
        scaler.unscale_(pipe.parameters())
    clips = args.max_grad_norm is not None and args.max_grad_norm > 0
    return float(pipe.clip_grad_norm_(args.max_grad_norm) if clips else pipe.grad_norm())


def makes_update(
    pipe: Pipeline, args: PipelineTrainingArguments, scaler: LossScaler | None, step: int, loss: float, norm: float
) -> bool:
    """Whether a step's gradients are applied. It follows from numbers that every process has, so that all agree.

    Raises NonFiniteError where they are not finite and `on_nonfinite_loss` is "stop".
    """
    has_overflowed = scaler is not None and not math.isfinite(norm)
    if scaler is not None:
        scaler.update(has_overflowed)
    # With a scale, an infinite gradient of a finite loss only says that the scale is too large.
    if math.isfinite(loss) and (has_overflowed or math.isfinite(norm)):
        return not has_overflowed
    if args.on_nonfinite_loss == "stop":
        raise NonFiniteError(
            f"step {step}: the loss is {loss} and the gradient's norm {norm}; lower learning_rate or max_grad_norm, "
            "look at the data, or set on_nonfinite_loss to skip"
        )
    if args.on_nonfinite_loss == "skip" and pipe.topology.is_main:
        logger.warning(f"step {step} is skipped: its loss is {loss}, its gradient's norm {norm}")
    return args.on_nonfinite_loss == "ignore" and not has_overflowed
