"""Models without a head, transformers' AutoModel, whose hidden states are pooled to one embedding for each row."""

from __future__ import annotations

from functools import cached_property

from torch import nn
from transformers import PreTrainedConfig

from hf_gpipe.adapters.auto_classes import HEADLESS
from hf_gpipe.adapters.classifiers import RowModel
from hf_gpipe.errors import UnsupportedModelError
from hf_gpipe.libraries.transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING


class Embedder(RowModel):
    """Embedding, blocks, and what runs last, a norm or a pooler: its "logits" are the last hidden states (B, T, D).

    The weights of a pooler are not trained, because the hidden states are what goes into it.
    """

    has_head = False
    scores_targets = False

    @cached_property
    def ends_with_head(self) -> bool:  # type: ignore[override]  # of a pooler, not of a norm
        return not self.is_trained(self.layers[-1], self.reference)


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
    classes = HEADLESS.of_family(config)
    if config.is_encoder_decoder or len(classes) != 1 or classes[0].__name__ not in HEADLESS.names:
        raise UnsupportedModelError(
            f"{config.model_type} has no model of embeddings that can be split: it is no decoder-only model and no "
            f"encoder; choose another family, such as {HEADLESS.families}"
        )
    return {"architectures": [classes[0].__name__]}
