"""The optimizers that a training accepts, by transformers' names, and the state that each of them keeps.

They treat each parameter alone, so that a stage's update equals the whole model's.
"""

from __future__ import annotations

from dataclasses import dataclass

#: bitsandbytes keeps the state of smaller tensors, and that of embeddings, in 32 bits.
LEAST_8_BIT_ELEMENTS = 4096
#: Elements of 8 bits that share a scale of 32 bits.
_BLOCK = 256


@dataclass(frozen=True)
class OptimizerState:
    """The size of an optimizer's state.

    Attributes:
        slots: how many values it keeps for each trained element.
        bits: of each value; None: those of the weights. State in pages counts as if it were on the device.
        has_betas: whether it uses `adam_beta1` and `adam_beta2`.
    """

    slots: float
    bits: int | None = None
    has_betas: bool = False

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether it is one of the package bitsandbytes."""
        return self.bits is not None

    def num_bytes(self, count: int, exact_count: int, weight_bytes: float) -> float:
        """The bytes of its state.

        Args:
            count: the number of trained elements.
            exact_count: how many of them are in embeddings or small tensors, which have no state of 8 bits.
            weight_bytes: the bytes of the trained weights.
        """
        if self.bits is None:
            return self.slots * weight_bytes
        coarse = count - exact_count if self.bits == 8 else 0
        return self.slots * ((1 + 4 / _BLOCK) * coarse + 4 * (count - coarse))


#: Adafactor keeps a row and a column of each matrix, under a hundredth of it from 200 by 200 on.
OPTIMIZERS: dict[str, OptimizerState] = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch"), OptimizerState(2, has_betas=True)),
    "adafactor": OptimizerState(0.01),
    "sgd": OptimizerState(0),
    **dict.fromkeys(("adagrad", "rmsprop"), OptimizerState(1)),
    "paged_adamw_32bit": OptimizerState(2, 32, has_betas=True),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), OptimizerState(2, 8, has_betas=True)),
    # Two averages of the gradient, and one of its square.
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), OptimizerState(3, 32, has_betas=True)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), OptimizerState(3, 8, has_betas=True)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), OptimizerState(1, 32, has_betas=True)),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), OptimizerState(1, 8, has_betas=True)),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), OptimizerState(1, 32)),
    "rmsprop_bnb_8bit": OptimizerState(1, 8),
}
