"""Dynamic scaling of the loss for float16. The scale is as large as the gradients of all stages allow.

Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740), section 3.2; the rule and its numbers are
torch.amp.GradScaler's, which sees the gradients of one process only. Here one scale serves the whole pipeline: whether
a gradient overflowed is read off the norm over all stages, which every process has, so that all skip the same updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_gpipe.libraries.torch import multiply_all

#: Where a gradient is infinite even under this scale, the scale is not the reason.
SMALLEST = torch.finfo(torch.float16).tiny
#: The largest float32: GradScaler's scale is a float32 and does not grow beyond it.
_LARGEST = torch.finfo(torch.float32).max


@dataclass
class LossScaler:
    """The factor that the loss is multiplied by; the fields are the entries of GradScaler.state_dict.

    Attributes:
        scale: the present factor.
        growth_factor: the factor of the scale after `growth_interval` updates in a row without an overflow.
        backoff_factor: the factor of the scale after each overflow.
        growth_interval: the number of updates without an overflow after which the scale grows.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    _growth_tracker: int = 0

    def unscale_(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Divide the gradients of this process by the scale, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            multiply_all(gradients, 1.0 / self.scale)

    def update(self, has_overflowed: bool) -> None:
        """Adapt the scale after a step.

        Args:
            has_overflowed: whether any gradient of the whole model was inf or NaN.
        """
        if has_overflowed:
            self.scale *= self.backoff_factor
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            if self.scale * self.growth_factor <= _LARGEST:
                self.scale *= self.growth_factor

    def state_dict(self) -> Any:
        """The entries of GradScaler.state_dict, as JSON values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
