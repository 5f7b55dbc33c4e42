"""Models without a head, transformers' AutoModel, whose hidden states are pooled to one embedding for each row."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
)

from hf_gpipe.adapters.base import Inputs, Tensors
from hf_gpipe.adapters.classifiers import RowModel
from hf_gpipe.adapters.guards import HEADLESS
from hf_gpipe.errors import UnsupportedModelError


class Embedder(RowModel):
    """Embedding, blocks, and what runs last, a norm or a pooler: its "logits" are the last hidden states (B, T, D).

    The weights of a pooler are not trained, because the hidden states are what goes into it.
    """

    has_head = False
    scores_targets = False
    result = "last_hidden_state"

    @cached_property
    def ends_with_head(self) -> bool:  # type: ignore[override]  # of a pooler, not of a norm
        return not self.is_trained(self.layers[-1], self.reference)

    def _is_used(self, inputs: Tensors) -> torch.Tensor:
        return inputs["attention_mask"].bool()

    def targets(self, inputs: Inputs) -> torch.Tensor:
        """Zeros (B, 1), which count the rows."""
        ids = self.main_input(inputs)
        return torch.zeros(len(ids), 1, dtype=torch.long, device=ids.device)


def is_embedder(model_class: type[PreTrainedModel]) -> bool:
    """Whether a class is one of AutoModel's, and no language model."""
    return model_class.__name__ in HEADLESS


def is_causal(model: nn.Module) -> bool:
    """Whether a token sees only the tokens before it. Attention says it of itself; without that the family tells."""
    said = {module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)}
    family = type(getattr(model, "config", None))
    return True in said or (
        not said and family in MODEL_FOR_CAUSAL_LM_MAPPING and family not in MODEL_FOR_MASKED_LM_MAPPING
    )


def as_embedder(config: PreTrainedConfig) -> dict[str, list[str]]:
    """The field by which a language model's configuration becomes that of a model without a head.

    Raises UnsupportedModelError where its family has none that can be split.
    """
    model_class = MODEL_MAPPING.get(type(config), None)
    if config.is_encoder_decoder or not isinstance(model_class, type) or not is_embedder(model_class):
        raise UnsupportedModelError(
            f"{config.model_type} has no model of embeddings that can be split: it is no decoder-only model and no "
            "encoder; choose another family, such as bert, xlm-roberta or qwen3"
        )
    return {"architectures": [model_class.__name__]}


def embedder_of(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of a model whose configuration says that it has no head; None: it has one."""
    name = (config.architectures or [""])[0]
    model_class = MODEL_MAPPING.get(type(config), None)
    return (
        model_class
        if isinstance(model_class, type) and is_embedder(model_class) and model_class.__name__ == name
        else None
    )
