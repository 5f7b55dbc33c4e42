"""The auxiliary loss of a mixture of experts: its routers are on all stages, the last stage computes the loss.

With `output_router_logits` in its configuration a model adds a loss that balances its experts, from the logits of all
its routers (Switch Transformers, arXiv 2101.03961, section 2.2). Each stage sends its routers' logits on, together with
the hidden states, and the model's own forward on the last stage computes the loss from all of them. The gradients of
the logits are sent back in the same way.

This loss is not a sum over tokens: that of a mini-batch is the mean of its micro-batches' auxiliary losses. It is added
to the mean loss of the tokens. With one micro-batch it is the plain model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_gpipe.adapters.intercept import intercept
from hf_gpipe.adapters.probe import Observation
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
    if routers and _coefficient(model) is None:
        raise UnsupportedModelError(
            f"{model.config.model_type}: the coefficient of the experts' auxiliary loss is not known; set "
            "output_router_logits to false in the model's configuration"
        )
    return tuple(routers)


def auxiliary_loss(model: PreTrainedModel, output: Any) -> torch.Tensor:
    """A micro-batch's auxiliary loss times its coefficient, as the model adds it to the loss of the tokens."""
    return _coefficient(model) * output.aux_loss


def _coefficient(model: PreTrainedModel) -> float | None:
    config = model.config.get_text_config()
    return getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", None))


class RouterPort:
    """The router logits of one forward of a stage: first those received, then those of its own blocks."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last
        self.logits: tuple[torch.Tensor, ...] = ()

    def open(self, routers: Sequence[Router], carry: Mapping[str, torch.Tensor]) -> None:
        self.logits = tuple(carry[router.name] for router in routers if router.name in carry)

    def close(self) -> None:
        self.logits = ()


def complete(module: nn.Module, port: RouterPort) -> None:
    """Let the module around the blocks return the router logits of all stages up to this one."""

    def after(output: Any) -> Any:
        port.logits += tuple(getattr(output, "router_logits", None) or ())
        # Before the last stage no loss is needed, and one computed from some of the routers would be wrong.
        output.router_logits = port.logits if port.is_last else None
        return output

    intercept(module, after=after)
