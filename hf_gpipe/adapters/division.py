"""How the tensors of a stage are divided among processes: each is whole, unless a mode divides it."""

from __future__ import annotations

import torch
from torch import nn

from hf_gpipe.adapters.modules.weight_gradients import WeightGradients


class StageDivision:
    """The division of a stage's tensors among processes, of which this one has a part. Here each tensor is whole."""

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This process's part of a parameter or buffer, or of a tensor of its shape, in memory of its own."""
        return whole

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole that `part` takes a part of. Every process that has a part calls it."""
        return part

    def whole_shape(self, name: str, part: torch.Tensor) -> torch.Size:
        """The shape of the whole that a part is of, where the processes run the same stage."""
        return part.shape

    def writes(self, name: str) -> bool:
        """Whether this process writes a tensor that others have, or have parts of."""
        return True

    def counted(self, name: str, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The part of the gradient of this process's part that counts in sums over processes, each on one."""
        return [gradient]

    def rows(self, name: str) -> tuple[tuple[int, int] | None, tuple[tuple[int, int], ...]]:
        """The run of a tensor's rows that this process has, and those of all processes; None, (): it has the whole."""
        return None, ()

    def logits(self, part: torch.Tensor) -> torch.Tensor:
        """The logits of the whole vocabulary (..., V) from those that the stage's forward returns."""
        return part

    @property
    def has_sums(self) -> bool:
        """Whether gradients of layers' inputs are summed over the processes."""
        return False

    def overlap(self, model: nn.Module, gradients: WeightGradients) -> None:
        """Let the layers compute their weights' gradients, which `gradients` receives, during these sums."""


def replace_tensor(model: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Put a parameter or a buffer in the place of another one, wherever a model has that."""
    every = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for path, held in list(every):
        if held is old:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
