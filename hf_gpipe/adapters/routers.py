"""The auxiliary loss of a mixture of experts, whose routers sit on all stages and whose loss is made on the last.

With `output_router_logits` in its configuration a model adds a loss that balances its experts, from the logits of all
its routers (Switch Transformers, arXiv 2101.03961, section 2.2). Each stage sends its routers' logits on, beside the
hidden states, and the model's own forward on the last stage makes the loss of the complete list. The gradients of the
logits travel back the same way.

The loss does not add up over tokens: that of a mini-batch is the mean of its micro-batches' auxiliary losses, added to
the sum of the tokens' losses over their number. With one micro-batch it is the plain model's.
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
    """A router: the block that it is in, under which name its logits travel, and how many experts it chooses from."""

    block: str
    name: str
    num_experts: int
    dtype: torch.dtype


def find_routers(model: PreTrainedModel, blocks: Sequence[str], observation: Observation) -> tuple[Router, ...]:
    """The routers whose logits the model's auxiliary loss is made of, in their order of call; none without the loss.

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
    """A micro-batch's auxiliary loss, as the model adds it to the loss of the tokens: times its coefficient."""
    return _coefficient(model) * output.aux_loss


def _coefficient(model: PreTrainedModel) -> float | None:
    config = model.config.get_text_config()
    return getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", None))


class RouterPort:
    """The router logits of one forward of a stage: received from earlier stages, then those of own blocks."""

    def __init__(self, *, is_last: bool) -> None:
        self.is_last = is_last
        self.logits: tuple[torch.Tensor, ...] = ()

    def open(self, routers: Sequence[Router], carry: Mapping[str, torch.Tensor]) -> None:
        self.logits = tuple(carry[router.name] for router in routers if router.name in carry)

    def close(self) -> None:
        self.logits = ()


def complete(module: nn.Module, port: RouterPort) -> None:
    """Let the output of the module around the blocks have the router logits of all stages so far."""

    def after(output: Any) -> Any:
        port.logits += tuple(getattr(output, "router_logits", None) or ())
        # Before the last stage nobody needs a loss, and one of some of the routers would be wrong.
        output.router_logits = port.logits if port.is_last else None
        return output

    intercept(module, after=after)
