"""float32 copies of half-precision weights, which the optimizer updates in their place.

An update of a bfloat16 weight that is smaller than 1/256 of it is lost in rounding; in a float32 copy such updates add
up (Micikevicius et al. 2018, Mixed Precision Training, arXiv 1710.03740, section 3.1). The model keeps its half
precision, and so do its gradients, what crosses stage boundaries and the model files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from hf_gpipe.errors import UserError

#: Name of the copy among the state that the optimizer keeps of a parameter, in a checkpoint.
SLOT = "master_weight"


class MasterWeights:
    """The float32 copies of this process's trainable parameters, by their Hugging Face names.

    Args:
        parameters: name -> parameter; those that train must all be in half precision.

    Raises:
        UserError: a parameter is not.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._weights = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        for name, weight in self._weights.items():
            if weight.dtype not in (torch.bfloat16, torch.float16):
                raise UserError(
                    f"fp32_master_weights: {name} is {weight.dtype}, of which no copy in float32 is needed; load or "
                    "create the model in bfloat16, or leave the argument out"
                )
        #: The copies, by name.
        self.copies = {name: torch.nn.Parameter(weight.detach().float()) for name, weight in self._weights.items()}

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Let every step of an optimizer of `copies` begin with the weights' gradients and end with new weights."""
        optimizer.register_step_pre_hook(lambda *_: self._take_gradients())
        optimizer.register_step_post_hook(lambda *_: self._give_values())

    def _take_gradients(self) -> None:
        for name, weight in self._weights.items():
            self.copies[name].grad = None if weight.grad is None else weight.grad.float()

    @torch.no_grad()
    def _give_values(self) -> None:
        for name, weight in self._weights.items():
            weight.copy_(self.copies[name])
            self.copies[name].grad = None

    @contextmanager
    def in_state_of(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context manager in which the optimizer's state also holds the copies, to be saved with it."""
        for copy in self.copies.values():
            optimizer.state[copy][SLOT] = copy.detach()
        try:
            yield
        finally:
            for copy in self.copies.values():
                del optimizer.state[copy][SLOT]

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the copies out of an optimizer's state that was loaded; where there is none, from the weights."""
        for name, weight in self._weights.items():
            copy = self.copies[name]
            copy.copy_(optimizer.state[copy].pop(SLOT, weight))
