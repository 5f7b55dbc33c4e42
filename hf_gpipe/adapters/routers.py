"""The auxiliary loss of a mixture of experts: its routers are on all stages, the last stage computes the loss.

With `output_router_logits` in its configuration a model adds a loss that balances its experts, from the logits of all
its routers (Switch Transformers, arXiv 2101.03961, section 2.2). Each stage sends its routers' logits on, together with
the hidden states, and the model's own forward on the last stage computes the loss from all of them. The gradients of
the logits are sent back in the same way.

This loss is not a sum over tokens: a mini-batch's auxiliary loss is the mean of its micro-batches' losses, and is added
to the mean loss of the tokens. With one micro-batch it equals the plain model's loss.

Nor is it a sum over the tokens of rows that go through the stages in several forwards. Each of these leaves its logits
on the last stage, where the last one computes the loss of whole rows (`RowsInParts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters.modules.intercept import intercept
from hf_gpipe.adapters.observation.probe import Observation
from hf_gpipe.errors import UnsupportedModelError


@dataclass(frozen=True)
class Router:
    """A router: its block, the name under which its logits are sent, its number of experts and its type."""

    block: str
    name: str
    num_experts: int
    dtype: torch.dtype


def find_routers(model: PreTrainedModel, blocks: Sequence[str], observation: Observation) -> tuple[Router, ...]:
    """The routers whose logits the auxiliary loss is computed from, in call order; empty without that loss.

    Raises UnsupportedModelError where the loss's coefficient is not known.
    """
    routers: list[Router] = []
    for block in blocks:
        for seen in observation.routers:
            try:
                module = model.get_submodule(f"{block}.{seen.path}")
            except AttributeError:
                continue
            if type(module).__name__ == seen.class_name:
                routers.append(Router(block, f"router_logits.{len(routers)}", module.weight.shape[0], seen.dtype))
    if routers and coefficient_of(model) is None:
        raise UnsupportedModelError(
            f"{model.config.model_type}: the coefficient of the experts' auxiliary loss is not known; set "
            "output_router_logits to false in the model's configuration"
        )
    return tuple(routers)


def auxiliary_loss(model: PreTrainedModel, output: Any) -> torch.Tensor:
    """A micro-batch's auxiliary loss times its coefficient, as the model adds it to the loss of the tokens."""
    return coefficient_of(model) * output.aux_loss


def coefficient_of(model: PreTrainedModel) -> float | None:
    """The weight of the auxiliary loss in a model's loss; None: it is not known."""
    config = model.config.get_text_config()
    return getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", None))


class RowsInParts(Protocol):
    """The router logits of rows that go through the stages in several forwards, at one of these."""

    @property
    def is_last(self) -> bool:
        """Whether the forward has the last tokens of the rows."""

    def joined(self, logits: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The logits of each router for the forwards so far, of which the last made these."""


class RouterPort:
    """The router logits of one forward of a stage: first those received, then those of its own blocks.

    Of rows that go through the stages in several forwards, all logits so far are joined on the last stage.
    """

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last
        self.logits: tuple[torch.Tensor, ...] = ()
        self._in_parts: RowsInParts | None = None
        #: The sum of the losses of training (True) and of evaluation (False), and their number.
        self._noted: dict[bool, torch.Tensor] = {}

    def open(
        self, routers: Sequence[Router], carry: Mapping[str, torch.Tensor], in_parts: RowsInParts | None = None
    ) -> None:
        self.logits = tuple(carry[router.name] for router in routers if router.name in carry)
        self._in_parts = in_parts

    def close(self) -> None:
        self.logits = ()
        self._in_parts = None

    def complete(self, own: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
        """Take the logits of the stage's own blocks; return the logits from which the model computes its loss, if any.

        Before the last stage and the last tokens no loss is needed, and one computed from some of the routers or tokens
        would be wrong.
        """
        self.logits += tuple(own)
        if self._in_parts is not None and self.is_last:
            self.logits = self._in_parts.joined(self.logits)
        return self.logits if self.is_last and self._has_whole_rows else None

    def loss(self, model: PreTrainedModel, output: Any) -> torch.Tensor:
        """The auxiliary loss of the rows, (): 0 before their last tokens, where backward takes the logits' gradient."""
        if self._has_whole_rows:
            return auxiliary_loss(model, output)
        return torch.stack([logit[:0].float().sum() for logit in self.logits]).sum()

    def note(self, loss: torch.Tensor, *, is_training: bool) -> None:
        """Add the auxiliary loss of a micro-batch, (), to those whose mean is a metric.

        Nothing is read from the device. A loss of 0 is that of rows whose last tokens are still to come.
        """
        loss = loss.detach().double()
        self._noted[is_training] = self._noted.get(is_training, 0.0) + torch.stack([loss, (loss != 0).double()])

    def take(self, *, is_training: bool) -> torch.Tensor:
        """The sum of the losses since the last call and their number, (2,) in float64 on the CPU; they begin anew."""
        return torch.as_tensor(self._noted.pop(is_training, (0.0, 0.0)), dtype=torch.float64, device="cpu")

    @property
    def _has_whole_rows(self) -> bool:
        return self._in_parts is None or self._in_parts.is_last


def complete(module: nn.Module, port: RouterPort) -> None:
    """Let the module around the blocks return the router logits of all stages up to this one."""

    def after(output: Any) -> Any:
        output.router_logits = port.complete(getattr(output, "router_logits", None) or ())
        return output

    intercept(module, after=after)


def is_of_expert(name: str) -> bool:
    """Whether a parameter is of the experts of a mixture, by its Hugging Face name; shared experts are none."""
    return "experts" in name.split(".")
