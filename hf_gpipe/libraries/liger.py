"""The private names of liger-kernel, which a machine may be without: import this module where it is needed."""

from __future__ import annotations

import inspect
from typing import Any

from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
from transformers import PreTrainedModel

#: What the head computes in slices anyway, and what would replace classes or activations of the whole process.
_LEFT_OUT = ("cross_entropy", "fused_linear_cross_entropy", "layer_norm", "relu_squared")


def families() -> tuple[str, ...]:
    """The `model_type` of each family that has kernels."""
    return tuple(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))


def apply_kernels(model: PreTrainedModel) -> None:
    """Change a model in memory as Trainer's `use_liger_kernel` does, but for the kernels of the loss.

    It also replaces names in the module that has the code of the model's family.
    """
    apply: Any = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    apply(model=model, **dict.fromkeys(inspect.signature(apply).parameters.keys() & _LEFT_OUT, False))
